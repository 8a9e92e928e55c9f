"""Status page of `dev`: statistics of its executor, and the texts of the last results that the model read.

`serve` never shows a result. `dev` reads results from the cards, as it does for the lines that it prints.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from openapi_tool.local.caller import ERRORS
from openapi_tool.telemetry.health_server import health_server

_UPDATE_S = 1.0
_MAX_RESULTS = 20
_MAX_RESULT_CHARS = 4_000

Ask = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""Function that returns the statistics of all replicas; `dev` has one."""


@dataclass(slots=True)
class DevStatistics:
    """Statistics of the stack's executor, with the results of its last calls by tool call id."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    _results: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def record_result(self, tool_call_id: str, text: str) -> None:
        """Store what the model read, truncated to 4,000 characters, for the last 20 calls."""
        self._results[tool_call_id] = (
            text if len(text) <= _MAX_RESULT_CHARS else f"{text[:_MAX_RESULT_CHARS]} … ({len(text):,} characters)"
        )
        if len(self._results) > _MAX_RESULTS:
            self._results.popitem(last=False)

    def now(self) -> Mapping[str, Any]:
        """Return the newest statistics; empty before the executor answers."""
        if not self.stats:
            return {}
        last = [{**call, "read": self._results.get(call["tool_call_id"])} for call in self.stats["last"]]
        return {**self.stats, "last": last}

    async def follow(self, ask: Ask) -> None:
        """Ask the executor once a second until cancelled."""
        while True:
            with suppress(*ERRORS):
                self.stats = next(iter(await ask()), {})
            await asyncio.sleep(_UPDATE_S)


@asynccontextmanager
async def dev_page(ask: Ask, port: int, statistics: DevStatistics) -> AsyncIterator[str]:
    """Serve the page on loopback; yields its URL. Raises OSError if it cannot listen."""
    following = asyncio.create_task(statistics.follow(ask), name="page")
    try:
        async with health_server("127.0.0.1", port, None, statistics) as bound_port:
            yield f"http://127.0.0.1:{bound_port}/"
    finally:
        following.cancel()
        await asyncio.wait([following])
