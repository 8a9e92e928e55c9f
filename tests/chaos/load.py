"""Load: places calls at a steady rate, also during outages, and records every command in a journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import nats.errors
from nats.js import JetStreamContext

from openapi_tool.local.caller import Caller
from openapi_tool.local.placed_call import PlacedCall, doorbell_key
from openapi_tool.protocol.dialect import DEFAULT_VERSION
from tests.chaos.fail_points import KILLER

PROJECT, AGENT = "proj_chaos", "agent_chaos"
FLOODER = "proj_flood"
QUICK_S, SLOW_S, SLOW_SHARE = 0.05, 3.0, 0.05
"""Seconds of quick and of slow upstream responses, and the share of slow ones."""

TOOL = {
    "tool_name": "jina_search",
    "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
    "options": {"jina": {"mode": "search"}},
}
_RETRY_S = 0.2
_CONNECT_S = 5.0
_CONSUME_S = 1.0
_CONSUME = (
    "update state.agent_inbox set status = 'consumed' "
    "where message_type = 'tool_result' and status = 'pending' and {} = any($1)"
)
_WORKER, _DOORBELLS_AT_ONCE = "chaos_worker", 100

_CONNECT_OPTIONS = {"max_reconnect_attempts": -1, "reconnect_time_wait": 0.25, "ping_interval": 1, "connect_timeout": 1}
"""Detect a frozen server within seconds: otherwise hardly any call would be placed while it is frozen."""
_OUTAGES = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    nats.errors.Error,
    OSError,
    TimeoutError,
)


@dataclass(slots=True)
class Journal:
    """Journal of a run, one JSON object per line; `checker.py` describes them."""

    path: Path

    def record(self, **fields: Any) -> None:
        with self.path.open("a") as journal:
            journal.write(json.dumps(fields) + "\n")

    def sent(self, call: PlacedCall, kind: str, query: str, upstream_s: float, *, sequence: int) -> None:
        """Record a command with its sequence in the stream, 0 if the stream did not confirm it."""
        self.record(
            call={
                "tool_call_id": call.tool_call_id,
                "doorbell": call.doorbell_key,
                "kind": kind,
                "query": query,
                "upstream_s": upstream_s,
                "placed_at": call.placed_at,
                "published": sequence > 0,
                "sequence": sequence,
            }
        )


class Load:
    """The kernel of one protocol version: places calls, and continues after every outage."""

    def __init__(
        self,
        dsn: str,
        nats_urls: Sequence[str],
        journal: Journal,
        random_: random.Random,
        version: str = DEFAULT_VERSION,
    ) -> None:
        self.version = version
        self._dsn = dsn
        self._nats_urls = list(nats_urls)
        self._journal = journal
        self._random = random_
        self._stack = AsyncExitStack()
        self._caller: Caller | None = None
        self._connecting = asyncio.Lock()
        self._numbers = count()
        self.sent = 0

    async def prepare(self, replicas: int = 1) -> None:
        """Create the command stream with this many replicas, and the rows that every call needs."""
        caller = await self._connected()
        await caller.make_stream(replicas=replicas)
        for project in (PROJECT, FLOODER):
            await caller.set_up_project(project, AGENT, [TOOL])

    async def run(self, calls: int, per_second: float) -> None:
        """Place `calls` calls at the given rate, without waiting until earlier ones are placed."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(calls):
                await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
                group.create_task(self.call(next(self._numbers)))

    async def call(self, number: int) -> None:
        slow = self._random.random() < SLOW_SHARE
        query = f"{'slow' if slow else 'quick'} {number}"
        await self.send(query, "call", SLOW_S if slow else QUICK_S)

    async def flood(self, calls: int) -> None:
        """Place calls of another project, as fast as rows can be saved."""
        for _ in range(calls):
            await self.send(f"quick flood {next(self._numbers)}", "flood", QUICK_S, project=FLOODER)

    async def duplicate(self, number: int) -> None:
        """Publish the command of one call twice, the second time at a random moment of the first run."""
        call = await self.send(f"quick twice {number}", "duplicate", QUICK_S)
        await asyncio.sleep(self._random.random() * 2 * QUICK_S)
        await self._publish(call, None)

    async def publish_poison(self, number: int) -> None:
        """Place a call that kills every executor that runs it."""
        await self.send(f"{KILLER} {number}", "poison", 0.0)

    async def publish_malformed(self) -> None:
        """Publish an unanswerable command, and in v1r4 one whose body is no JSON (in v1r3 unanswerable, too)."""
        if self.version == DEFAULT_VERSION:
            await self.send("never asked", "malformed", 0.0, data=b"{broken")
        await self.publish_unanswerable()

    async def publish_unanswerable(self) -> None:
        """Publish a command without headers, which becomes a dead letter; its body holds the id of the call."""
        call = await self._placed("never asked")
        sequence = await self._publish(call, json.dumps([call.tool_call_id]).encode(), headers={})
        self._journal.sent(call, "unanswerable", "never asked", 0.0, sequence=sequence)

    async def consume(self) -> None:
        """Consume results whose doorbells are in the stream, as the kernel's workers do, until cancelled."""
        while True:
            await asyncio.sleep(_CONSUME_S)
            with contextlib.suppress(*_OUTAGES):
                await self._consume_until_outage()

    async def _consume_until_outage(self) -> None:
        connection = await asyncpg.connect(self._dsn, timeout=_CONNECT_S)
        try:
            jetstream = (await self._connected()).client.jetstream()
            subject = f"cg.{self.version}.*.*.cmd.agent.*.wakeup"
            worker = await jetstream.pull_subscribe(subject, durable=_WORKER, stream=f"cg_cmd_{self.version}")
            try:
                while True:
                    await _consume_woken(connection, worker, self.version)
                    await asyncio.sleep(_CONSUME_S)
            finally:
                await worker.unsubscribe()
        finally:
            connection.terminate()

    async def send(
        self, query: str, kind: str, upstream_s: float, data: bytes | None = None, project: str = PROJECT
    ) -> PlacedCall:
        call = await self._placed(query, project)
        sequence = await self._publish(call, data)
        self._journal.sent(call, kind, query, upstream_s, sequence=sequence)
        self.sent += sequence > 0
        return call

    async def _placed(self, query: str, project: str = PROJECT) -> PlacedCall:
        """Write the rows of a call; retry with new ids if the database fails."""
        while True:
            try:
                caller = await self._connected()
                return await caller.place(project, AGENT, "jina_search", {"query": query}, publish=False)
            except _OUTAGES:
                await asyncio.sleep(_RETRY_S)

    async def _publish(self, call: PlacedCall, data: bytes | None, headers: dict[str, str] | None = None) -> int:
        """Publish a command and return its sequence in the stream, 0 if the stream did not confirm it."""
        try:
            return await (await self._connected()).publish(call, data=data, headers=headers)
        except _OUTAGES:
            return 0

    async def _connected(self) -> Caller:
        """Return a caller with an open database connection; earlier callers stay open until `close`."""
        async with self._connecting:
            if self._caller is None or self._caller.database.is_closed():
                opening = Caller.open(self._dsn, self.version, servers=self._nats_urls, **_CONNECT_OPTIONS)
                self._caller = await self._stack.enter_async_context(opening)
            return self._caller

    async def close(self) -> None:
        await self._stack.aclose()


async def _consume_woken(
    connection: asyncpg.Connection, worker: JetStreamContext.PullSubscription, version: str
) -> None:
    column = "agent_turn_id" if version == DEFAULT_VERSION else "trace_id"
    with contextlib.suppress(nats.errors.TimeoutError):  # no doorbell
        doorbells = await worker.fetch(_DOORBELLS_AT_ONCE, timeout=_CONSUME_S)
        woken = [doorbell_key(message) for message in doorbells]
        await connection.execute(_CONSUME.format(column), woken, timeout=_CONNECT_S)
        for message in doorbells:
            await message.ack()
