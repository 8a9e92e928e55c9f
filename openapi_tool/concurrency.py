"""Helpers for asyncio."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_never

from openapi_tool.fair_queue import FairQueue

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T], grace_s: float) -> T:
    """Run `work` in its own task; return its result or raise its exception, however often the caller is cancelled.

    With `asyncio.shield` alone a cancelled caller would hand back a command that the work still acknowledges. Here the
    caller's next await raises the cancellation. Work that still runs `grace_s` seconds later is cancelled, which raises
    CancelledError.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _end(task, grace_s)
    if not task.cancelled() and (caller := asyncio.current_task()):
        caller.cancel()
    return task.result()


async def _end(task: asyncio.Task[Any], grace_s: float) -> None:
    """Wait until a task has ended, cancelling it after `grace_s` seconds; swallow cancellations of the caller."""
    loop = asyncio.get_running_loop()
    give_up_at: float | None = loop.time() + grace_s
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task], timeout=None if give_up_at is None else max(0.0, give_up_at - loop.time()))
            task.cancel()  # no effect if it has ended
            give_up_at = None


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled with the caller.

    Before Python 3.12 `asyncio.wait_for`, which nats-py and asyncpg use, drops a cancellation that arrives in the same
    iteration as the result. In a task of its own `work` cannot drop that of the caller.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
        return task.result()
    finally:
        task.cancel()


def in_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that serves many calls; in its caller's context it would log that call's ids for other projects."""
    return asyncio.create_task(work, name=name, context=Context())


def raise_if_cancelled(cause: Exception) -> None:
    """Raise CancelledError from `cause` if the current task was cancelled.

    An exception group, or an exception in a `finally` block, can replace the CancelledError. It would be committed as
    a failure of the call, although the command must be handed back.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from cause


SMALL = 64 * 1024
"""Bytes or characters that take a fraction of a millisecond, and no memory worth counting."""

_RESERVED_SHARE = 1 / 8  # of the permits, which a single project cannot take, so that others need not wait


class FairSemaphore:
    """Semaphore whose next permit goes to the waiting project that holds the fewest; equal projects take turns.

    A project holds at most `max_per_project` permits, by default seven eighths of them. A task that holds a permit must
    not wait for another one, or tasks may deadlock.
    """

    def __init__(self, permits: int, max_per_project: int | None = None) -> None:
        self._free = permits
        self._max_per_project = max_per_project or permits - int(permits * _RESERVED_SHARE)
        self._held: Counter[str] = Counter()
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def used(self) -> int:
        """Number of held permits."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Number of waiting tasks."""
        return len(self._waiting)

    @asynccontextmanager
    async def permit(self, project: str) -> AsyncIterator[None]:
        """Hold a permit."""
        await self.take(project)
        try:
            yield
        finally:
            self.give(project)

    async def take(self, project: str) -> None:
        """Acquire a permit, to be released by `give`; a cancelled wait acquires none."""
        if self._free and self._may_hold(project):
            self._grant(project)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(project, "", waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(project)  # granted in the iteration of the cancellation
            else:
                self._waiting.discard(project, "", waiter)
            raise

    def give(self, project: str) -> None:
        """Release a permit of a project."""
        self._free += 1
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        while self._free and (following := self._waiting.next(self._may_hold, self._held.__getitem__)) is not None:
            waiter = self._waiting.pop(following)
            self._waiting.turns.serve(following, 1.0)
            if not waiter.done():  # else its task was cancelled in this iteration
                self._grant(following)
                waiter.set_result(None)

    def _may_hold(self, project: str) -> bool:
        return self._held[project] < self._max_per_project

    def _grant(self, project: str) -> None:
        self._free -= 1
        self._held[project] += 1


async def retried(
    attempt: Callable[[], Awaitable[T]],
    on: type[Exception] | tuple[type[Exception], ...],
    wait: Callable[[RetryCallState], float],
    stop: Callable[[RetryCallState], bool] = stop_never,
    before_sleep: Callable[[RetryCallState], Any] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Return the result of `attempt`, repeated after each exception of a type in `on`; raise the last one.

    The first attempt runs without tenacity, which takes 60 µs of CPU, but counts as tenacity's first.
    """
    try:
        return await attempt()
    except on as error:
        failed = [error]

    async def again() -> T:
        if failed:
            raise failed.pop()
        return await attempt()

    # retry_if_exception_type would make a reference cycle.
    is_retryable = retry_if_exception(lambda error: isinstance(error, on))
    retrying = AsyncRetrying(
        retry=is_retryable, sleep=sleep, wait=wait, stop=stop, before_sleep=before_sleep, reraise=True
    )
    try:
        return await retrying(again)
    finally:
        retrying.iter_state.reset()  # a reference cycle, which only garbage collection would free


class KeyedLock:
    """FIFO locks by key; each exists only while it is held."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[bool]:
        """Hold the lock of a key; yield whether it had to be awaited."""
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = deque()
        else:
            await self._turn(key, waiting)
        try:
            yield waiting is not None
        finally:
            self._release(key)

    async def _turn(self, key: Hashable, waiting: deque[asyncio.Future[None]]) -> None:
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it holds the lock already
                self._release(key)
            raise

    def _release(self, key: Hashable) -> None:
        waiting = self._waiting[key]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[key]
