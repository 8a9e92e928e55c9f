"""Simulate a kernel, as far as a tool executor sees one: it sends calls and reads results.

To *place* a call is to save its card and rows in PostgreSQL, then to publish its command over NATS. The executor saves
a result (a card, an inbox row and an edge) and sends a *doorbell*, a message without content that says: look into the
inbox.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import asyncpg
import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from openapi_tool.local.database import CONNECT_S, open_database
from openapi_tool.local.placed_call import VERSION, PlacedCall, doorbell_key, new_call, save_rows
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import command_stream

STREAM = command_stream(VERSION)[0]
WORKER_TARGET = "worker_generic"

ERRORS: tuple[type[Exception], ...] = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    nats.errors.Error,
    Unavailable,
    OSError,
)
"""Exceptions if PostgreSQL or NATS is unavailable or refuses a request."""

_POLL_S = 0.2
_DOORBELL_GRACE_S = 1.0  # an executor publishes the doorbell right after it committed the row


class _Doorbell(NamedTuple):
    """Subject, headers and data of a doorbell, and when it arrived in seconds since the epoch."""

    content: dict[str, Any]
    arrived_at: float


@dataclass(frozen=True, slots=True)
class ResultRows:
    """Rows of a result, empty if missing, and its doorbell with its arrival in seconds since the epoch."""

    card: Mapping[str, Any]
    inbox_row: Mapping[str, Any]
    edge: Mapping[str, Any]
    doorbell: Mapping[str, Any] | None
    doorbell_at: float | None


class Caller:
    """A simulated kernel, which speaks one version of the protocol. `client` is its connection to NATS."""

    def __init__(self, database: asyncpg.Connection, client: Client, version: str = VERSION) -> None:
        self.database = database
        self.client = client
        self.version = version
        self._doorbells: dict[str, asyncio.Future[_Doorbell]] = {}  # expected or received, by `PlacedCall.doorbell_key`
        self._lock = asyncio.Lock()  # asyncpg refuses concurrent statements on one connection
        self.last_sequence = 0  # stream sequence of the last published command

    @classmethod
    @asynccontextmanager
    async def connect(cls, dsn: str, nats_url: str, version: str = VERSION) -> AsyncIterator[Caller]:
        """Connect, create a missing stream, and subscribe to doorbells."""
        async with cls.open(dsn, version, servers=nats_url) as caller:
            await caller.make_stream()
            await caller.listen(f"cg.{version}.*.*.cmd.agent.*.wakeup")
            yield caller

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str, version: str = VERSION, /, **bus: Any) -> AsyncIterator[Caller]:
        """Connect and change nothing; `bus` are the NATS client's options. Raises ERRORS."""
        async with AsyncExitStack() as stack:
            database = await stack.enter_async_context(open_database(dsn, CONNECT_S))
            client = BusClient(BusOptions())
            await client.connect(name="kernel-player", **bus)
            stack.push_async_callback(client.close)
            yield cls(database, client, version)

    async def make_stream(self, metadata: Mapping[str, str] | None = None, *, replicas: int = 1) -> None:
        """Create the kernel's stream if it is missing."""
        name, subjects = command_stream(self.version)
        config = StreamConfig(name=name, subjects=[subjects], max_age=24 * 3600, num_replicas=replicas)
        config.metadata = dict(metadata) if metadata else None
        await self.client.jetstream().add_stream(config)

    async def listen(self, subject: str) -> None:
        """Subscribe to doorbells."""
        await self.client.subscribe(subject, cb=self._receive)

    async def _receive(self, message: Msg) -> None:
        doorbell = self._doorbell(doorbell_key(message))
        if not doorbell.done():
            content = {"subject": message.subject, "headers": message.headers, "data": message.data.decode()}
            doorbell.set_result(_Doorbell(content, time.time()))

    def _doorbell(self, key: str) -> asyncio.Future[_Doorbell]:
        """Return the doorbell that has this key, which may not have arrived; others with the key are ignored."""
        return self._doorbells.setdefault(key, asyncio.get_running_loop().create_future())

    async def set_up_project(self, project_id: str, agent_id: str, tools: Iterable[Mapping[str, Any]]) -> None:
        """Add a project with an agent and tools."""
        await self.add_project(project_id)
        await self.add_agent(project_id, agent_id)
        for tool in tools:
            await self.add_tool(project_id, tool)

    async def add_project(self, project_id: str) -> None:
        """Add a missing project."""
        await self.database.execute(
            "insert into public.projects (project_id, title, owner_id) values ($1, $1, 'owner') on conflict do nothing",
            project_id,
        )

    async def add_agent(self, project_id: str, agent_id: str, worker_target: str = WORKER_TARGET) -> None:
        """Add a missing agent to the roster."""
        await self.database.execute(
            "insert into resource.project_agents (project_id, agent_id, profile_box_id, worker_target) "
            "values ($1, $2, $3, $4) on conflict do nothing",
            project_id,
            agent_id,
            uuid.uuid4(),
            worker_target,
        )

    async def add_tool(self, project_id: str, tool: Mapping[str, Any]) -> None:
        """Add or replace a tool, given as its row."""
        async with self._lock:
            await self.database.execute(
                "insert into resource.tools "
                "(project_id, tool_name, description, parameters, target_subject, after_execution, options) "
                "values ($1, $2, $3, $4, $5, $6, $7) on conflict (project_id, tool_name) do update set "
                "description = excluded.description, parameters = excluded.parameters, "
                "target_subject = excluded.target_subject, after_execution = excluded.after_execution, "
                "options = excluded.options",
                project_id,
                tool["tool_name"],
                tool.get("description"),
                tool.get("parameters", {}),
                tool.get("target_subject"),
                tool.get("after_execution", "suspend"),
                tool.get("options", {}),
            )

    async def place(
        self,
        project_id: str,
        agent_id: str,
        tool_name: str,
        arguments: Any,
        *,
        suffix: str = "search",
        subject: str | None = None,
        after_execution: str = "suspend",
        channel_id: str = "public",
        card_metadata: Mapping[str, Any] | None = None,
        publish: bool = True,
    ) -> PlacedCall:
        """Save card and rows, then publish the command, in the kernel's order (protocol section 9).

        The default subject ends in `suffix`.
        """
        subject = subject or f"cg.{self.version}.{project_id}.{channel_id}.cmd.tool.jina.{suffix}"
        body = {"tool_name": tool_name, "after_execution": after_execution}
        call = new_call(project_id, channel_id, agent_id, subject, body)
        await self.save(call, arguments, card_metadata or {})
        if publish:
            await self.publish(call)
        return call

    async def save(self, call: PlacedCall, arguments: Any, card_metadata: Mapping[str, Any]) -> None:
        """Save the card of a call, then the rows that its protocol version requires."""
        content = {
            "__type__": "ToolCallContent",
            "status": "called",
            "tool_name": call.body["tool_name"],
            "arguments": arguments,
            "target_subject": call.subject,
        }
        metadata = {
            "type": "tool.call",
            "project_id": call.project_id,
            "author_id": call.agent_id,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "agent_turn_id": call.agent_turn_id,
            "tool_call_id": call.tool_call_id,
            "step_id": call.step_id,
            "trace_id": call.trace_id,
            **card_metadata,
        }
        async with self._lock:
            await self.database.execute(
                "insert into cards (card_id, tenant_id, content, tool_call_id, metadata) values ($1, $2, $3, $4, $5)",
                call.card_id,
                call.project_id,
                content,
                call.tool_call_id,
                metadata,
            )
            async with self.database.transaction():
                await save_rows(self.database, call)

    async def publish(
        self, call: PlacedCall, *, headers: Mapping[str, str] | None = None, data: bytes | None = None
    ) -> int:
        """Publish a call's command; return its stream sequence."""
        acknowledged = await self.client.jetstream().publish(
            call.subject,
            orjson.dumps(call.body) if data is None else data,
            headers=dict(call.headers if headers is None else headers),
        )
        self.last_sequence = max(self.last_sequence, acknowledged.seq)
        return acknowledged.seq

    async def result(self, call: PlacedCall, timeout_s: float) -> ResultRows:
        """Wait for the doorbell of a call and read its result. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            doorbell = await self._doorbell(call.doorbell_key)
        return await self.read_result(call, *doorbell)

    async def committed_result(self, call: PlacedCall, timeout_s: float) -> ResultRows:
        """Wait for the inbox row of a call, then one second for its doorbell, which need not come.

        Raises TimeoutError without a row.
        """
        doorbell = self._doorbell(call.doorbell_key)
        async with asyncio.timeout(timeout_s):
            while not doorbell.done() and not (await self.read_result(call)).inbox_row:
                await asyncio.wait([doorbell], timeout=_POLL_S)
        await asyncio.wait([doorbell], timeout=_DOORBELL_GRACE_S)
        if doorbell.done():
            return await self.read_result(call, *doorbell.result())
        return await self.read_result(call)

    async def read_result(
        self, call: PlacedCall, doorbell: Mapping[str, Any] | None = None, doorbell_at: float | None = None
    ) -> ResultRows:
        """Return the rows of a call as they are now; a missing row is an empty mapping."""
        return ResultRows(
            card=await self.card(call.project_id, call.tool_call_id, "tool.result"),
            inbox_row=await self._row(
                "select * from state.agent_inbox where project_id = $1 and correlation_id = $2 "
                "and message_type = 'tool_result'",
                call.project_id,
                call.tool_call_id,
            ),
            edge=await self._row(
                "select * from state.execution_edges where project_id = $1 and correlation_id = $2 "
                "and primitive = 'report'",
                call.project_id,
                call.tool_call_id,
            ),
            doorbell=doorbell,
            doorbell_at=doorbell_at,
        )

    async def card(self, project_id: str, tool_call_id: str, card_type: str) -> dict[str, Any]:
        """Return a call's `tool.call` or `tool.result` card; empty if there is none."""
        return await self._row(
            "select * from cards where tenant_id = $1 and tool_call_id = $2 and metadata ->> 'type' = $3",
            project_id,
            tool_call_id,
            card_type,
        )

    async def _row(self, query: str, *values: str) -> dict[str, Any]:
        async with self._lock:
            row = await self.database.fetchrow(query, *values)
        return dict(row) if row else {}
