"""How other commands find a running `dev`, and how two of them are kept apart.

Each `dev` has a *state file* in a folder of the user, which has its name and, once it serves, its addresses. `dev`
locks the file, and with --keep also a file in its folder: a second one that wants the same name or folder is refused.
The lock ends with the last process of the stack, however that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from openapi_tool.environment import DEV_VARIABLE
from openapi_tool.tools.wording import first_of

_LOCK_FILE = "dev.lock"  # in the folder of --keep
_STATE_SUFFIX = ".json"
_NAME_CHARS = 32
_NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{_NAME_CHARS - 1}}}")  # dev, dev2, my-stack
_FIRST_NAME = "dev"
_MAX_AUTOMATIC_NAMES = 16
MAX_SHOWN_NAMES = 10
"""Running stacks that a message names."""

_MAX_STATE_BYTES = 64 * 1024
_MAX_PID = 2**31 - 1

_Text = Annotated[str, Field(max_length=4_096)]


class DevError(Exception):
    """The message says why; nothing was written."""


class SeveralStacks(DevError):
    """Several dev stacks run, and none of them was named."""


@dataclass(frozen=True, slots=True)
class ClaimedState:
    """Locked state file of the stack `name`."""

    name: str
    descriptor: int


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Addresses of a running dev stack; the content of its state file.

    `folder` is where it was started, empty if that was deleted; `keys` are the variables that hold the keys of its
    executors. `name` is that of the stack, which is in the file's name only.
    """

    pid: Annotated[int, Field(gt=0, le=_MAX_PID)]
    pg_dsn: _Text
    nats_servers: _Text
    protocol: _Text
    folder: _Text = ""
    keys: tuple[_Text, ...] = ()
    name: str = ""

    @property
    def described(self) -> str:
        """What a command says if it acts on this stack."""
        started_in = f" (started in {self.folder})" if self.folder else ""
        return f"of the dev stack {self.name!r}{started_in}"


_ADDRESS = TypeAdapter(StackAddress)


def database_of(version: str) -> str:
    """Return the name of the database of a protocol version: a persistent folder may contain one for each version."""
    return f"dev_{version}"


def automatic_names() -> Iterator[str]:
    """Yield the names that stacks without a given one get: the first that is free."""
    yield _FIRST_NAME
    for number in range(2, _MAX_AUTOMATIC_NAMES + 1):
        yield f"{_FIRST_NAME}{number}"


def state_path(name: str = _FIRST_NAME) -> Path:
    """Return the file in which commands find the dev stack of this user that has this name."""
    return _state_folder() / f"{_state_prefix()}{name}{_STATE_SUFFIX}"


def _state_folder() -> Path:
    private = os.environ.get("XDG_RUNTIME_DIR")
    # `os.path.isdir`: `Path.is_dir` raises for a name that is too long.
    return Path(private if private and os.path.isdir(private) else tempfile.gettempdir())  # noqa: PTH112


def _state_prefix() -> str:
    return f"openapi-tool-dev-{os.geteuid()}-"


@contextmanager
def claimed_state(name: str | None = None) -> Iterator[ClaimedState | None]:
    """Yield the locked state file of a stack with this or a free name; None if no file can be used for a free one.

    Raises DevError if the name is not valid, or not free.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise DevError(f"--name: {name[:_NAME_CHARS]!r} must consist of a-z, 0-9 and -, at most {_NAME_CHARS} of them")
    with ExitStack() as exits:
        state = _first_free_state(exits) if name is None else _state_named(name, exits)
        if state is not None:
            write(state.descriptor, "")  # without addresses, as nothing runs yet
        yield state


def _first_free_state(exits: ExitStack) -> ClaimedState | None:
    for name in automatic_names():
        try:
            return ClaimedState(name, exits.enter_context(locked(state_path(name))))
        except OSError:  # in use, or the folder takes no file
            continue
    return None


def _state_named(name: str, exits: ExitStack) -> ClaimedState:
    try:
        return ClaimedState(name, exits.enter_context(locked(state_path(name))))
    except BlockingIOError:
        raise DevError(f"a dev stack named {name!r} is running; give this one another --name") from None
    except OSError as error:
        raise DevError(f"--name: the state of {name!r} cannot be stored: {error}") from None


def announce(descriptor: int, pg_dsn: str, nats_servers: str, version: str, keys: tuple[str, ...] = ()) -> None:
    """Write the addresses to the locked state file."""
    folder = ""
    with suppress(FileNotFoundError):
        folder = str(Path.cwd())
    write(descriptor, json.dumps(asdict(StackAddress(os.getpid(), pg_dsn, nats_servers, version, folder, keys))))


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


def _open_private(path: Path, flags: int) -> int:
    """Open a file of this user.

    Raises PermissionError or OSError if another user has put a file, a link or a FIFO in its place.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # opening a FIFO could block
    status = os.fstat(descriptor)
    is_own_file = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    if is_own_file:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not a file of this user")


def write(descriptor: int, text: str) -> None:
    """Replace the content of a locked file."""
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def running_dev() -> StackAddress:
    """Return the addresses of this user's dev stack that `DEV_VARIABLE` names, else of the only one that runs.

    Raises DevError.
    """
    name = os.environ.get(DEV_VARIABLE)
    paths = [state_path(name)] if name and _NAME.fullmatch(name) else _state_files()
    found = _find_stacks(paths)
    if name and name not in found.running:
        missing = [f"no dev stack named {name[:_NAME_CHARS]!r} is running", *found.why_others_not]
        raise DevError("; ".join([*missing, f"running are: {first_of(running_stacks(), MAX_SHOWN_NAMES) or 'none'}"]))
    if not found.running:
        raise DevError("; ".join(found.why_others_not) or "no dev stack is running")
    [first, *others] = found.running
    if others:
        names = first_of(list(found.running), MAX_SHOWN_NAMES)
        raise SeveralStacks(
            f"{len(found.running)} dev stacks are running: {names}; name one, such as: openapi-tool --dev {first} …"
        )
    return found.running[first]


def running_stacks() -> list[str]:
    """Return the names of this user's running dev stacks."""
    return list(_find_stacks(_state_files()).running)


def _state_files() -> list[Path]:
    """Return the state files of this user. A file whose name has none that `dev` accepts is none of them."""
    try:
        folder = _state_folder()
    except FileNotFoundError:  # nothing may be written anywhere, as in a pod
        return []
    files = folder.glob(f"{_state_prefix()}*{_STATE_SUFFIX}")
    return sorted(file for file in files if _NAME.fullmatch(_name_of(file)))


def _name_of(state_file: Path) -> str:
    return state_file.name.removeprefix(_state_prefix()).removesuffix(_STATE_SUFFIX)


class _FoundStacks(NamedTuple):
    """The running stacks by name, and for each other state file why it belongs to none."""

    running: dict[str, StackAddress]
    why_others_not: list[str]


def _find_stacks(paths: Iterable[Path]) -> _FoundStacks:
    found = _FoundStacks({}, [])
    for path in paths:
        name = _name_of(path)
        try:
            found.running[name] = replace(_running_stack_of(path), name=name)
        except FileNotFoundError:
            continue
        except DevError as why:
            found.why_others_not.append(str(why))
    return found


def _running_stack_of(path: Path) -> StackAddress:
    """Return the addresses in a state file. Raises FileNotFoundError, or DevError if no stack is up."""
    try:
        with os.fdopen(_open_private(path, os.O_RDONLY), "rb") as file:
            content = file.read(_MAX_STATE_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DevError(f"the state of the dev stack cannot be read: {error}") from None
    if not content:
        raise DevError(f"no dev stack is up: {path} is still empty")
    try:
        address = _ADDRESS.validate_json(content)
    except ValidationError:
        raise DevError(f"{path} is no state file of a dev stack; delete it, and start that `dev` again") from None
    if not _runs(address.pid):
        raise DevError(f"no dev stack is running: {path} is of process {address.pid}, which has ended")
    return address


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
