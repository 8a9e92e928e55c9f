"""The folder and the state file by which other commands find a running `dev`."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_LOCK_FILE = "dev.lock"


class DevError(Exception):
    """The message says why; nothing was written."""


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Addresses of a running dev stack."""

    pid: int
    pg_dsn: str
    nats_servers: str
    protocol: str


def database_of(version: str) -> str:
    """Return the name of a version's database: a persistent folder may contain both."""
    return f"dev_{version}"


def state_path() -> Path:
    """Return the file in which `call` finds the dev stack of this user."""
    private = os.environ.get("XDG_RUNTIME_DIR")
    folder = private if private and Path(private).is_dir() else tempfile.gettempdir()
    return Path(folder) / f"openapi-tool-dev-{os.geteuid()}.json"


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open and lock a private file; yield its descriptor, whose lock a child process inherits.

    Raises BlockingIOError if another process has the lock, or OSError.
    """
    descriptor = _open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.fchmod(descriptor, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(path.stat(), os.fstat(descriptor)):
            # The path was deleted or replaced after it was opened, so this lock protects nothing.
            raise BlockingIOError(f"{path} was just deleted or replaced")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def claimed_state() -> Iterator[int | None]:
    """Yield the locked state file; None if another dev stack has the lock, or the file cannot be used."""
    with ExitStack() as exits:
        try:
            descriptor = exits.enter_context(locked(state_path()))
        except OSError:
            yield None
        else:
            write(descriptor, "")
            yield descriptor


def _open_private(path: Path, flags: int) -> int:
    # Another user may have put a link or FIFO in its place.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # opening a FIFO could block
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not a file of this user")


def write(descriptor: int, text: str) -> None:
    """Replace the content of a locked file."""
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


@contextmanager
def persistent_folder(folder: Path) -> Iterator[int]:
    """Create and lock the folder of `--keep`; yield the descriptor. Raises DevError."""
    with ExitStack() as exits:
        try:
            _create(folder)
            descriptor = exits.enter_context(locked(folder / _LOCK_FILE))
        except BlockingIOError:
            pid = (folder / _LOCK_FILE).read_text(encoding="ascii")
            raise DevError(f"{folder} is in use by another dev (process {pid})") from None
        except OSError as error:
            raise DevError(
                f"{folder} cannot be used: {error.strerror or error}; name another folder with --keep"
            ) from None
        write(descriptor, str(os.getpid()))
        yield descriptor


def _create(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o700 if os.geteuid() else 0o711)  # started by root, PostgreSQL runs as another user
    elif any(folder.iterdir()) and not (folder / _LOCK_FILE).exists():
        raise DevError(f"{folder} holds other things than data of dev; choose a new or an empty folder")


def announce(descriptor: int, pg_dsn: str, nats_servers: str, version: str) -> None:
    """Write the addresses to the locked state file."""
    write(descriptor, json.dumps(asdict(StackAddress(os.getpid(), pg_dsn, nats_servers, version))))


def running_dev(version: str | None = None) -> StackAddress:
    """Return the addresses of this user's running dev stack. Raises DevError, also if it is of another `version`."""
    path = state_path()
    try:
        with os.fdopen(_open_private(path, os.O_RDONLY), encoding="utf-8") as file:
            address = StackAddress(**json.load(file))
    except FileNotFoundError:
        raise DevError("no dev stack is running") from None
    except OSError as error:
        raise DevError(f"the state of the dev stack cannot be read: {error}") from None
    except (ValueError, TypeError):
        raise DevError(f"no dev stack is up: {path} is still empty") from None
    if not _runs(address.pid):
        raise DevError(f"no dev stack is running: {path} is of process {address.pid}, which has ended")
    if version not in (None, address.protocol):
        raise DevError(f"the running dev stack is of protocol {address.protocol}, not of {version}")
    return address


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
