"""Servers that profiles need besides the embedded stack: a TCP switch, a NATS cluster, a standby, PgBouncer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from openapi_tool.local.guard import Guard
from openapi_tool.local.servers import NatsServer, PostgresServer, ServerProcess, accepts, free_port, unprivileged
from openapi_tool.local.stack import EmbeddedStack

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
            f"node-{port}": stack.another_nats(f"node-{port}", _CLUSTER.format(port=port, routes=routes))
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
        """Return why it cannot be started here, None if it can."""
        return None if shutil.which(_PGBOUNCER) else f"{_PGBOUNCER} is not installed (Debian package pgbouncer)"

    def _write(self, path: Path, text: str) -> None:
        path.touch(mode=0o600)
        path.write_text(text)
        if self._identity:
            os.chown(path, self._identity["user"], self._identity["group"])

    def start(self) -> None:
        """Start, after a stop on the same port. Raises ServerFailed."""
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
