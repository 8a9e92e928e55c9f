"""The whole embedded stack: up in a second or two, gone without a trace."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

from openapi_tool.local.certificates import make_certificates
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.nats_server import NatsServer
from openapi_tool.local.postgres import PostgresServer, reachable_by_all
from openapi_tool.local.upstream import UpstreamDouble

KEY_NAMES = ("JINA_API_KEY", "SEARCH_API_KEY")


def kernel_schema() -> str:
    """The DDL of the kernel's tables, protocol v1r4."""
    return (files(__package__) / "data" / "kernel_v1r4.sql").read_text(encoding="utf-8")


class EmbeddedStack:
    """PostgreSQL, NATS and the Jina double as child processes in one folder of their own."""

    def __init__(self, key_names: Sequence[str] = KEY_NAMES, base: Path | None = None) -> None:
        self._guard = Guard()
        self.folder = Path(tempfile.mkdtemp(prefix="openapi-tool-", dir=base or _base_folder()))
        self._guard.own(self.folder)
        self.folder.chmod(0o755)
        for name in ("postgres", "nats"):
            (self.folder / name).mkdir()
        self.certificates = make_certificates(self.folder)
        self.postgres = PostgresServer(self.folder / "postgres", self._guard)
        self.nats = NatsServer(self.folder / "nats", self._guard)
        self.upstream = UpstreamDouble(self.folder, self.certificates, self._guard, key_names)

    def __enter__(self) -> Self:
        try:
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

    def another_nats(self, name: str, more: str) -> NatsServer:
        """One more NATS server, not yet started, with `more` in its configuration."""
        folder = self.folder / name
        folder.mkdir()
        return NatsServer(folder, self._guard, more)

    def executor(
        self, name: str, database: str, settings: Mapping[str, str] | None = None, *, real_upstream: bool = False
    ) -> ExecutorProcess:
        """An executor on this stack, not yet started; `settings` are environment variables."""
        environment = {
            "PG_DSN": self.postgres.dsn(database),
            "NATS_SERVERS": self.nats.url,
            **({} if real_upstream else self.upstream.keys | {"SSL_CERT_FILE": str(self.certificates.ca)}),
            **(settings or {}),
        }
        return ExecutorProcess(
            name, self.folder, self._guard, environment, None if real_upstream else self.upstream.port
        )

    def close(self) -> None:
        """Stop every process and remove the folder: the guard does both, as it would after a crash."""
        self._guard.close()


def _base_folder() -> Path:
    """A folder for temporary files that the unprivileged user of PostgreSQL can reach, too."""
    usual = Path(tempfile.gettempdir())
    if os.geteuid() != 0:
        return usual
    return next((folder for folder in (usual, Path("/var/tmp"), Path("/dev/shm")) if reachable_by_all(folder)), usual)  # noqa: S108
