"""Rows of calls in a stream of NATS: one message for each finished call, from which a process sums up usage."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import orjson
from cachetools import LRUCache
from pydantic import TypeAdapter, ValidationError

from openapi_tool.gateway.call_row import CALLS_DAYS, CallRow
from openapi_tool.gateway.usage import FIGURES
from openapi_tool.state.nats_stream import Stream, held_messages
from openapi_tool.state.nats_texts import Patience

log = logging.getLogger(__name__)

CALLS = Stream(
    "openapi_tool_gateway_calls", "openapi_tool.gateway_calls", ttl_s=CALLS_DAYS * 86_400, max_bytes=256 * 2**20
)
"""Stream of the rows of calls, one message each with the subject PREFIX.PROJECT.AGENT.CALL."""

_HOUR_S = 3_600
_ROW = TypeAdapter(CallRow)
_MAX_AGENTS = 500
"""Agents whose sums a process remembers; those of another one are counted anew from the rows when it asks."""

Figures = dict[str, int]
"""Sum of each figure (`usage.FIGURES`) by its name, such as `tokens`."""


class NatsRows:
    """Rows of calls in a stream (`CallRows`), which drops rows that are older than 90 days, and the oldest when full.

    Every method raises Unavailable.
    """

    def __init__(self, patience: Patience, replicas: int = 1) -> None:
        self._patience = patience
        self._stream = replace(CALLS, replicas=replicas)
        self._sums: LRUCache[tuple[str, str], _Sums] = LRUCache(_MAX_AGENTS)  # by project and agent
        self._reading = asyncio.Lock()  # so that no row is counted twice

    async def store(self, row: CallRow) -> None:
        """Publish a row to the stream."""
        subject = f"{CALLS.prefix}.{row.project}.{row.agent}.{row.tool_call_id}"
        with self._patience.errors():
            await self._stream.publish(self._patience.client, subject, orjson.dumps(asdict(row)))

    async def by_tool(self, project: str, agent: str, since: float) -> list[dict[str, Any]]:
        """Return the figures of an agent's calls since the hour of `since`, by tool, the most expensive first.

        A process reads each row once and remembers the sums. So it reads only the rows that are new.
        """
        async with self._reading:
            with self._patience.errors():
                stream_created = await self._stream.created(self._patience.client)
            sums = self._sums.get((project, agent))
            if sums is None or sums.stream_created != stream_created:
                sums = self._sums[project, agent] = _Sums(stream_created)
            if stream_created is not None:  # else there is no stream, as no row was stored yet
                async with aclosing(self._rows(f"{project}.{agent}.*", sums.read_to + 1)) as rows:
                    async for sequence, row in rows:
                        sums.add(sequence, row)
        return sums.by_tool(since)

    async def of_project(self, project: str, call_id: str = "*") -> list[CallRow]:
        """Return the rows of a project, or only the row of one call."""
        with self._patience.errors():
            if await self._stream.created(self._patience.client) is None:
                return []
        async with aclosing(self._rows(f"{project}.*.{call_id}", 1)) as rows:
            return [row async for _, row in rows]

    async def _rows(self, subject: str, first: int) -> AsyncGenerator[tuple[int, CallRow], None]:
        """Yield sequence and row of the messages from the sequence `first` on.

        Their subject matches PREFIX and `subject`, such as `my_project.*.*`.
        """
        messages = held_messages(self._patience.client, CALLS.name, f"{CALLS.prefix}.{subject}", first)
        with self._patience.errors():
            async with aclosing(messages):
                async for message in messages:
                    row = _decoded(message.data)
                    if row is not None:
                        yield message.sequence, row


class _Sums:
    """Figures of an agent's calls, summed up by hour and tool.

    - `stream_created`: when the stream of the rows was created. In a new stream the sequences begin anew.
    - `read_to`: sequence in the stream of the last row that was counted.
    - `hours`: figures by hour since the epoch and then by tool.
    """

    def __init__(self, stream_created: object) -> None:
        self.stream_created = stream_created
        self.read_to = 0
        self.hours: dict[int, dict[str, Figures]] = {}

    def add(self, sequence: int, row: CallRow) -> None:
        """Count a row."""
        self.read_to = sequence
        figures_by_tool = self.hours.setdefault(int(row.at // _HOUR_S), {})
        figures_of_row = {
            "calls": 1,
            "tokens": row.tokens,
            "requests": row.requests,
            "cache_hits": int(row.cached),
            "errors": int(row.error_code is not None),
            "truncated": int(row.truncated),
            "retries": row.retries,
        }
        _add_up(figures_by_tool, row.tool, figures_of_row)

    def by_tool(self, since: float) -> list[dict[str, Any]]:
        """Return the figures from the hour of `since` on, by tool, the most expensive first; forget expired hours."""
        oldest_hour = time.time() // _HOUR_S - CALLS_DAYS * 24
        self.hours = {hour: tools for hour, tools in self.hours.items() if hour >= oldest_hour}
        first_hour = since // _HOUR_S
        sums: dict[str, Figures] = {}
        for hour, figures_by_tool in self.hours.items():
            if hour >= first_hour:
                for tool, figures in figures_by_tool.items():
                    _add_up(sums, tool, figures)
        most_expensive_first = sorted(sums, key=lambda tool: (-sums[tool]["tokens"], tool))
        return [{"tool": tool, **sums[tool]} for tool in most_expensive_first]


def _add_up(sums: dict[str, Figures], tool: str, figures: Mapping[str, int]) -> None:
    """Add figures to the sums of a tool."""
    sums_of_tool = sums.setdefault(tool, dict.fromkeys(FIGURES, 0))
    for name in FIGURES:
        sums_of_tool[name] += figures[name]


def _decoded(data: bytes) -> CallRow | None:
    """Return a row; None if it is damaged or of a newer version: the others are to be counted still."""
    try:
        row = _ROW.validate_json(data, strict=True)
        datetime.fromtimestamp(row.at, UTC)  # raises ValueError or OverflowError for a time that has no date
    except (ValidationError, ValueError, OverflowError):
        log.warning(
            "a message in %s is no row of a call, or of a newer version; it is not counted",
            CALLS.name,
            extra={"action": "rows.unreadable"},
        )
        return None
    return row
