"""`serve` as a process of its own, with the TCP connects to the upstream pointed at the double."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from openapi_tool.local.fail_points import FOLDER_VARIABLE, arm
from openapi_tool.local.guard import Guard
from openapi_tool.local.server import ServerProcess
from openapi_tool.service import run
from openapi_tool.settings import load_settings
from openapi_tool.telemetry.logs import guard_crashes

READY = "consumer.started"


class LoopbackResolver(AbstractResolver):
    """Says that every host is at one port of loopback; Host, SNI and verification stay as they are."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The one address that there is."""
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
        """Nothing is held."""


class ExecutorProcess:
    """One replica of the executor; `upstream_port` None means the real upstream."""

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
        self.process = ServerProcess(
            name,
            [sys.executable, "-m", module, *arguments],
            guard,
            folder / f"{name}.log",
            environment={"PATH": os.environ.get("PATH", ""), **environment},
        )

    def start(self) -> None:
        """Start it and wait until it serves. Raises ServerFailed."""
        offset = self.process.log.stat().st_size if self.process.log.exists() else 0
        self.process.start(lambda: READY in self.process.log.read_text(errors="replace")[offset:])

    def stop(self) -> int:
        """SIGTERM, then wait for the drain. Returns the exit code."""
        return self.process.stop()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.signal(number)

    def log_text(self) -> str:
        """Everything that it has logged."""
        return self.process.log.read_text(errors="replace")


def main() -> None:
    """Serve with all connects to the upstream pointed at loopback."""
    parser = argparse.ArgumentParser(description="`openapi-tool serve` against the Jina double.")
    parser.add_argument("--upstream-port", type=int, required=True, help="the double's HTTPS port on loopback")
    arguments = parser.parse_args()
    if folder := os.environ.get(FOLDER_VARIABLE):
        arm(Path(folder))
    guard_crashes()
    run(load_settings(), os.environ, LoopbackResolver(arguments.upstream_port))


if __name__ == "__main__":
    main()
