"""Calls that benchmarks publish."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import asyncpg
import nats
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from benchmarks.double import unique_query
from openapi_tool.bus.stats import gather_stats
from openapi_tool.local.caller import WORKER_TARGET
from openapi_tool.local.placed_call import SENDER, VERSION

Tool = Literal["search", "reader"]
NAMES: dict[Tool, str] = {"search": "jina_search", "reader": "jina_reader"}
AGENT, CHANNEL = "agent_bench", "public"
SUSPEND_TIMEOUT_S = 900
_NUMBERS = itertools.count()
_COLUMNS = {
    "cards": ("card_id", "tenant_id", "content", "tool_call_id", "metadata"),
    "agent_inbox": (
        *("inbox_id", "project_id", "agent_id", "channel_id", "message_type", "enqueue_mode", "correlation_id"),
        *("agent_turn_id", "turn_epoch", "context_headers", "payload", "status"),
    ),
    "execution_edges": (
        *("edge_id", "project_id", "channel_id", "primitive", "edge_phase", "source_agent_id"),
        *("source_agent_turn_id", "source_step_id", "target_agent_id", "target_agent_turn_id", "correlation_id"),
        *("recursion_depth", "trace_id"),
    ),
}
_SCHEMAS = {"cards": "public", "agent_inbox": "state", "execution_edges": "state"}


@dataclass(frozen=True, slots=True)
class Ask:
    """Kind of calls: tool, delay in milliseconds and size in bytes of the upstream's response, and their projects.

    `projects` is the number of projects, `first` the number of the first one.
    """

    tool: Tool = "search"
    delay_ms: int = 50
    size: int = 2_000
    projects: int = 1
    first: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """One command to be published; its doorbell carries `turn_id`."""

    turn_id: str
    subject: str
    headers: dict[str, str]
    data: bytes


async def set_up_projects(database: asyncpg.Connection, projects: int) -> None:
    """Add projects, each with its own agent, search tool and reader tool."""
    ids = [project_id(number) for number in range(projects)]
    await database.executemany(
        "insert into public.projects (project_id, title, owner_id) values ($1, $1, 'owner') on conflict do nothing",
        [(project,) for project in ids],
    )
    await database.executemany(
        "insert into resource.project_agents (project_id, agent_id, profile_box_id, worker_target) "
        "values ($1, $2, $3, $4) on conflict do nothing",
        [(project, AGENT, uuid.uuid4(), WORKER_TARGET) for project in ids],
    )
    await database.executemany(
        "insert into resource.tools (project_id, tool_name, description, parameters, target_subject, "
        "after_execution, options) values ($1, $2, $3, $4, $5, 'suspend', $6) on conflict do nothing",
        [definition for project in ids for definition in _definitions(project)],
    )


def project_id(number: int) -> str:
    """Return the name of a project."""
    return f"proj_bench_{number}"


def _definitions(project: str) -> Iterator[tuple[Any, ...]]:
    """Return both tools' definitions, with schema, default and time limit."""
    arguments: dict[Tool, Any] = {
        "search": {"query": {"type": "string"}, "count": {"type": "integer", "minimum": 1, "maximum": 20}},
        "reader": {"url": {"type": "string"}},
    }
    for mode, properties in arguments.items():
        schema = {"type": "object", "additionalProperties": False, "properties": properties}
        schema["required"] = [next(iter(properties))]
        defaults = {"count": 5} if mode == "search" else {}
        options = {"jina": {"mode": mode}, "args": {"defaults": defaults}, "suspend_timeout_seconds": SUSPEND_TIMEOUT_S}
        subject = f"cg.{VERSION}.{{project_id}}.{{channel_id}}.cmd.tool.jina.{mode}"
        yield project, NAMES[mode], f"The {mode} tool of {project}.", schema, subject, options


async def place(
    database: asyncpg.Connection, ask: Ask, count: int, target: str, *, analyze: bool = True
) -> list[Command]:
    """Write the rows of calls for the executor of `target`; return their commands, not yet published.

    `analyze` updates the planner's statistics, which takes longer the more rows there are.
    """
    calls = [_Call(ask, number, target) for number in range(count)]
    rows: dict[str, Sequence[tuple[Any, ...]]] = {
        "cards": [call.card() for call in calls],
        "agent_inbox": [call.anchor() for call in calls],
        "execution_edges": [call.edge() for call in calls],
    }
    for table, records in rows.items():
        await database.copy_records_to_table(
            table, schema_name=_SCHEMAS[table], columns=_COLUMNS[table], records=records
        )
        if analyze:
            await database.execute(f"analyze {_SCHEMAS[table]}.{table}")
    return [call.command() for call in calls]


class _Call:
    """One call, before its rows and command are created."""

    def __init__(self, ask: Ask, number: int, target: str) -> None:
        query = unique_query(ask.delay_ms, ask.size, next(_NUMBERS))
        self.project = project_id(ask.first + number % ask.projects)
        self.arguments = {"query": query} if ask.tool == "search" else {"url": f"https://example.com/{query}"}
        self.tool = NAMES[ask.tool]
        self.subject = f"cg.{VERSION}.{self.project}.{CHANNEL}.cmd.tool.{target}.{ask.tool}"
        self.card_id, self.trace_id = uuid.uuid4().hex, secrets.token_hex(16)
        self.turn_id, self.step_id, self.call_id = (f"{kind}_{uuid.uuid4().hex}" for kind in ("turn", "step", "tc"))
        self.context = {
            "CG-Project-Id": self.project,
            "CG-Channel-Id": CHANNEL,
            "CG-Agent-Id": AGENT,
            "CG-Turn-Id": self.turn_id,
            "CG-Turn-Epoch": "1",
            "CG-Step-Id": self.step_id,
            "CG-Tool-Call-Id": self.call_id,
            "CG-Recursion-Depth": "0",
            "traceparent": f"00-{self.trace_id}-{secrets.token_hex(8)}-01",
        }

    def command(self) -> Command:
        publisher = {"CG-Timestamp": "0", "CG-Version": VERSION, "CG-Msg-Type": "dict", "CG-Sender": SENDER}
        body = {"tool_call_card_id": self.card_id, "tool_name": self.tool, "after_execution": "suspend"}
        return Command(self.turn_id, self.subject, self.context | publisher, orjson.dumps(body))

    def card(self) -> tuple[Any, ...]:
        content = {
            "__type__": "ToolCallContent",
            "status": "called",
            "tool_name": self.tool,
            "arguments": self.arguments,
            "target_subject": self.subject,
        }
        metadata = {
            "type": "tool.call",
            "project_id": self.project,
            "author_id": AGENT,
            "created_at": "2026-01-01T00:00:00+00:00",
            "agent_turn_id": self.turn_id,
            "tool_call_id": self.call_id,
            "step_id": self.step_id,
            "trace_id": self.trace_id,
        }
        return self.card_id, self.project, content, self.call_id, metadata

    def anchor(self) -> tuple[Any, ...]:
        payload = {"kind": "command_anchor", "subject": self.subject, "correlation_id": self.call_id}
        row = (f"inbox_{uuid.uuid4().hex}", self.project, AGENT, CHANNEL, "command_anchor", "call", self.call_id)
        return *row, self.turn_id, 1, self.context, payload, "consumed"

    def edge(self) -> tuple[Any, ...]:
        row = (f"edge_{uuid.uuid4().hex}", self.project, CHANNEL, "tool_call", "request", AGENT, self.turn_id)
        return *row, self.step_id, AGENT, self.turn_id, self.call_id, 0, self.trace_id


_CONFIRM_EVERY = 500
_STATS_S = 1.0
_ANSWER_TIMEOUT_S = 30.0
"""Seconds after the last command until those without an answer count as unanswered."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`count` commands of `projects` projects in turn, from number `first`: `per_second`, or all at once without it.

    With `wait` the measurement lasts until all are answered.
    """

    count: int
    per_second: float | None = None
    projects: int = 1
    first: int = 0
    wait: bool = False


@dataclass(slots=True)
class Outcome:
    """Seconds from due time to doorbell of each command, infinite without one; answers by project in the window."""

    latencies: list[float] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)

    def p95(self) -> float:
        """Return the 95th percentile of the latencies in seconds (nearest rank)."""
        return sorted(self.latencies)[math.ceil(0.95 * len(self.latencies)) - 1]

    def unanswered(self) -> int:
        """Return the number of commands without a doorbell."""
        return sum(map(math.isinf, self.latencies))


class Traffic:
    """One connection that publishes commands and receives all doorbells; times are on the performance counter."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._due: dict[str, float] = {}
        self._doorbell_at: dict[str, float] = {}
        self._received = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str) -> AsyncIterator[Traffic]:
        """Connect and subscribe to doorbells."""
        client = await nats.connect(url, name="load")
        traffic = cls(client)
        subject = f"cg.{VERSION}.*.*.cmd.agent.*.wakeup"
        await client.subscribe(subject, cb=traffic._receive, pending_msgs_limit=-1, pending_bytes_limit=-1)
        await client.flush()
        try:
            yield traffic
        finally:
            await client.close()

    async def run(
        self, demands: Sequence[tuple[Demand, Sequence[Command]]], seconds: float, warm_s: float
    ) -> list[Outcome]:
        """Publish queued demands, then those at a rate together; return the outcome of each.

        The window of `Outcome.answered` begins `warm_s` seconds after the queued commands and lasts `seconds`.
        """
        for demand, commands in demands:
            if demand.per_second is None:
                await self.queue(commands)
        began = time.perf_counter() + warm_s
        steady = [(demand.per_second, commands) for demand, commands in demands if demand.per_second]
        await asyncio.gather(*(self._publish(commands, rate) for rate, commands in steady))
        await asyncio.sleep(began + seconds - time.perf_counter())
        await self.answers(command for demand, commands in demands if demand.wait for command in commands)
        return [self.outcome(commands, began, began + seconds) for _, commands in demands]

    async def queue(self, commands: Sequence[Command]) -> None:
        """Publish all commands at once."""
        for number, command in enumerate(commands, start=1):
            self._due[command.turn_id] = time.perf_counter()
            send = self._client.publish if number % _CONFIRM_EVERY else self._client.jetstream().publish
            await send(command.subject, command.data, headers=command.headers)
        await self._client.flush()

    async def _publish(self, commands: Sequence[Command], per_second: float) -> None:
        began = time.perf_counter()
        for number, command in enumerate(commands):
            due = began + number / per_second
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            self._due[command.turn_id] = due
            await self._client.publish(command.subject, command.data, headers=command.headers)

    async def answers(self, commands: Iterable[Command]) -> None:
        """Wait for the doorbells of commands, at most `_ANSWER_TIMEOUT_S` seconds."""
        turns = {command.turn_id for command in commands}
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                while not turns <= self._doorbell_at.keys():
                    self._received.clear()
                    await self._received.wait()

    async def _receive(self, message: Msg) -> None:
        turn_id = (message.headers or {}).get("CG-Turn-Id", "")
        self._doorbell_at.setdefault(turn_id, time.perf_counter())
        self._received.set()

    async def writes(self, stream: str) -> int:
        """Return the number of messages that a stream has ever received; 0 if there is none."""
        try:
            return (await self._client.jetstream().stream_info(stream)).state.last_seq
        except NotFoundError:
            return 0

    async def operations(self, bucket: str) -> list[str]:
        """Return a list to which the subject of each read and write of a KV bucket is added from now on."""
        subjects: list[str] = []

        async def add(message: Msg) -> None:
            subjects.append(message.subject)

        stream = f"KV_{bucket}"
        for subject in (f"$KV.{bucket}.>", f"$JS.API.DIRECT.GET.{stream}.>", f"$JS.API.STREAM.MSG.GET.{stream}"):
            await self._client.subscribe(subject, cb=add)
        await self._client.flush()
        return subjects

    async def limits_by_replica(self) -> tuple[list[int], list[int]]:
        """Return each replica's requests of the last 60 s with limited keys, and those that it refused early."""
        limits = [replica["upstream_limits"] for replica in await gather_stats(self._client, _STATS_S)]
        sent, refused = ([sum(one[name] for one in each) for each in limits] for name in ("sent", "refused"))
        return sent, refused

    def outcome(self, commands: Sequence[Command], since: float, until: float) -> Outcome:
        """Return the latencies of commands, and the answers by project in a window of the performance counter."""
        outcome = Outcome()
        for command in commands:
            doorbell_at = self._doorbell_at.get(command.turn_id, math.inf)
            outcome.latencies.append(doorbell_at - self._due[command.turn_id])
            if since <= doorbell_at < until:
                outcome.answered[command.subject.split(".")[2]] += 1
        return outcome
