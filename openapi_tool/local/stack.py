"""Embedded stack: starts all servers in a second or two, and leaves no files or processes."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trustme

from openapi_tool.local.dev import KEY_NAMES
from openapi_tool.local.double import KEYS_VARIABLE
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.servers import NatsServer, PostgresServer, ServerFailed, ServerProcess, reachable_by_all
from openapi_tool.tools.catalogue import OPERATIONS

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the CA to trust, and the double's chain with its key."""

    ca: Path
    server: Path


def make_certificates(folder: Path) -> Certificates:
    """Write both files into `folder`: a temporary CA, and a certificate for the upstream's hosts."""
    authority = trustme.CA()
    server = authority.issue_cert(*(operation.host for operation in OPERATIONS))
    files = Certificates(folder / "ca.pem", folder / "server.pem")
    authority.cert_pem.write_to_path(str(files.ca))
    server.private_key_and_cert_chain_pem.write_to_path(str(files.server))
    files.server.chmod(0o600)
    return files


class UpstreamDouble:
    """Starts the double, sets its rules, reads the requests that it received. `keys` maps names to accepted keys."""

    def __init__(self, folder: Path, certificates: Certificates, guard: Guard, key_names: Sequence[str]) -> None:
        self._log = folder / "double.log"
        self._certificates = certificates
        self._guard = guard
        self.keys = {name: f"double-{secrets.token_hex(12)}" for name in key_names}
        self.port = 0
        self.admin_port = 0
        self.process: ServerProcess | None = None

    def start(self) -> None:
        """Start it; a restart keeps its ports. Raises ServerFailed."""
        self._log.unlink(missing_ok=True)
        command: list[str | Path] = [
            *(sys.executable, "-m", "openapi_tool.local.double"),
            *("--certificate", self._certificates.server),
            *("--port", str(self.port), "--admin-port", str(self.admin_port)),
        ]
        environment = {"PATH": os.environ.get("PATH", ""), KEYS_VARIABLE: json.dumps(self.keys)}
        self.process = ServerProcess("the Jina double", command, self._guard, self._log, environment=environment)
        self.process.start(self._is_ready)

    def _is_ready(self) -> bool:
        line = self._log.read_text(errors="replace").partition("\n")
        if not line[1] or not line[0].startswith("{"):
            return False
        ports = json.loads(line[0])
        self.port, self.admin_port = ports["port"], ports["admin_port"]
        return True

    def stop(self) -> None:
        """Stop it."""
        if self.process is not None:
            self.process.stop()

    def rules(self, *rules: Mapping[str, Any]) -> None:
        """Replace all rules (`openapi_tool.local.double.Rule`); none means: answer from recordings only."""
        self._admin("PUT", "/rules", list(rules))

    def fallbacks(self, *rules: Mapping[str, Any]) -> None:
        """Replace the rules for requests that neither a recording nor another rule answers."""
        self._admin("PUT", "/fallbacks", list(rules))

    def requests(self, at_least: int = 0) -> list[dict[str, Any]]:
        """Return received requests, oldest first, with `body` as text. Waits for `at_least`; raises TimeoutError."""
        received: list[dict[str, Any]] = self._admin("GET", f"/requests?at_least={at_least}")
        return received

    def clear_requests(self) -> None:
        """Clear the log of received requests."""
        self._admin("DELETE", "/requests")

    def _admin(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)


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
