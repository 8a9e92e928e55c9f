"""The folder and the state file by which other commands find a running `dev`."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from openapi_tool.environment import DEV_VARIABLE

_LOCK_FILE = "dev.lock"

_NAME_CHARS = 32
_NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{_NAME_CHARS - 1}}}")
_STATE_SUFFIX = ".json"
_FIRST_NAME = "dev"
_MAX_AUTOMATIC_NAMES = 16


class DevError(Exception):
    """The message says why; nothing was written."""


def automatic_names() -> Iterator[str]:
    """Yield the names that stacks without a given one get: the first that is free."""
    yield _FIRST_NAME
    yield from (f"{_FIRST_NAME}{number}" for number in range(2, _MAX_AUTOMATIC_NAMES + 1))


@dataclass(frozen=True, slots=True)
class ClaimedState:
    """Locked state file of the stack `name`."""

    name: str
    descriptor: int


class SeveralStacks(DevError):
    """Several dev stacks run, and none of them was named."""


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Addresses of a running dev stack."""

    pid: int
    pg_dsn: str
    nats_servers: str
    protocol: str


def database_of(version: str) -> str:
    """Return the name of the database of a protocol version: a persistent folder may contain one for each version."""
    return f"dev_{version}"


def state_path(name: str = _FIRST_NAME) -> Path:
    """Return the file in which commands find the dev stack of this user that has this name."""
    return _state_folder() / f"{_state_prefix()}{name}{_STATE_SUFFIX}"


def _state_folder() -> Path:
    private = os.environ.get("XDG_RUNTIME_DIR")
    return Path(private if private and Path(private).is_dir() else tempfile.gettempdir())


def _state_prefix() -> str:
    return f"openapi-tool-dev-{os.geteuid()}-"


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
def claimed_state(name: str | None = None) -> Iterator[ClaimedState | None]:
    """Yield the locked state file of a stack with this or a free name; None if no file can be used for a free one.

    Raises DevError if the name is not valid, or not free.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise DevError(f"--name: {name[:_NAME_CHARS]!r} must consist of a-z, 0-9 and -, at most {_NAME_CHARS} of them")
    candidates = automatic_names() if name is None else [name]
    with ExitStack() as exits:
        for candidate in candidates:
            try:
                descriptor = exits.enter_context(locked(state_path(candidate)))
            except BlockingIOError:
                if name is not None:
                    raise DevError(f"a dev stack named {name!r} is running; give this one another --name") from None
            except OSError as error:
                if name is not None:
                    raise DevError(f"--name: the state of {name!r} cannot be stored: {error}") from None
            else:
                write(descriptor, "")
                yield ClaimedState(candidate, descriptor)
                return
        yield None


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


def running_dev() -> StackAddress:
    """Return the addresses of this user's dev stack that `DEV_VARIABLE` names, else of the only one that runs.

    Raises DevError.
    """
    name = os.environ.get(DEV_VARIABLE)
    paths = [state_path(name)] if name and _NAME.fullmatch(name) else _state_files()
    running, reasons = _running_stacks(paths)
    if name and name not in running:
        missing = [f"no dev stack named {name[:_NAME_CHARS]!r} is running", *reasons]
        raise DevError("; ".join([*missing, f"running are: {', '.join(running_stacks()) or 'none'}"]))
    if not running:
        raise DevError("; ".join(reasons) or "no dev stack is running")
    [first, *others] = running
    if others:
        names = ", ".join(running)
        raise SeveralStacks(
            f"{len(running)} dev stacks are running: {names}; name one, such as: openapi-tool --dev {first} …"
        )
    return running[first]


def running_stacks() -> list[str]:
    """Return the names of this user's running dev stacks."""
    return list(_running_stacks(_state_files())[0])


def _state_files() -> list[Path]:
    try:
        folder = _state_folder()
    except FileNotFoundError:  # nothing may be written anywhere, as in a pod
        return []
    return sorted(folder.glob(f"{_state_prefix()}*{_STATE_SUFFIX}"))


def _running_stacks(paths: Iterable[Path]) -> tuple[dict[str, StackAddress], list[str]]:
    """Return the running stacks by name, and why others are not used."""
    running, reasons = {}, []
    for path in paths:
        name = path.name.removeprefix(_state_prefix()).removesuffix(_STATE_SUFFIX)
        try:
            running[name] = _stack_of(path)
        except FileNotFoundError:
            continue
        except DevError as why:
            reasons.append(str(why))
    return running, reasons


def _stack_of(path: Path) -> StackAddress:
    try:
        with os.fdopen(_open_private(path, os.O_RDONLY), encoding="utf-8") as file:
            address = StackAddress(**json.load(file))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DevError(f"the state of the dev stack cannot be read: {error}") from None
    except (ValueError, TypeError):
        raise DevError(f"no dev stack is up: {path} is still empty") from None
    if not _runs(address.pid):
        raise DevError(f"no dev stack is running: {path} is of process {address.pid}, which has ended")
    return address


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
