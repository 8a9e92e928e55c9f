"""Run `serve` as a child process whose connections to the upstream go to the double."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from openapi_tool.local.guard import Guard
from openapi_tool.local.servers import ServerProcess
from openapi_tool.service import run
from openapi_tool.settings import SettingsError, load_settings
from openapi_tool.telemetry.logs import guard_crashes

_TAIL_CHARS = 2000

READY = "consumer.started"
"""Log action of `serve` once it fetches commands; the process counts as started when its log contains this."""


class LoopbackResolver(AbstractResolver):
    """Resolves every host to one loopback port; Host, SNI and verification stay unchanged."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the loopback address and port."""
        del port, family
        return [
            ResolveResult(
                hostname=host,
                host="127.0.0.1",
                port=self._port,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class _Process(ServerProcess):
    def log_tail(self) -> str:
        """Return the end of the log: messages of warnings and errors, and lines that are no log entries."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(filter(None, map(_message, lines)))[-_TAIL_CHARS:]


def _message(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except ValueError:  # the process ended in the middle of the line
        return ""
    return str(entry["message"]) if entry["level"] in ("warning", "error", "critical") else ""


class ExecutorProcess:
    """One replica of the executor, run as `python -m module`.

    `upstream_port` is the double's port. None means the real upstream; then `openapi_tool` runs instead of `module`.
    Otherwise `module` is this module, or a variant with the same command line.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        guard: Guard,
        environment: Mapping[str, str],
        upstream_port: int | None,
        module: str,
    ) -> None:
        module = "openapi_tool" if upstream_port is None else module
        arguments: list[Any] = ["serve"] if upstream_port is None else ["--upstream-port", upstream_port]
        self.process = _Process(
            name,
            [sys.executable, "-m", module, *arguments],
            guard,
            folder / f"{name}.log",
            environment={"PATH": os.environ.get("PATH", ""), **environment},
        )

    def start(self) -> None:
        """Start it and wait until it serves. Raises ServerFailed."""
        # A second start appends to the log, in which the first one already wrote READY.
        offset = self.process.log.stat().st_size if self.process.log.exists() else 0
        self.process.start(lambda: READY.encode() in self.process.log.read_bytes()[offset:])

    def stop(self) -> int:
        """Send SIGTERM, wait for the drain, and return the exit code."""
        return self.process.stop()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.signal(number)

    def log_text(self) -> str:
        """Return the log."""
        return self.process.log.read_text(errors="replace")


def main() -> None:
    """Serve with all connections to the upstream going to loopback."""
    parser = argparse.ArgumentParser(description="`openapi-tool serve` against the Jina double.")
    parser.add_argument("--upstream-port", type=int, required=True, help="the double's HTTPS port on loopback")
    arguments = parser.parse_args()
    guard_crashes()
    # load_settings is passed, not called: SIGHUP calls it again.
    try:
        run(load_settings, os.environ, LoopbackResolver(arguments.upstream_port))
    except SettingsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
