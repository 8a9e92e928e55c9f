"""Servers, executors and scenarios of the benchmarks."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self
from urllib.parse import urlencode

import asyncpg
import nats

from benchmarks import floor
from benchmarks.calls import Ask, Tool
from benchmarks.without import PART_VARIABLE
from openapi_tool.bootstrap import NAME as EXECUTOR
from openapi_tool.local.caller import Caller, prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.servers import NatsServer, ServerProcess, free_port
from openapi_tool.local.stack import EmbeddedStack, kernel_schema

DATABASE = "bench"
TARGETS = {"floor": floor.TARGET, "executor": "jina"}
CONNECTIONS = {"floor": floor.NAME, "executor": EXECUTOR}
_TIMEOUT_S = 10.0
_MODULES = {"floor": "benchmarks.floor", "executor": "openapi_tool.local.executor"}


class Harness:
    """The embedded stack with a NATS server that reports counters, and the minimal double.

    `without` names a part (`benchmarks.without.PARTS`) to remove from the executors; `settings` are their environment
    variables. `modules` maps a kind to a module to run instead, and to the variable that names the
    replaced one. The double answers 429 above `per_minute` requests of a key.
    """

    def __init__(
        self,
        without: str | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        modules: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        per_minute: int | None = None,
    ) -> None:
        self._per_minute = per_minute
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
        self.nats: NatsServer = self.stack.another_nats("bench-nats", f'http: "127.0.0.1:{monitor}"\n')
        self.nats.start()
        self.double, ports = self._start_double()
        self._port, self._counters = ports["port"], ports["counters"]

    def _start_double(self) -> tuple[ServerProcess, dict[str, int]]:
        log = self.stack.folder / "bench-double.log"
        command: list[str | Path] = [sys.executable, "-m", "benchmarks.double"]
        command += ["--certificate", self.stack.certificates.server]
        command += ["--per-minute", str(self._per_minute)] if self._per_minute else []
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
        """Empty the tables and the stream, and reset the durables."""
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
    `warm` calls of a process are not measured. `runs` is the maximum of rounds. `min_answer_s` is the setting;
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
    min_answer_s: float = 0.0


CPU = Scenario("search-2k-50ms", "closed", 1000)
SINGLE = Scenario("single", "closed", 400, Ask(delay_ms=0), in_flight=1)
HELD = replace(SINGLE, name="single-held", min_answer_s=0.06)
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
_STANDARD = (CPU, SINGLE, HELD, STEADY, BURST, IMMEDIATE, SLOW, SLOWEST, *SIZES)

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
