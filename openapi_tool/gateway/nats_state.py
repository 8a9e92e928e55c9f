"""State of a gateway in NATS, shared by its replicas; limits, budgets, switches and session key with executors, too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import orjson
from cachetools import LRUCache
from pydantic import TypeAdapter, ValidationError

from openapi_tool.bootstrap import Bootstrap, derived_key
from openapi_tool.concurrency.background import in_background
from openapi_tool.gateway.call_row import CALLS_DAYS, CallRow
from openapi_tool.gateway.state import TOKENS
from openapi_tool.gateway.usage import FIGURES
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.quota_monitor import QuotaMonitor
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS, RecordStore
from openapi_tool.nats_records.replica_statistics import answering_stats
from openapi_tool.nats_records.replicas import replica_count
from openapi_tool.nats_records.session_key import shared_session_key
from openapi_tool.nats_records.switches import SwitchMonitor
from openapi_tool.settings.model import with_values
from openapi_tool.state.nats_kv import Bucket
from openapi_tool.state.nats_stream import ListedKvRecords, Stream, held_messages
from openapi_tool.state.nats_texts import PartedTexts, Patience
from openapi_tool.state.port import ListedRecords, Records
from openapi_tool.telemetry.health import QUOTAS, Dependency
from openapi_tool.tools.switches import Switches

log = logging.getLogger(__name__)

_HOUR_S = 3_600
_ROW = TypeAdapter(CallRow)
_MIB = 2**20
_MAX_SUMMED = 500
"""Agents of which a process remembers sums."""

TEXT_BUCKETS = {"whole": 512 * _MIB, "untaken": 64 * _MIB, "idempotent": 64 * _MIB}
"""Buckets of texts, and how many bytes each holds at most."""

CALLS = Stream(
    "openapi_tool_gateway_calls", "openapi_tool.gateway_calls", ttl_s=CALLS_DAYS * 86_400, max_bytes=256 * _MIB
)
"""Stream of the rows of calls, one message each with the subject PREFIX.PROJECT.AGENT.CALL."""


def text_bucket(name: str) -> Bucket:
    """Return a bucket of texts, which has no TTL yet."""
    return Bucket(f"openapi_tool_gateway_{name}", max_bytes=TEXT_BUCKETS[name], drops_oldest=True)


TOKEN_BUCKET = Bucket(f"openapi_tool_gateway_{TOKENS}", max_bytes=64 * _MIB, max_value_bytes=64 * 1024, restricted=True)


def gateway_bus(options: BusOptions) -> BusOptions:
    """Return the connection of a gateway, whose replies arrive on an inbox of its own."""
    inbox = NatsUser.GATEWAY.inbox_prefix(options.nats.inbox_prefix)
    listed_by = f"openapi-tool nats permissions --for {NatsUser.GATEWAY}"
    return replace(options, nats=with_values(options.nats, inbox_prefix=inbox), listed_by=listed_by)


def stored_tokens(client: BusClient, replicas: int) -> ListedKvRecords:
    """Return the records of tokens."""
    return ListedKvRecords(client, replace(TOKEN_BUCKET, replicas=replicas))


class NatsState:
    """See `GatewayState`. `quotas` is the connection to the NATS of limits and budgets, which may be another one."""

    def __init__(self, bootstrap: Bootstrap, client: BusClient, quotas: BusClient, replicas: int) -> None:
        self._client = client
        self._replicas = replicas
        self._patience = Patience(client)
        clock = ServerClock()
        self.time = clock.time
        limits, budgets = RecordStore(LIMITS), RecordStore(BUDGETS)
        quota_replicas = replicas if quotas is client else quotas.bus.nats.replicas or 1
        limits.connect(quotas, quota_replicas)
        budgets.connect(quotas, quota_replicas)
        self.limits: Records = limits
        self.budgets: Records = budgets
        self.tokens: ListedRecords = stored_tokens(client, replicas)
        self.rows = NatsRows(self._patience, replicas)
        self.monitor = QuotaMonitor(quotas, clock, bootstrap.health, quota_replicas)

    def texts(self, bucket: str, ttl_s: float) -> PartedTexts:
        """Return the texts of a bucket, which expire `ttl_s` seconds after they were stored."""
        return PartedTexts(self._patience, replace(text_bucket(bucket), ttl_s=ttl_s, replicas=self._replicas))

    async def session_key(self) -> bytes:
        """See `GatewayState`; it is derived from that of the executors, whose cursors differ."""
        return derived_key(await shared_session_key(self._client, self._replicas), "gateway")

    @asynccontextmanager
    async def operated(
        self, name: str, use: Callable[[Switches], None], snapshot: Callable[[], Mapping[str, Any]]
    ) -> AsyncIterator[None]:
        """See `GatewayState`. The snapshot holds `name`. The switches are read first: no call runs before."""
        del name
        switches = SwitchMonitor(self._client, use)
        await switches.load()
        following = in_background(switches.run(), "switches")
        try:
            async with answering_stats(self._client, snapshot):
                yield
        finally:
            following.cancel()
            await asyncio.wait([following])


@asynccontextmanager
async def open_nats_state(
    bootstrap: Bootstrap, on_unavailable: Callable[[str], None] | None = None
) -> AsyncIterator[NatsState]:
    """Connect to the NATS of the settings, and to that of the quotas; wait while one is unavailable.

    `on_unavailable` is told why. Raises Unavailable if TLS is required and no server offers it.
    """
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            connected(replace(gateway_bus(bootstrap.bus), on_trouble=on_unavailable))
        )
        quotas = client
        if bootstrap.quotas is not None:
            quotas = await stack.enter_async_context(connected(replace(bootstrap.quotas, on_trouble=on_unavailable)))
        bootstrap.health.dependencies[QUOTAS] = Dependency()
        state = NatsState(bootstrap, client, quotas, await replica_count(client, bootstrap.durable))
        await state.monitor.check()  # sets the clock
        monitoring = in_background(state.monitor.run(), "quotas")
        try:
            yield state
        finally:
            monitoring.cancel()
            await asyncio.wait([monitoring])


class _Sums:
    """Figures of an agent's calls by hour and tool; `read_to` is the last row that was counted."""

    def __init__(self, stream_created: object) -> None:
        self.stream_created = stream_created
        self.read_to = 0
        self.hours: dict[int, dict[str, dict[str, int]]] = {}

    def add(self, sequence: int, row: CallRow) -> None:
        self.read_to = sequence
        tools = self.hours.setdefault(int(row.at // _HOUR_S), {})
        figures = tools.setdefault(row.tool, dict.fromkeys(FIGURES, 0))
        added = (1, row.tokens, row.requests, row.cached, row.error_code is not None, row.truncated, row.retries)
        for name, value in zip(FIGURES, added, strict=True):
            figures[name] += value

    def by_tool(self, since: float) -> list[dict[str, Any]]:
        oldest = time.time() // _HOUR_S - CALLS_DAYS * 24
        self.hours = {hour: tools for hour, tools in self.hours.items() if hour >= oldest}
        first = since // _HOUR_S
        sums: dict[str, dict[str, int]] = {}
        for tools in (tools for hour, tools in self.hours.items() if hour >= first):
            for tool, figures in tools.items():
                known = sums.setdefault(tool, dict.fromkeys(FIGURES, 0))
                for name, value in figures.items():
                    known[name] += value
        ordered = sorted(sums.items(), key=lambda each: (-each[1]["tokens"], each[0]))
        return [{"tool": tool, **figures} for tool, figures in ordered]


class NatsRows:
    """Rows of calls in a stream; see `CallRows`."""

    def __init__(self, patience: Patience, replicas: int = 1) -> None:
        self._patience = patience
        self._stream = replace(CALLS, replicas=replicas)
        self._sums: LRUCache[tuple[str, str], _Sums] = LRUCache(_MAX_SUMMED)
        self._reading = asyncio.Lock()

    async def store(self, row: CallRow) -> None:
        """Store a row."""
        subject = f"{CALLS.prefix}.{row.project}.{row.agent}.{row.tool_call_id}"
        with self._patience.errors():
            await self._stream.publish(self._patience.client, subject, orjson.dumps(asdict(row)))

    async def by_tool(self, project: str, agent: str, since: float) -> list[dict[str, Any]]:
        """See `CallRows`; counts whole hours. A process reads each row once, for one request after the other."""
        async with self._reading:
            with self._patience.errors():
                created = await self._stream.created(self._patience.client)
            sums = self._sums.get((project, agent))
            if sums is None or sums.stream_created != created:
                sums = self._sums[project, agent] = _Sums(created)
            if created is not None:
                async with aclosing(self._rows(f"{project}.{agent}.*", sums.read_to + 1)) as rows:
                    async for sequence, row in rows:
                        sums.add(sequence, row)
        return sums.by_tool(since)

    async def of_project(self, project: str, call_id: str = "*") -> list[CallRow]:
        """Return the rows of a project, or only that of one call. Raises Unavailable."""
        with self._patience.errors():
            if await self._stream.created(self._patience.client) is None:
                return []
        async with aclosing(self._rows(f"{project}.*.{call_id}", 1)) as rows:
            return [row async for _, row in rows]

    async def _rows(self, subject: str, first: int) -> AsyncGenerator[tuple[int, CallRow], None]:
        held = held_messages(self._patience.client, CALLS.name, f"{CALLS.prefix}.{subject}", first)
        with self._patience.errors():
            async with aclosing(held):
                async for each in held:
                    if (row := _decoded(each.data)) is not None:
                        yield each.sequence, row


def _decoded(data: bytes) -> CallRow | None:
    """Return a row; None for what is damaged or of a newer version, which else would hide all others for good."""
    try:
        row = _ROW.validate_json(data, strict=True)
        datetime.fromtimestamp(row.at, UTC)
    except (ValidationError, ValueError, OverflowError):
        log.warning(
            "a message in %s is no row of a call, or of a newer version; it is not counted",
            CALLS.name,
            extra={"action": "rows.unreadable"},
        )
        return None
    return row
