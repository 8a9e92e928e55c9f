"""The status page of `dev`: numbers of its first executor, and last results, which the page of `serve` lacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cachetools import FIFOCache

from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.local.caller import ERRORS
from openapi_tool.telemetry.health_server import health_server

_UPDATE_S = 1.0
_SILENT_S = 5.0  # after which an answer is old: the page says that the executor is silent
_MAX_RESULTS = 20
_MAX_RESULT_CHARS = 4_000

AskStatistics = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""Function that returns the statistics of all replicas; the page shows those of the first."""


@dataclass(slots=True)
class DevStatistics:
    """Statistics of the stack's first executor, and the last results."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    _answered_at: float = field(default_factory=time.monotonic)
    _results: FIFOCache[str, str] = field(default_factory=lambda: FIFOCache(_MAX_RESULTS))

    def record_result(self, tool_call_id: str, text: str) -> None:
        """Keep what the model read, truncated to 4,000 characters, for the last 20 calls."""
        if len(text) > _MAX_RESULT_CHARS:
            text = f"{text[:_MAX_RESULT_CHARS]} … ({len(text):,} characters)"
        self._results[tool_call_id] = text

    def now(self) -> Mapping[str, Any]:
        """Return the statistics, `silent` if they are an earlier answer; empty before an executor answers."""
        if not self.stats:
            return {}
        last_calls = [{**call, "read": self._results.get(call["tool_call_id"])} for call in self.stats.get("last", ())]
        shown = {**self.stats, "last": last_calls}
        if time.monotonic() - self._answered_at > _SILENT_S:
            shown["silent"] = True
        return shown

    async def follow(self, ask: AskStatistics) -> None:
        """Ask the executors once a second."""
        while True:
            with suppress(*ERRORS):  # NATS cannot be reached: the last answer stays
                answers = await ask()
                if answers:
                    self.stats = answers[0]
                    self._answered_at = time.monotonic()
            await asyncio.sleep(_UPDATE_S)


@asynccontextmanager
async def dev_page(ask: AskStatistics, port: int, statistics: DevStatistics) -> AsyncIterator[str]:
    """Serve the page on loopback; yield its URL. Raises OSError."""
    following = asyncio.create_task(statistics.follow(ask), name="page")
    try:
        async with health_server("127.0.0.1", port, None, statistics) as bound_port:
            yield f"http://127.0.0.1:{bound_port}/"
    finally:
        await cancel_until_ended(following)
