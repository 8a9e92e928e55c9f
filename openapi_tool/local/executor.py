"""Run `serve` as a child process whose upstream is the double."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from aiohttp.abc import AbstractResolver, ResolveResult

from openapi_tool.local.guard import Guard
from openapi_tool.local.servers import STOP_S, ServerProcess
from openapi_tool.service.process import run
from openapi_tool.settings import SettingsError, load_settings
from openapi_tool.signals import guard_service
from openapi_tool.telemetry.logs import guard_crashes

READY = "consumer.started"
"""Log action of `serve` once it fetches commands."""


class LoopbackResolver(AbstractResolver):
    """Resolves every host to one loopback port, where the double listens.

    The executor still asks for Jina's hosts by name (Host, SNI), and verifies their certificates.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the loopback address and port."""
        del port, family
        flags = socket.AI_NUMERICHOST
        return [
            ResolveResult(hostname=host, host="127.0.0.1", port=self._port, family=socket.AF_INET, proto=0, flags=flags)
        ]

    async def close(self) -> None:
        """Do nothing."""


class ExecutorProcess:
    """One replica of the executor.

    `module` is this module, or a variant with the same command line. If the double's port is None, `openapi_tool` runs
    instead, with the real upstream.
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
        program = ["openapi_tool", "serve"]
        if upstream_port is not None:
            program = [module, "--upstream-port", str(upstream_port)]
        self.process = ServerProcess(
            name,
            [sys.executable, "-m", *program],
            guard,
            folder / f"{name}.log",
            environment={"PATH": os.environ.get("PATH", ""), **environment},
        )

    def start(self) -> None:
        """Wait until it serves. Raises ServerFailed."""
        log = self.process.log
        # A second start appends to the log, in which the first one already wrote READY.
        old_size = log.stat().st_size if log.exists() else 0
        self.process.start(lambda: READY.encode() in log.read_bytes()[old_size:])

    def stop(self, within_s: float = STOP_S) -> int:
        """Drain it, and return the exit code. It is killed if it is late."""
        return self.process.stop(within_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.signal(number)

    def log_text(self) -> str:
        """Return the log."""
        return self.process.log.read_text(errors="replace")


def main() -> None:
    """Serve against the double."""
    guard_service()
    parser = argparse.ArgumentParser(description="`openapi-tool serve` against the Jina double.")
    parser.add_argument("--upstream-port", type=int, required=True, help="the double's HTTPS port on loopback")
    arguments = parser.parse_args()
    guard_crashes()
    try:
        # load_settings is passed, not called: SIGHUP calls it again.
        run(load_settings, os.environ, LoopbackResolver(arguments.upstream_port))
    except SettingsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
