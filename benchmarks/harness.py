"""Servers, executors, scenarios and calls of the benchmarks."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self
from urllib.parse import urlencode

import asyncpg
import nats
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from benchmarks import floor
from benchmarks.double import USUAL, Behaviour, unique_query
from benchmarks.without import PART_VARIABLE
from openapi_tool.bootstrap import NAME as EXECUTOR
from openapi_tool.local.caller import WORKER_TARGET, Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.placed_call import SENDER, VERSION
from openapi_tool.local.servers import NatsServer, ServerProcess, free_port
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.nats_records.replica_statistics import gather_stats

Tool = Literal["search", "reader"]
NAMES: dict[Tool, str] = {"search": "jina_search", "reader": "jina_reader"}
AGENT, CHANNEL = "agent_bench", "public"
SUSPEND_TIMEOUT_S = 900
_NUMBERS = itertools.count()  # every query is unique, so that no response comes from the cache
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


_CONFIRM_EVERY = 500  # wait for the stream from time to time, so that the publisher cannot outrun it
_STATS_S = 1.0  # how long replicas may take to report
_ANSWER_TIMEOUT_S = 30.0
"""Seconds to wait for doorbells after the window; commands without one then count as unanswered."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`count` commands, sent at the rate `per_second`, or all at once if it is None.

    They belong to `projects` projects in turn, from number `first` on. With `wait` the measurement lasts until all are
    answered.
    """

    count: int
    per_second: float | None = None
    projects: int = 1
    first: int = 0
    wait: bool = False


@dataclass(slots=True)
class Outcome:
    """Seconds from due time to doorbell of each command, infinite without one; answers in the window, by project."""

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
            with suppress(RuntimeError):  # of uvloop, if a connection that was lost has pending writes
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
        """Return a list that from now on grows by the subject of each read and write of a KV bucket."""
        subjects: list[str] = []

        async def add(message: Msg) -> None:
            subjects.append(message.subject)

        stream = f"KV_{bucket}"
        for subject in (f"$KV.{bucket}.>", f"$JS.API.DIRECT.GET.{stream}.>", f"$JS.API.STREAM.MSG.GET.{stream}"):
            await self._client.subscribe(subject, cb=add)
        await self._client.flush()
        return subjects

    async def limits_by_replica(self) -> tuple[list[int], list[int]]:
        """Return each replica's requests with limited keys in the last 60 s, and the number that it refused early."""
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


DATABASE = "bench"
TARGETS = {"floor": floor.TARGET, "executor": "jina"}
CONNECTIONS = {"floor": floor.NAME, "executor": EXECUTOR}
_TIMEOUT_S = 10.0
_MODULES = {"floor": "benchmarks.floor", "executor": "openapi_tool.local.executor"}


class Harness:
    """The embedded stack with a NATS server that reports counters, and the minimal double.

    `without` names a part (`benchmarks.without.PARTS`) to remove from the executors; `settings` are their environment
    variables. `modules` maps a kind to a module to run instead, and to the variable that names the
    replaced one. `behaviour` is that of the double.
    """

    def __init__(
        self,
        without: str | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        modules: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        behaviour: Behaviour = USUAL,
    ) -> None:
        self._behaviour = behaviour
        self._without = without
        self._modules = modules
        self._settings = settings
        self._exits = ExitStack()
        self.started = 0

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self._start)
            await prepare_database(self.stack.postgres.dsn(), DATABASE, kernel_schema())
        except BaseException:
            self._exits.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._exits.close)

    def _start(self) -> None:
        self.stack = self._exits.enter_context(EmbeddedStack())
        self._guard = Guard()
        self._exits.callback(self._guard.close)
        monitor = free_port()
        self._monitor = f"http://127.0.0.1:{monitor}/connz?limit=100"
        folder = self.stack.folder / "bench-nats"
        folder.mkdir()
        self.nats = NatsServer(folder, self.stack.guard, f'http: "127.0.0.1:{monitor}"\n', name=folder.name)
        self.nats.start()
        self.double, ports = self._start_double()
        self._port, self._counters = ports["port"], ports["counters"]

    def _start_double(self) -> tuple[ServerProcess, dict[str, int]]:
        log = self.stack.folder / "bench-double.log"
        command: list[str | Path] = [sys.executable, "-m", "benchmarks.double"]
        command += ["--certificate", self.stack.certificates.server]
        for name, value in asdict(self._behaviour).items():
            command += [f"--{name.replace('_', '-')}", str(value)] if value else []
        double = ServerProcess("double", command, self._guard, log)
        double.start(lambda: log.read_text().endswith("\n"))
        ports: dict[str, int] = json.loads(log.read_text().splitlines()[0])
        return double, ports

    async def database(self) -> asyncpg.Connection:
        """Open a connection as the kernel's role."""
        connection = await asyncpg.connect(self.stack.postgres.dsn(DATABASE))
        await floor.jsonb(connection)
        return connection

    async def clean(self, database: asyncpg.Connection) -> None:
        """Empty the tables, and delete all streams with their durables; create the command stream again."""
        await database.execute(
            "truncate public.cards, state.agent_inbox, state.execution_edges, "
            "public.projects, resource.project_agents, resource.tools"
        )
        client = await nats.connect(self.nats.url)
        try:
            for stream in await client.jetstream().streams_info():
                await client.jetstream().delete_stream(str(stream.config.name))
            await Caller(database, client).make_stream()
        finally:
            await client.close()

    def process(
        self, kind: str, settings: Mapping[str, str], dsn_options: Mapping[str, str] | None = None
    ) -> ExecutorProcess:
        """Return a floor or an executor, not yet started; `dsn_options` are options of its database sessions."""
        self.started += 1
        dsn = self.stack.postgres.dsn(DATABASE) + (f"?{urlencode(dsn_options)}" if dsn_options else "")
        environment = {
            "PG_DSN": dsn,
            "NATS_SERVERS": self.nats.url,
            "SSL_CERT_FILE": str(self.stack.certificates.ca),
            **self.stack.upstream.keys,
            **(self._settings if kind == "executor" else {}),
            **settings,
        }
        name, module = f"{kind}-{self.started}", _MODULES[kind]
        if self._without and kind == "executor":
            module, environment[PART_VARIABLE] = "benchmarks.without", self._without
        if kind in self._modules:
            (module, variable), replaced = self._modules[kind], module
            environment[variable] = replaced
        return ExecutorProcess(name, self.stack.folder, self._guard, environment, self._port, module)

    @property
    def upstream_port(self) -> int:
        """The double's HTTPS port."""
        return self._port

    def servers(self) -> dict[str, int]:
        """Return the process ids of the servers that floor and executor share."""
        named = {"double": self.double, "nats": self.nats.process, "postgres": self.stack.postgres.process}
        return {name: process.pid for name, process in named.items() if process is not None}

    async def upstream_counters(self) -> dict[str, Any]:
        """Return the counters of the double (`benchmarks.double.counters`)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._counters)
        counters: dict[str, Any] = json.loads(await reader.read())
        writer.close()
        return counters

    async def messages(self, kind: str) -> tuple[int, int]:
        """Return the messages that all floors or executors sent and received, as counted by the NATS server."""
        connections = await asyncio.to_thread(self._connections)
        own = [connection for connection in connections if connection.get("name") == CONNECTIONS[kind]]
        # "in" from the server's side: what the process sent.
        return sum(connection["in_msgs"] for connection in own), sum(connection["out_msgs"] for connection in own)

    def _connections(self) -> list[dict[str, Any]]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._monitor, timeout=_TIMEOUT_S) as response:
            connections: list[dict[str, Any]] = json.load(response)["connections"]
        return connections

    def statements_logged(self) -> int:
        """Return the number of statements in PostgreSQL's log; sessions with `log_statement` log theirs."""
        log = (self.stack.folder / "postgres" / "postgres.log").read_text(errors="replace")
        return log.count("LOG:  execute ") + log.count("LOG:  statement: ")


async def start_all(processes: list[ExecutorProcess]) -> None:
    """Start all concurrently, and wait until all serve."""
    with ThreadPoolExecutor() as pool:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(pool, process.start) for process in processes))


async def stop_all(processes: list[ExecutorProcess]) -> None:
    """Drain all concurrently."""
    await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))


Shape = Literal["closed", "open", "burst", "backlog"]
Profile = Literal["quick", "standard", "full"]
DEFAULT_CONCURRENCY = 64
IN_FLIGHT = 96
"""More calls in flight than slots, so that the executor is the bottleneck and no slot stays free."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load, measured alternately on floor and executor.

    `closed` keeps `in_flight` calls running, `open` sends `per_second`, `burst` sends all at once,
    `backlog` sends `waiting` before anything runs and measures the first `calls` of them. The first
    `warm` calls of a process are not measured. `runs` is the maximum of rounds. `min_result_delay_s` is the setting;
    with 0 results are not delayed.
    """

    name: str
    shape: Shape
    calls: int
    ask: Ask = field(default_factory=Ask)
    in_flight: int = IN_FLIGHT
    per_second: float = 0.0
    concurrency: int = DEFAULT_CONCURRENCY
    replicas: int = 1
    waiting: int = 0
    warm: int = 150
    runs: int = 100
    min_result_delay_s: float = 0.0


CPU = Scenario("search-2k-50ms", "closed", 1000)
SINGLE = Scenario("single", "closed", 400, Ask(delay_ms=0), in_flight=1)
HELD = replace(SINGLE, name="single-held", min_result_delay_s=0.06)  # the default of the setting
STEADY = Scenario("steady-100", "open", 600, per_second=100)
BURST = Scenario("burst-500", "burst", 500)
IMMEDIATE = Scenario("search-2k-0ms", "closed", 600, Ask(delay_ms=0))
SLOW = Scenario("search-2k-500ms", "closed", 400, Ask(delay_ms=500))
SLOWEST = Scenario("search-2k-5s", "open", 200, Ask(delay_ms=5_000), per_second=12, warm=24, runs=2)
WAITING = Scenario(
    "search-2k-5s-400-running",
    "open",
    14_400,
    Ask(delay_ms=5_000),
    per_second=80,
    concurrency=512,
    runs=5,
)


def _sized(tool: Tool, size: int, name: str, calls: int) -> Scenario:
    return Scenario(f"{tool}-{name}-50ms", "closed", calls, Ask(tool, size=size))


SIZES = (
    _sized("reader", 2_000, "2k", 600),
    _sized("search", 50_000, "50k", 400),
    _sized("reader", 50_000, "50k", 400),
    replace(_sized("search", 1_000_000, "1m", 100), warm=64),
    replace(_sized("reader", 1_000_000, "1m", 100), warm=64),
)
REPLICAS = tuple(
    replace(CPU, name=f"replicas-{replicas}", replicas=replicas, in_flight=64 * replicas + 32, warm=300, calls=1500)
    for replicas in (1, 2, 4)
)
DEPTHS = tuple(
    Scenario(f"waiting-{waiting}", "backlog", 1_500, waiting=waiting, warm=300) for waiting in (2_500, 10_000, 100_000)
)
SHALLOW = Scenario("waiting-10", "closed", 1_500, in_flight=DEFAULT_CONCURRENCY + 10, warm=300)
PROJECTS = tuple(
    Scenario(f"projects-{projects}", "closed", 1_500, Ask(projects=projects), warm=300) for projects in (1, 100, 5_000)
)
STEADY_LARGE = Scenario("reader-1m-steady-10", "open", 100, Ask("reader", size=1_000_000), per_second=10, warm=32)
_STANDARD = (CPU, SINGLE, HELD, STEADY, BURST, IMMEDIATE, SLOW, SLOWEST, *SIZES, STEADY_LARGE)

PROFILES: dict[Profile, tuple[Scenario, ...]] = {
    "quick": (replace(CPU, calls=400),),
    "standard": _STANDARD,
    "full": (
        *(replace(scenario, calls=2_000) if scenario is SINGLE else scenario for scenario in _STANDARD),
        WAITING,
        *REPLICAS,
        SHALLOW,
        *DEPTHS,
        *PROJECTS,
    ),
}
DEFAULT_RUNS: dict[Profile, int] = {"quick": 8, "standard": 5, "full": 5}
