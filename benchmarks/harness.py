"""Benchmark harness: servers, double, executors and floor, each as a child process."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import urlencode

import asyncpg
import nats

from benchmarks import floor
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
