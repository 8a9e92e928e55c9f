"""Semaphore with fair shares for projects."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

_RESERVED_SHARE = 1 / 8  # of the permits, which a single project cannot take, so that others need not wait


class FairSemaphore:
    """Semaphore whose next permit goes to the waiting project that holds the fewest; FIFO among equals.

    Among projects that hold equally many the one with the least `cost`, if given, is first: what it has used recently.
    A project holds at most `max_per_project` permits, by default seven eighths of them. A task that holds a permit must
    not wait for another one, or tasks may deadlock.
    """

    def __init__(
        self, permits: int, max_per_project: int | None = None, cost: Callable[[str], float] = lambda _: 0.0
    ) -> None:
        self._free = permits
        self._cost = cost
        self._max_per_project = max_per_project or permits - int(permits * _RESERVED_SHARE)
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def used(self) -> int:
        """Number of held permits."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Number of waiting tasks."""
        return sum(map(len, self._waiting.values()))

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
        if self._free and self._held[project] < self._max_per_project:
            self._grant(project)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(project, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(project)  # granted in the iteration of the cancellation
            else:
                self._leave(project, waiter)
            raise

    def give(self, project: str) -> None:
        """Release a permit of a project."""
        self._free += 1
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        while self._waiting and self._free and (following := self._next()) is not None:
            queue = self._waiting.pop(following)
            waiter = queue.popleft()
            if queue:
                self._waiting[following] = queue  # last in the dictionary: equal projects take turns
            if not waiter.done():  # else its task was cancelled in this iteration
                self._grant(following)
                waiter.set_result(None)

    def _grant(self, project: str) -> None:
        self._free -= 1
        self._held[project] += 1

    def _next(self) -> str | None:
        """Return the waiting project that is served next, None if each holds its maximum."""
        project = min(self._waiting, key=lambda each: (self._held[each], self._cost(each)), default=None)
        return project if project is not None and self._held[project] < self._max_per_project else None

    def _leave(self, project: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.get(project, deque())
        with suppress(ValueError):
            queue.remove(waiter)
        if not queue:
            self._waiting.pop(project, None)
