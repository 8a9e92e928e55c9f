"""Shield work from the cancellation of the task that awaits it.

`asyncio.shield` alone is not enough: the cancelled caller stops waiting at once while the work continues, so that the
caller would hand back a command that the work then acknowledges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T], grace_s: float) -> T:
    """Run `work` in its own task; return its result or raise its exception, however often the caller is cancelled.

    A cancellation is deferred until `work` has ended and then requested again, so the caller's next await raises it.
    Work that still runs `grace_s` seconds after a cancellation is cancelled, which raises CancelledError. It is never
    left running.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _end(task, grace_s)
    if not task.cancelled():
        _cancel_caller()
    return task.result()


async def _end(task: asyncio.Task[Any], grace_s: float) -> None:
    """Wait until a task has ended, cancelling it after `grace_s` seconds; ignore cancellations of the caller."""
    loop = asyncio.get_running_loop()
    give_up_at: float | None = loop.time() + grace_s
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task], timeout=None if give_up_at is None else max(0.0, give_up_at - loop.time()))
            task.cancel()  # no effect if it has ended
            give_up_at = None


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the caller is.

    Before Python 3.12 `asyncio.wait_for`, which nats-py and asyncpg use, drops a cancellation that arrives in the same
    iteration as the result. `work` runs in its own task, so that the cancellation of the caller is never dropped.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
        return task.result()
    finally:
        task.cancel()


def in_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that serves many calls, without the context of the one that starts it.

    Otherwise every line that it logs would have the ids of that call, which may be another project's.
    """
    return asyncio.create_task(work, name=name, context=Context())


def cancellation_requested() -> bool:
    """Return whether the current task has a cancellation that was requested and not handled yet."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled(cause: Exception) -> None:
    """Raise CancelledError from `cause` if the current task was cancelled.

    An exception group, or an exception in a `finally` block, can replace the original CancelledError. Taken for a
    failure of the call it would be committed as a result, although the command must be handed back.
    """
    if cancellation_requested():
        raise asyncio.CancelledError from cause


def _cancel_caller() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.cancel()
