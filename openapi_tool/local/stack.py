"""Embedded stack: starts all servers in a second or two, and leaves no files or processes."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.nats_server import NatsServer
from openapi_tool.local.postgres import PostgresServer, reachable_by_all
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.server import ServerFailed
from openapi_tool.local.upstream import UpstreamDouble, make_certificates

KEY_NAMES = ("JINA_API_KEY", "SEARCH_API_KEY")


def kernel_schema(version: str = "v1r4") -> str:
    """Return the DDL of the tables of a kernel of this protocol version."""
    return (files(__package__) / "data" / f"kernel_{version}.sql").read_text(encoding="utf-8")


class EmbeddedStack:
    """PostgreSQL, NATS and the Jina double as child processes in one folder of their own.

    With `keep`, the data of both servers is in that folder and stays there. Ports are free ones unless
    given. Locks on the file descriptors in `hold` last until everything has stopped. `guard` can end further
    processes of the same run.
    """

    def __init__(
        self,
        key_names: Sequence[str] = KEY_NAMES,
        base: Path | None = None,
        *,
        keep: Path | None = None,
        pg_port: int = 0,
        nats_port: int = 0,
        hold: Sequence[int] = (),
    ) -> None:
        self.guard = Guard(hold)
        self.folder = Path(tempfile.mkdtemp(prefix="openapi-tool-", dir=base or _base_folder()))
        self.guard.delete_at_end(self.folder)
        self.folder.chmod(0o755)
        for name in ("postgres", "nats"):
            (self.folder / name).mkdir()
        self.certificates = make_certificates(self.folder)
        self._ports = [port for port in (pg_port, nats_port) if port]
        self.postgres = PostgresServer(self.folder / "postgres", self.guard, port=pg_port, keep=keep)
        store = keep / "nats" if keep else None
        self.nats = NatsServer(self.folder / "nats", self.guard, port=nats_port, store=store)
        self.upstream = UpstreamDouble(self.folder, self.certificates, self.guard, key_names)

    def __enter__(self) -> Self:
        try:
            _must_be_free(self._ports)
            with ThreadPoolExecutor() as starters:
                list(starters.map(lambda server: server.start(), (self.postgres, self.nats, self.upstream)))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def delete_at_end(self, path: Path) -> None:
        """Delete this file or folder, too, when all servers have stopped."""
        self.guard.delete_at_end(path)

    def ended(self) -> str | None:
        """Return the name of a server that has ended unexpectedly, None if all run."""
        processes = [server.process for server in (self.postgres, self.nats, self.upstream)]
        return next((process.name for process in processes if process and not process.alive), None)

    def another_nats(self, name: str, more: str) -> NatsServer:
        """Return another NATS server, not yet started, with `more` in its configuration."""
        folder = self.folder / name
        folder.mkdir()
        return NatsServer(folder, self.guard, more, name=name)

    def executor(
        self,
        name: str,
        database: str,
        settings: Mapping[str, str] | None = None,
        *,
        real_upstream: bool = False,
        module: str = "openapi_tool.local.executor",
    ) -> ExecutorProcess:
        """Return an executor, not yet started; `settings` are environment variables, `module` the module to run."""
        environment = {
            "PG_DSN": self.postgres.dsn(database),
            "NATS_SERVERS": self.nats.url,
            **({} if real_upstream else self._double_environment()),
            **(settings or {}),
        }
        port = None if real_upstream else self.upstream.port
        return ExecutorProcess(name, self.folder, self.guard, environment, port, module)

    def _double_environment(self) -> dict[str, str]:
        trust = {"SSL_CERT_FILE": str(self.certificates.ca), "OPENAPI_TOOL__URL_POLICY__ALLOW": RECORDED_HOSTS}
        return {**self.upstream.keys, **trust}

    def close(self) -> None:
        """Stop every process and remove the folder: the guard does both, as it would after a crash."""
        self.guard.close()


def _must_be_free(ports: Sequence[int]) -> None:
    with ExitStack() as probes:
        for port in ports:
            probe = probes.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen()
            except OSError as error:
                raise ServerFailed(f"port {port} cannot be used: {error.strerror}") from None


def _base_folder() -> Path:
    """Return a folder for temporary files that PostgreSQL's unprivileged user can reach."""
    usual = Path(tempfile.gettempdir())
    if os.geteuid() != 0:
        return usual
    return next((folder for folder in (usual, Path("/var/tmp"), Path("/dev/shm")) if reachable_by_all(folder)), usual)  # noqa: S108
