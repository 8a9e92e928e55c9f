"""Requests of agents for what their calls have cost, spaced out so that they leave the state to the calls.

Each request reads the rows of many calls, and the state is shared by all projects.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cachetools import LRUCache

from openapi_tool.concurrency.keyed_lock import KeyedLock
from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.state import CallRows

_PAUSES_PER_READ = 9
"""A project's pause after a read, as a multiple of the read's duration: it occupies the state a tenth of the time."""

_MAX_PAUSE_S = 10.0  # an agent waits for its answer

_MAX_PROJECTS = 10_000
"""Projects whose pause is remembered; with more, that of the project that asked longest ago is forgotten."""


class UsageRequests:
    """Reads the usage of callers, for each project one request at a time.

    After a request the project's next one waits for nine times as long as the request took, at most ten seconds.
    """

    def __init__(self, rows: CallRows) -> None:
        self._rows = rows
        self._lock_of_project = KeyedLock()
        self._pause_ends: LRUCache[str, float] = LRUCache(_MAX_PROJECTS)  # by project, on the event loop's clock

    async def by_tool(self, caller: Caller, since: float) -> list[dict[str, Any]]:
        """Return what a caller's calls have cost since a time in seconds since the epoch. Raises Unavailable."""
        project = caller.project_id
        now = asyncio.get_running_loop().time
        async with self._lock_of_project.hold(project):
            await asyncio.sleep(max(0.0, self._pause_ends.get(project, 0.0) - now()))
            began = now()
            try:
                return await self._rows.by_tool(project, caller.agent_id, since)
            finally:
                ended = now()
                pause_s = min(_PAUSES_PER_READ * (ended - began), _MAX_PAUSE_S)
                self._pause_ends[project] = ended + pause_s
