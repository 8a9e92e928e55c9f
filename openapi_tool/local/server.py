"""Base of all embedded servers: a child process, watched by the guard, that logs to a file."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openapi_tool.local.guard import Guard

START_S = 20.0
STOP_S = 10.0
_POLL_S = 0.01
_LOG_TAIL_CHARS = 2000
_PORTS: Sequence[int] = range(20_000, 32_768)
_PORTS_TO_TRY = 200
_returned_ports: deque[int] = deque(maxlen=1_000)
_random = random.SystemRandom()  # forked processes choose differently


class ServerFailed(Exception):
    """An embedded server did not start; the message ends with the last lines of its log."""


class ServerProcess:
    """One child process. `stop_signal` asks it to stop; `start` may be called again after `stop` or `kill`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        guard: Guard,
        log: Path,
        *,
        stop_signal: signal.Signals = signal.SIGTERM,
        environment: Mapping[str, str] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._command = [str(part) for part in command]
        self._guard = guard
        self._stop_signal = stop_signal
        self._environment = environment
        self._identity = dict(identity or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed(f"{self.name} was not started")
        return self._process

    def start(self, ready: Callable[[], bool]) -> None:
        """Start and wait until `ready`. Raises ServerFailed."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                **self._identity,
            )
        self._guard.stop_at_end(self._process, self._stop_signal)
        give_up = time.monotonic() + START_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise ServerFailed(f"{self.name} did not come up:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-_LOG_TAIL_CHARS:] if self.log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._running().send_signal(number)

    def stop(self) -> int:
        """Ask the process to stop, kill it if it does not, and return the exit code."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self.signal(self._stop_signal)
        return self.wait(STOP_S)

    def wait(self, seconds: float) -> int:
        """Wait for the end, kill the process if it does not end in time, and return the exit code."""
        try:
            return self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kill the process (SIGKILL)."""
        self._running().kill()
        return self._running().wait()

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None


def free_port() -> int:
    """Return a loopback port that is free now; another process may take it before it is used.

    It is below the ports that systems give to outgoing connections, any of which could take it, and is not returned
    again soon: the caller may use it later. Raises OSError.
    """
    for port in _random.choices(_PORTS, k=_PORTS_TO_TRY):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _returned_ports:
                _returned_ports.append(port)
                return port
    raise OSError(errno.EADDRINUSE, "no free port found")


def accepts(port: int) -> bool:
    """Return whether a process listens on `port` on loopback."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
