"""Servers and executors of a chaos run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import shutil
import signal
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import nats.errors
from nats.aio.client import Client

from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.postgres_server import PostgresServer, unprivileged
from openapi_tool.local.servers import NatsServer, ServerFailed, ServerProcess, accepts, free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subjects import default_durable
from tests.chaos.checker import COMMANDS, DEADLINE_S, REACTION_S
from tests.chaos.load import QUICK_S, SLOW_S, Journal, Load
from tests.support import another_nats

DATABASE, DURABLE = "chaos", default_durable("v1r4", "jina")
RECORDING = "s-post-json"
EXECUTOR = "tests.chaos.fail_points"
_POLL_S = 0.05
_POLLS = 60  # for 3 s
_NATS_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Replica:
    """One executor, and the port of its health server.

    `under_fault`: a fault has stopped the process, so it gets no other fault and is not restarted.
    """

    process: ExecutorProcess
    port: int
    under_fault: bool = False

    @property
    def alive(self) -> bool:
        return self.process.process.alive

    async def running(self) -> int:
        """Return the number of calls that it runs, 0 if it does not respond."""
        try:
            return int(await asyncio.to_thread(self.metric, "openapi_tool_calls_running"))
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        """Return one of its metrics, 0 if it has none of this name. Raises OSError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=0.5) as answer:
            found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the kernel's servers.

    Executors get `settings` (environment variables) besides the usual ones. The command stream has `stream_replicas`.
    """

    dsn: str
    nats_urls: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)
    stream_replicas: int = 1


@dataclass(slots=True)
class Run:
    """The servers, replicas and load of a run; `outage_s` is the duration of an outage."""

    stack: EmbeddedStack
    addresses: Addresses
    outage_s: float
    folder: Path
    replicas: list[Replica]
    load: Load
    journal: Journal
    random: random.Random
    faults: dict[str, dict[str, int]] = field(default_factory=dict)
    background: set[asyncio.Task[Any]] = field(default_factory=set)

    async def place(self, calls: int, per_second: float) -> None:
        """Place `calls` calls."""
        await self.load.run(calls, per_second)

    def normal_rules(self) -> list[dict[str, Any]]:
        """Return the rules of the double outside of faults: every request succeeds."""
        return [
            {"match": "slow", "answer": RECORDING, "delay_s": SLOW_S},
            {"answer": RECORDING, "delay_s": QUICK_S},
        ]

    async def rules(self, *more: Mapping[str, Any]) -> None:
        """Set the rules of the double: `more`, then the normal ones."""
        await asyncio.to_thread(self.stack.upstream.rules, *more, *self.normal_rules())

    async def busy_replica(self) -> tuple[Replica, int]:
        """Return a random replica and its number of running calls, once it has any, or 0 after 3 s."""
        chosen = self.random.choice([replica for replica in self.replicas if not replica.under_fault])
        for _ in range(_POLLS):
            if running := await chosen.running():
                return chosen, running
            await asyncio.sleep(_POLL_S)
        return chosen, 0

    async def running(self) -> int:
        """Return the number of running calls of all replicas, once there are any, or 0 after 3 s."""
        for _ in range(_POLLS):
            if running := sum([await replica.running() for replica in self.replicas]):
                return running
            await asyncio.sleep(_POLL_S)
        return 0

    async def keep_replicas_alive(self) -> None:
        """Restart replicas that ended, as Kubernetes would."""
        while True:
            for replica in self.replicas:
                if not replica.alive and not replica.under_fault:
                    with contextlib.suppress(ServerFailed):  # the next fault may kill it while it starts
                        await asyncio.to_thread(replica.process.start)
            await asyncio.sleep(_POLL_S)

    @property
    def hit(self) -> set[str]:
        """Return the kinds of faults that have hit a running call."""
        return {kind for kind, count in self.faults.items() if count["hit"]}

    async def delivered(self) -> int | None:
        """Return the number of deliveries of the durable, None if NATS does not respond within 2 s."""
        try:
            async with asyncio.timeout(_NATS_TIMEOUT_S), nats_client(self.addresses.nats_urls) as client:
                info = await client.jetstream().consumer_info(COMMANDS, DURABLE)
        except (nats.errors.Error, OSError, TimeoutError):
            return None
        return info.delivered.consumer_seq if info.delivered else None

    def start_task(self, work: Any) -> None:
        """Run a coroutine in the background until the end of the run."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)


@asynccontextmanager
async def nats_client(urls: Sequence[str]) -> AsyncIterator[Client]:
    """Yield a connection that fails in an outage instead of reconnecting.

    `nats.connect` would leak a socket if the server accepts but never responds; `close` ends that, too.
    Raises nats.errors.Error, OSError, TimeoutError.
    """
    client = Client()
    try:
        await client.connect(list(urls), allow_reconnect=False, connect_timeout=1, error_cb=_ignore)
        yield client
    finally:
        await client.close()


async def _ignore(_: Exception) -> None:
    """Ignore errors of the connection: outages are intended."""


Fault = Callable[[Run], Awaitable[int]]
"""Injects a fault into a run; returns the number of running calls that it hit, or 1 if it cannot count them."""


async def outage(run: Run, why: str, broken: AbstractAsyncContextManager[Any], seconds: float | None = None) -> int:
    """Enter `broken`, which keeps calls from being finished, for `seconds` (by default `run.outage_s`).

    The period is recorded in the journal: the checker needs it to judge deadlines and readiness.
    """
    running, began = await run.running(), time.time()
    async with broken:
        since, before = time.time(), await run.delivered()
        await asyncio.sleep(run.outage_s if seconds is None else seconds)
        after, until = await run.delivered(), time.time()
    deliveries = None if before is None or after is None else after - before
    run.journal.record(outage=why, began=began, since=since, until=until, over=time.time(), deliveries=deliveries)
    return running


async def inject_faults(run: Run, times: Iterable[tuple[float, str]], faults: Mapping[str, Fault]) -> None:
    """Inject the faults one after another, and count those that hit a running call."""
    for wait_s, kind in times:
        await asyncio.sleep(wait_s)
        began = time.time()
        hit = await faults[kind](run)
        run.journal.record(fault=kind, began=began, ended=time.time())
        count = run.faults.setdefault(kind, {"fired": 0, "hit": 0})
        count["fired"] += 1
        count["hit"] += bool(hit)


class NotInstalled(Exception):
    """Raised if a program that a profile needs is not installed."""


class Profile(ABC):
    """Kind of run: the servers besides the embedded stack's, and the faults in the order of their injection."""

    replicas = 3
    executor = EXECUTOR
    rest_s = 8.0
    """Seconds between faults; more than `REACTION_S` if readiness is judged."""

    endless = False
    """Inject faults in random order until the load ends, instead of each once."""

    deadline_s = DEADLINE_S
    judged: Sequence[str] = ("lost", "doubled", "doorbells_missing", "refused", "requested_too_late", "readiness")
    """Findings that fail a run."""

    ready_within_s = REACTION_S
    """Seconds after an outage in which every replica must be ready again, if readiness is judged."""

    per_minute = math.inf
    """Requests that the upstream allows in any 60 s."""

    def __init__(self, stack: EmbeddedStack) -> None:
        self.stack = stack

    async def open(self, exits: AsyncExitStack) -> Addresses:
        """Start further servers, which `exits` stops. Raises NotInstalled."""
        del exits
        return Addresses(self.stack.postgres.dsn(DATABASE), [self.stack.nats.url])

    def settings(self, number: int) -> Mapping[str, str]:
        """Return the environment variables of one replica only."""
        del number
        return {}

    async def place(self, run: Run, calls: int, per_second: float) -> None:
        """Place the load."""
        await run.place(calls, per_second)

    @abstractmethod
    def faults(self) -> Mapping[str, Fault]:
        """Return the faults by name."""


_CHUNK = 65_536


class Switch:
    """TCP proxy to `target`, a port of loopback; `move` changes it for new connections."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Switch]:
        """Forward until the end of the block."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.move(self.target, drop=True)

    def move(self, target: int, *, drop: bool) -> None:
        """Forward new connections to `target`; `drop` ends open ones, which otherwise keep their target."""
        self.target = target
        if drop:
            for writer in self._open:
                writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
            self._open.add(forth)
            try:
                await asyncio.gather(_pump(reader, forth), _pump(back, writer))
            finally:
                self._open.discard(forth)
                forth.transport.abort()
        except OSError:
            pass  # one side ended; the `finally` ends the other
        finally:
            self._open.discard(writer)
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


# Servers that profiles need besides the embedded stack's: a NATS cluster, a streaming standby, PgBouncer.


_PGBOUNCER = "/usr/sbin/pgbouncer"
_CLUSTER = """
cluster {{ name: chaos, listen: "127.0.0.1:{port}", routes: [{routes}] }}
"""
_PGBOUNCER_CONFIG = """
[databases]
* = host=127.0.0.1 port={postgres_port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {users}
pool_mode = transaction
default_pool_size = 6
max_client_conn = 200
"""


async def execute(dsn: str, *statements: str) -> None:
    """Run statements, each in its own transaction, as ALTER SYSTEM requires."""
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


class NatsCluster:
    """NATS servers with JetStream that know each other by their routes."""

    def __init__(self, stack: EmbeddedStack, size: int = 3) -> None:
        ports = [free_port() for _ in range(size)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        self.nodes: dict[str, NatsServer] = {
            f"node-{port}": another_nats(stack, f"node-{port}", _CLUSTER.format(port=port, routes=routes))
            for port in ports  # unique names: a stack may have had another cluster before
        }

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes.values()]

    def urls_without(self, *names: str) -> list[str]:
        return [node.url for name, node in self.nodes.items() if name not in names]

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(node.start) for node in self.nodes.values()))

    async def signal(self, name: str, number: signal.Signals) -> None:
        process = self.nodes[name].process
        if process is not None:
            process.signal(number)
            if number == signal.SIGKILL:
                await asyncio.to_thread(process.wait, 10)


class Standby(PostgresServer):
    """A hot standby that streams from `primary`."""

    def __init__(self, folder: Path, guard: Guard, primary: PostgresServer) -> None:
        super().__init__(folder, guard)
        self._primary = primary
        self._password = str(urlsplit(primary.dsn()).password)

    def _initialize(self, data: Path, password: Path) -> None:
        del password
        options = ["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"]
        self._run([self._bin / "pg_basebackup", "-d", self._primary.dsn(), "-D", data, *options])


class PgBouncer:
    """Debian's PgBouncer in transaction mode before a PostgreSQL server; `users` are connection strings."""

    def __init__(self, folder: Path, guard: Guard, postgres: PostgresServer, users: Sequence[str]) -> None:
        self.port = free_port()
        self._guard = guard
        self._folder = folder
        self._identity = unprivileged()
        self._config = folder / "pgbouncer.ini"
        names = folder / "users.txt"
        parts = [urlsplit(user) for user in users]
        self._write(names, "".join(f'"{part.username}" "{part.password}"\n' for part in parts))
        self._write(self._config, _PGBOUNCER_CONFIG.format(postgres_port=postgres.port, port=self.port, users=names))
        self.process: ServerProcess | None = None

    @staticmethod
    def missing() -> str | None:
        """Return why PgBouncer cannot be started here, None if it can."""
        return None if shutil.which(_PGBOUNCER) else f"{_PGBOUNCER} is not installed (Debian package pgbouncer)"

    def _write(self, path: Path, text: str) -> None:
        path.touch(mode=0o600)
        path.write_text(text)
        if self._identity:
            os.chown(path, self._identity["user"], self._identity["group"])

    def start(self) -> None:
        """Start; a restart keeps the port. Raises ServerFailed."""
        log = self._folder / "pgbouncer.log"
        self.process = ServerProcess("PgBouncer", [_PGBOUNCER, self._config], self._guard, log, identity=self._identity)
        self.process.start(lambda: accepts(self.port))

    def stop(self) -> None:
        """Stop at once and end the connections of clients."""
        if self.process is not None:
            self.process.stop()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGUSR1 is PAUSE, SIGUSR2 is RESUME."""
        if self.process is not None:
            self.process.signal(number)
