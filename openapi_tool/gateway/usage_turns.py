"""When a project may ask for its usage: reading many rows occupies the state, which all calls need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cachetools import LRUCache

from openapi_tool.concurrency.keyed_lock import KeyedLock

_PAUSE_FACTOR = 9  # so that a project occupies the state for at most a tenth of the time
_MAX_PAUSE_S = 10.0
_MAX_PROJECTS = 10_000  # whose last request is remembered


class UsageTurns:
    """Lets a project make one request after another, each after a pause of nine times the duration of the last one."""

    def __init__(self) -> None:
        self._running = KeyedLock()
        self._not_before: LRUCache[str, float] = LRUCache(_MAX_PROJECTS)  # on the event loop's clock

    @asynccontextmanager
    async def turn(self, project: str) -> AsyncIterator[None]:
        """Wait for a project's turn; it ends with the context."""
        now = asyncio.get_running_loop().time
        async with self._running.hold(project):
            await asyncio.sleep(max(0.0, self._not_before.get(project, 0.0) - now()))
            began = now()
            try:
                yield
            finally:
                pause_s = min(_PAUSE_FACTOR * (now() - began), _MAX_PAUSE_S)
                self._not_before[project] = now() + pause_s
