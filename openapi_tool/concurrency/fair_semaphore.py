"""Semaphore with fair shares for projects (the tenants), and for the agents of each.

Whatever is scarce in a process and used by all projects has one: for example worker processes, searches of stored texts
and database connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openapi_tool.fair_queue import FairQueue

_RESERVED_SHARE = 1 / 8  # of the permits, which no single project can take, so that others need not wait


class FairSemaphore:
    """Semaphore whose next permit goes to the waiting project that holds the fewest; equal projects take turns.

    A turn is as long as its permit cost (`give`). So a project that has cost little is next, however many others wait.
    The waiting agents of one project take turns, too. A project holds at most `max_per_project` permits, by default
    seven eighths of them.

    A task that holds a permit must not wait for another one, or tasks may deadlock.
    """

    def __init__(self, permits: int, max_per_project: int | None = None) -> None:
        self._free = permits
        self._max_per_project = max_per_project or permits - int(permits * _RESERVED_SHARE)
        self._held: Counter[str] = Counter()  # permits by project
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def used(self) -> int:
        """Number of held permits."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Number of waiting tasks."""
        return len(self._waiting)

    def waiting_of(self, project: str) -> int:
        """Return the number of waiting tasks of a project."""
        return self._waiting.count(project)

    @asynccontextmanager
    async def permit(self, project: str, agent: str = "") -> AsyncIterator[None]:
        """Hold a permit."""
        await self.take(project, agent)
        try:
            yield
        finally:
            self.give(project)

    async def take(self, project: str, agent: str = "") -> None:
        """Acquire a permit, to be released by `give`; a cancelled wait acquires none."""
        if self._free and self._may_hold_more(project):
            self._grant(project)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(project, agent, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            was_granted = waiter.done() and not waiter.cancelled()  # in the same iteration of the loop
            if was_granted:
                self.give(project, cost=0.0)
            else:
                self._waiting.discard(project, agent, waiter)
            raise

    def give(self, project: str, cost: float = 1.0) -> None:
        """Release a permit of a project; `cost` is how much it was used, in any unit, such as seconds."""
        self._waiting.turns.charge(project, cost)
        self._free += 1
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        self._grant_free()

    def _grant_free(self) -> None:
        """Grant free permits to waiting tasks."""
        while self._free:
            project = self._waiting.next(self._may_hold_more, rank=self._held.__getitem__)
            if project is None:
                return
            waiter = self._waiting.pop(project)
            if not waiter.done():  # else its task was cancelled in this iteration of the loop
                self._grant(project)
                waiter.set_result(None)

    def _may_hold_more(self, project: str) -> bool:
        return self._held[project] < self._max_per_project

    def _grant(self, project: str) -> None:
        self._waiting.turns.serve(project, cost=0.0)  # the cost is known, and charged, when it is given back
        self._free -= 1
        self._held[project] += 1
