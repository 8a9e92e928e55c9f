"""State of a gateway in NATS, which its replicas share.

Limits, budgets, switches and the session key are shared with a kernel's executors, too, if they use the same NATS.
"""

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
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS, BucketSpec, RecordStore
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
_MAX_AGENTS = 500
"""Agents whose sums a process remembers; those of another one are counted anew from the rows when it asks."""

TEXT_BUCKETS = {"whole": 512 * _MIB, "untaken": 64 * _MIB, "idempotent": 64 * _MIB}
"""Buckets of texts, and how many bytes each holds at most."""

CALLS = Stream(
    "openapi_tool_gateway_calls", "openapi_tool.gateway_calls", ttl_s=CALLS_DAYS * 86_400, max_bytes=256 * _MIB
)
"""Stream of the rows of calls, one message each with the subject PREFIX.PROJECT.AGENT.CALL."""


def text_bucket(name: str) -> Bucket:
    """Return a bucket of texts, still without the TTL, which the settings say."""
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
    """Implements `GatewayState` over connections to NATS.

    `client` is connected to the NATS of the gateway, and `quotas` to that of limits and budgets. Without `quotas.nats`
    in the settings both are the same connection. `replicas` is the number of replicas of new streams and buckets.
    """

    def __init__(self, bootstrap: Bootstrap, client: BusClient, quotas: BusClient, replicas: int) -> None:
        self._client = client
        self._replicas = replicas
        self._patience = Patience(client)
        clock = ServerClock()
        self.time = clock.time
        quota_replicas = replicas if quotas is client else quotas.bus.nats.replicas or 1
        self.limits: Records = _connected_records(LIMITS, quotas, quota_replicas)
        self.budgets: Records = _connected_records(BUDGETS, quotas, quota_replicas)
        self.tokens: ListedRecords = stored_tokens(client, replicas)
        self.rows = NatsRows(self._patience, replicas)
        self.monitor = QuotaMonitor(quotas, clock, bootstrap.health, quota_replicas)

    def texts(self, bucket: str, ttl_s: float) -> PartedTexts:
        """Return the texts of a bucket, which expire `ttl_s` seconds after they were stored."""
        return PartedTexts(self._patience, replace(text_bucket(bucket), ttl_s=ttl_s, replicas=self._replicas))

    async def session_key(self) -> bytes:
        """Return the key of session identities and cursors, which is derived from the key of the executors.

        So a cursor of the gateway is of no use with an executor, and the other way round. Raises Unavailable.
        """
        return derived_key(await shared_session_key(self._client, self._replicas), "gateway")

    @asynccontextmanager
    async def operated(
        self, name: str, use: Callable[[Switches], None], snapshot: Callable[[], Mapping[str, Any]]
    ) -> AsyncIterator[None]:
        """While the context is open pass an operator's switches to `use`, and answer requests for statistics.

        The switches are read before the context opens, so that no call runs without them. Raises Unavailable.
        """
        del name  # the snapshot holds it
        switches = SwitchMonitor(self._client, use)
        await switches.load()
        following = in_background(switches.run(), "switches")
        try:
            async with answering_stats(self._client, snapshot):
                yield
        finally:
            following.cancel()
            await asyncio.wait([following])


def _connected_records(bucket: BucketSpec, client: BusClient, replicas: int) -> RecordStore:
    records = RecordStore(bucket)
    records.connect(client, replicas)
    return records


@asynccontextmanager
async def open_nats_state(
    bootstrap: Bootstrap, on_unavailable: Callable[[str], None] | None = None
) -> AsyncIterator[NatsState]:
    """Connect to the NATS of the settings, and to that of the quotas if it is another one.

    While one of them is unavailable, this waits, and tells `on_unavailable` why. Raises Unavailable if TLS is required
    and no server offers it.
    """
    async with AsyncExitStack() as stack:
        bus = replace(gateway_bus(bootstrap.bus), on_trouble=on_unavailable)
        client = await stack.enter_async_context(connected(bus))
        quotas = client
        if bootstrap.quotas is not None:
            quotas_bus = replace(bootstrap.quotas, on_trouble=on_unavailable)
            quotas = await stack.enter_async_context(connected(quotas_bus))
        bootstrap.health.dependencies[QUOTAS] = Dependency()
        state = NatsState(bootstrap, client, quotas, await replica_count(client, bootstrap.durable))
        await state.monitor.check()  # sets the clock
        monitoring = in_background(state.monitor.run(), "quotas")
        try:
            yield state
        finally:
            monitoring.cancel()
            await asyncio.wait([monitoring])


class NatsRows:
    """Rows of calls in a stream (`CallRows`), which drops rows that are older than 90 days, and the oldest when full.

    Every method raises Unavailable.
    """

    def __init__(self, patience: Patience, replicas: int = 1) -> None:
        self._patience = patience
        self._stream = replace(CALLS, replicas=replicas)
        self._sums: LRUCache[tuple[str, str], _Sums] = LRUCache(_MAX_AGENTS)  # by project and agent
        self._reading = asyncio.Lock()

    async def store(self, row: CallRow) -> None:
        """Publish a row to the stream."""
        subject = f"{CALLS.prefix}.{row.project}.{row.agent}.{row.tool_call_id}"
        with self._patience.errors():
            await self._stream.publish(self._patience.client, subject, orjson.dumps(asdict(row)))

    async def by_tool(self, project: str, agent: str, since: float) -> list[dict[str, Any]]:
        """Return the figures of an agent's calls since the hour of `since`, by tool, the most expensive first.

        A process reads each row once and remembers the sums; so one request after the other is served.
        """
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
        """Return the rows of a project, or only the row of one call."""
        with self._patience.errors():
            if await self._stream.created(self._patience.client) is None:
                return []
        async with aclosing(self._rows(f"{project}.*.{call_id}", 1)) as rows:
            return [row async for _, row in rows]

    async def _rows(self, subject: str, first: int) -> AsyncGenerator[tuple[int, CallRow], None]:
        """Yield sequence and row of the messages whose subject matches, from the sequence `first` on."""
        held = held_messages(self._patience.client, CALLS.name, f"{CALLS.prefix}.{subject}", first)
        with self._patience.errors():
            async with aclosing(held):
                async for each in held:
                    row = _decoded(each.data)
                    if row is not None:
                        yield each.sequence, row


class _Sums:
    """Figures of an agent's calls, summed up by hour and tool.

    - `stream_created`: when the stream of the rows was created. In a new stream the sequences begin anew.
    - `read_to`: sequence in the stream of the last row that was counted.
    - `hours`: hour since the epoch → tool → name of the figure → sum.
    """

    def __init__(self, stream_created: object) -> None:
        self.stream_created = stream_created
        self.read_to = 0
        self.hours: dict[int, dict[str, dict[str, int]]] = {}

    def add(self, sequence: int, row: CallRow) -> None:
        """Count a row."""
        self.read_to = sequence
        tools = self.hours.setdefault(int(row.at // _HOUR_S), {})
        figures = tools.setdefault(row.tool, dict.fromkeys(FIGURES, 0))
        is_error = row.error_code is not None
        # In the order of FIGURES.
        added = (1, row.tokens, row.requests, row.cached, is_error, row.truncated, row.retries)
        for name, value in zip(FIGURES, added, strict=True):
            figures[name] += value

    def by_tool(self, since: float) -> list[dict[str, Any]]:
        """Return the figures from the hour of `since` on, by tool, the most expensive first; forget expired hours."""
        oldest = time.time() // _HOUR_S - CALLS_DAYS * 24
        self.hours = {hour: tools for hour, tools in self.hours.items() if hour >= oldest}
        first = since // _HOUR_S
        sums: dict[str, dict[str, int]] = {}
        for hour, tools in self.hours.items():
            if hour >= first:
                _add_up(sums, tools)
        ordered = sorted(sums.items(), key=lambda each: (-each[1]["tokens"], each[0]))
        return [{"tool": tool, **figures} for tool, figures in ordered]


def _add_up(sums: dict[str, dict[str, int]], tools: Mapping[str, Mapping[str, int]]) -> None:
    """Add the figures of each tool to its sums."""
    for tool, figures in tools.items():
        sum_of_tool = sums.setdefault(tool, dict.fromkeys(FIGURES, 0))
        for name, value in figures.items():
            sum_of_tool[name] += value


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
