"""Embedded stack: PostgreSQL, NATS, the double of Jina and executors, as child processes with a common folder.

An executor trusts the CA that this module creates, and resolves Jina's hosts to the double's port on loopback.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import trustme

from openapi_tool.local.dev import KEY_NAMES
from openapi_tool.local.double import KEYS_VARIABLE
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.placed_call import VERSION
from openapi_tool.local.postgres_server import PostgresServer, reachable_by_all
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.servers import EmbeddedServer, NatsServer, ServerProcess
from openapi_tool.tools.operations import OPERATIONS

_ADMIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: a CA, and the double's chain with its key."""

    ca: Path
    server: Path


def make_certificates(folder: Path) -> Certificates:
    """Write a new CA and a certificate for the upstream's hosts into `folder`."""
    authority = trustme.CA()
    server = authority.issue_cert(*(operation.host for operation in OPERATIONS))
    files = Certificates(folder / "ca.pem", folder / "server.pem")
    authority.cert_pem.write_to_path(str(files.ca))
    server.private_key_and_cert_chain_pem.write_to_path(str(files.server))
    files.server.chmod(0o600)
    return files


class UpstreamDouble(EmbeddedServer):
    """Starts and controls the double (`openapi_tool.local.double`). `keys` are the keys that it accepts, by name."""

    def __init__(self, folder: Path, certificates: Certificates, guard: Guard, key_names: Sequence[str]) -> None:
        self._log = folder / "double.log"
        self._certificates = certificates
        self._guard = guard
        self.keys = {name: f"double-{secrets.token_hex(12)}" for name in key_names}
        self.port = self.admin_port = 0

    def start(self) -> None:
        """Start it; a restart keeps its ports. Raises ServerFailed."""
        self._log.unlink(missing_ok=True)
        program = [sys.executable, "-m", "openapi_tool.local.double"]
        command: list[str | Path] = [*program, self._certificates.server, str(self.port), str(self.admin_port)]
        environment = {"PATH": os.environ.get("PATH", ""), KEYS_VARIABLE: json.dumps(self.keys)}
        self.process = ServerProcess("the Jina double", command, self._guard, self._log, environment=environment)
        self.process.start(self._is_ready)

    def _is_ready(self) -> bool:
        line, newline, _ = self._log.read_text(errors="replace").partition("\n")
        is_whole_line = bool(newline)
        if not is_whole_line or not line.startswith("{"):
            return False
        ports = json.loads(line)
        self.port, self.admin_port = ports["port"], ports["admin_port"]
        return True

    def rules(self, *rules: Mapping[str, Any]) -> None:
        """Replace all rules (`openapi_tool.local.double.ResponseRule`)."""
        self._admin("PUT", "/rules", list(rules))

    def fallbacks(self, *rules: Mapping[str, Any]) -> None:
        """Replace the rules for requests that nothing else answers."""
        self._admin("PUT", "/fallbacks", list(rules))

    def requests(self, at_least: int = 0) -> list[dict[str, Any]]:
        """Return received requests once there are `at_least` as many. Raises TimeoutError."""
        received: list[dict[str, Any]] = self._admin("GET", f"/requests?at_least={at_least}")
        return received

    def clear_requests(self) -> None:
        """Clear the log of requests."""
        self._admin("DELETE", "/requests")

    def _admin(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin_port}{path}", data, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment
        with opener.open(request, timeout=_ADMIN_TIMEOUT_S) as response:
            return json.load(response)


def kernel_schema(version: str = VERSION) -> str:
    """Return the DDL of a kernel's tables."""
    versions = [VERSION]
    if version != VERSION:
        versions.append(version)  # its file changes the tables of the default version
    folder = files(__package__) / "data"
    return "".join((folder / f"kernel_{each}.sql").read_text(encoding="utf-8") for each in versions)


class EmbeddedStack:
    """PostgreSQL, NATS and the Jina double as child processes, with a temporary folder in `base`.

    With `keep`, the data of PostgreSQL and NATS stays in that folder. Ports are free ones unless given. Locks on the
    file descriptors in `hold` last until everything has stopped. `guard` can end further processes of the same run.
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
        self.folder.chmod(0o755)  # root starts PostgreSQL as another user, who must reach it
        for name in ("postgres", "nats"):
            (self.folder / name).mkdir()
        self.certificates = make_certificates(self.folder)
        self.postgres = PostgresServer(self.folder / "postgres", self.guard, port=pg_port, keep=keep)
        store = keep / "nats" if keep else None
        self.nats = NatsServer(self.folder / "nats", self.guard, port=nats_port, store=store)
        self.upstream = UpstreamDouble(self.folder, self.certificates, self.guard, key_names)

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor() as starters:
                # Raises the first exception; the end of the `with` block waits for the others.
                list(starters.map(lambda server: server.start(), (self.postgres, self.nats, self.upstream)))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ended(self) -> ServerProcess | None:
        """Return a server that was started and has ended, None if all run."""
        for server in (self.postgres, self.nats, self.upstream):
            if server.process is not None and not server.process.alive:
                return server.process
        return None

    def executor(
        self,
        name: str,
        database: str,
        settings: Mapping[str, str] | None = None,
        *,
        real_upstream: bool = False,
        module: str = "openapi_tool.local.executor",
    ) -> ExecutorProcess:
        """Return an executor, not yet started; `settings` are environment variables.

        `module` is a variant of `openapi_tool.local.executor`, such as one that fails on purpose.
        """
        environment = {"PG_DSN": self.postgres.dsn(database), "NATS_SERVERS": self.nats.url}
        if not real_upstream:
            environment |= {**self.upstream.keys, "SSL_CERT_FILE": str(self.certificates.ca)}
            environment["OPENAPI_TOOL__URL_POLICY__ALLOW"] = RECORDED_HOSTS
        port = None if real_upstream else self.upstream.port
        return ExecutorProcess(name, self.folder, self.guard, environment | dict(settings or {}), port, module)

    def close(self) -> None:
        """Stop every process and remove the folder."""
        self.guard.close()


def _base_folder() -> Path:
    """Return the folder for temporary ones; as root one that PostgreSQL's unprivileged user can reach."""
    usual = Path(tempfile.gettempdir())
    if os.geteuid() != 0:
        return usual
    for folder in (usual, Path("/var/tmp"), Path("/dev/shm")):  # noqa: S108
        if reachable_by_all(folder):
            return folder
    return usual
