"""The processes of a hostile run: an upstream of prepared bytes, the victim, the executor, and its vital signs."""

from __future__ import annotations

import secrets
import sys
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.server import ServerProcess, free_port
from openapi_tool.local.stack import EmbeddedStack
from tests.hostile.executor import PROBE_VARIABLE, LagProbe
from tests.hostile.upstream import RECEIVED
from tests.hostile.victim import VictimProcess
from tests.role import dsn_of

_FORGET_PEAK = "5"  # proc(5): writing this to clear_refs resets VmHWM


@dataclass(frozen=True, slots=True)
class Vitals:
    """What became of the executor during a case: bytes, seconds, and whether the same process still runs."""

    peak_bytes: int
    lag_s: float
    log_bytes: int
    alive: bool


class Stage:
    """Starts everything; `begin` and `vitals` stand around each case. Executors start again where one was spoilt."""

    def __init__(self, stack: EmbeddedStack, database: str, settings: Mapping[str, str] | None = None) -> None:
        self.stack = stack
        self.database = database
        self.spoilt = False
        self._exits = ExitStack()
        self._guard = Guard()
        self._exits.callback(self._guard.close)
        self.folder = stack.folder / f"hostile-{uuid.uuid4().hex[:8]}"
        self.answers = self.folder / "answers"
        self.answers.mkdir(parents=True)
        self.health_port = free_port()
        self.secrets = {
            **{name: f"{name.lower()}-{secrets.token_hex(12)}" for name in ("JINA_API_KEY", "SEARCH_API_KEY")},
            "TENANT_TOKEN": f"tenant-{secrets.token_hex(12)}",
            "PGPASSWORD": f"libpq-{secrets.token_hex(12)}",
        }
        self.probe = LagProbe(self.folder / "lag")
        self._settings = dict(settings or {})

    def __enter__(self) -> Self:
        try:
            self._start_upstream()
            victim = VictimProcess(self.stack.postgres.dsn(self.database), self.stack.nats.url, self._guard)
            self.victim = self._exits.enter_context(victim)
            self.executor = self._executor({})
            self.executor.start()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _start_upstream(self) -> None:
        command: list[str | Path] = [
            *(sys.executable, "-m", "tests.hostile.upstream", "--folder", self.answers),
            *("--certificate", self.stack.certificates.server),
        ]
        log = self.folder / "upstream.log"
        upstream = ServerProcess("the hostile upstream", command, self._guard, log)
        upstream.start(lambda: log.read_text().endswith("\n"))
        self.upstream_port = int(log.read_text().splitlines()[0])

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the executor, which the command line takes as well."""
        return {
            "PG_DSN": dsn_of(self.stack, self.database),
            "NATS_SERVERS": self.stack.nats.url,
            "SSL_CERT_FILE": str(self.stack.certificates.ca),
            "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "SEARCH_API_KEY,TENANT_TOKEN",
            "OPENAPI_TOOL__HEALTH__PORT": str(self.health_port),
            "OPENAPI_TOOL__RETRY__FIRST_WAIT_S": "0.05",
            **self.secrets,
            **self._settings,
        }

    def _executor(self, more: Mapping[str, str]) -> ExecutorProcess:
        environment = {**self.environment, PROBE_VARIABLE: str(self.folder / "lag"), **more}
        return ExecutorProcess(
            "executor", self.folder, self._guard, environment, self.upstream_port, "tests.hostile.executor"
        )

    def restart(self, settings: Mapping[str, str] | None = None) -> None:
        """A fresh executor in place of whatever is left of the last one, with more settings."""
        if self.executor.process.alive:
            self.executor.process.kill()
        self.executor = self._executor(settings or {})
        self.executor.start()

    def begin(self) -> None:
        """Forget what was measured before."""
        self._pid = self.executor.process.pid
        self._log_from = self._log_size()
        self.received_from = self._received_size()
        self.probe.forget()
        self._status("clear_refs").write_text(_FORGET_PEAK)

    def vitals(self) -> Vitals:
        """What was measured since the beginning."""
        alive = self.executor.process.alive and self.executor.process.pid == self._pid
        peak = self._peak_bytes() if alive else 0
        return Vitals(peak, self.probe.worst_s, self._log_size() - self._log_from, alive)

    def _status(self, name: str) -> Path:
        return Path("/proc") / str(self._pid) / name

    def _peak_bytes(self) -> int:
        """The most memory that was resident since the beginning, as the kernel counts it."""
        lines = self._status("status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def resident_bytes(self) -> int:
        """The memory that is resident now."""
        return int(psutil.Process(self.executor.process.pid).memory_info().rss)

    def log_text(self) -> str:
        """What the executor has logged since the beginning."""
        with self.executor.process.log.open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace")

    def received(self) -> bytes:
        """The requests of attackers that have come since the beginning."""
        path = self.answers / RECEIVED
        return path.read_bytes()[self.received_from :] if path.exists() else b""

    def _received_size(self) -> int:
        path = self.answers / RECEIVED
        return path.stat().st_size if path.exists() else 0

    def _log_size(self) -> int:
        return self.executor.process.log.stat().st_size
