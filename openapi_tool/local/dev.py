"""Shared parts of `dev` and `call`, which works without the extra [local]: so none of its packages is imported here."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson
from nats.js.errors import NotFoundError

from openapi_tool.environment import DEV_VARIABLE
from openapi_tool.local.caller import Caller, prepare_database
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.identity import parse_command_subject, wakeup_subject

if TYPE_CHECKING:
    from openapi_tool.local.stack import EmbeddedStack

PROJECT, AGENT = "proj_dev", "agent_dev"
MARK = "openapi-tool dev"
"""Comment on the database of `dev`, and metadata of its stream."""

FALLBACKS = ({"match": "://", "answer": "r-post-json"}, {"answer": "s-post-json"})
"""Fallbacks of the double: a page for an address, else a list of results."""

KEY_NAMES = ("JINA_API_KEY", "SEARCH_API_KEY")
"""Variables with keys of the double."""

_STREAM_MARK = {"made_by": MARK}
_LOCK_FILE = "dev.lock"
_FIRST_NAME = "dev"
_MAX_AUTOMATIC_NAMES = 16
_NAME_CHARS = 32
_NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{_NAME_CHARS - 1}}}")
_STATE_SUFFIX = ".json"
_SUBJECT = re.compile(r"[^\s.*>{}]+(\.[^\s.*>{}]+)+")
_NAMES_SHOWN = 20
_NOT_OF_DEV = (
    "the {} was not created by `openapi-tool dev`: the call would write a card, an edge and inbox rows there, "
    "and real workers would get its doorbell; add --yes to allow it"
)


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


def automatic_names() -> Iterator[str]:
    """Yield the names that stacks without a given one get: the first that is free."""
    yield _FIRST_NAME
    yield from (f"{_FIRST_NAME}{number}" for number in range(2, _MAX_AUTOMATIC_NAMES + 1))


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


@dataclass(frozen=True, slots=True)
class ClaimedState:
    """Locked state file of the stack `name`."""

    name: str
    descriptor: int


@contextmanager
def claimed_state(name: str | None = None) -> Iterator[ClaimedState | None]:
    """Yield the locked state file of a stack with this or a free name; None if no file can be used for a free one.

    Raises DevError if the name is not valid, or not free.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise DevError(f"--name: {name[:_NAME_CHARS]!r} must consist of a-z, 0-9 and -, at most {_NAME_CHARS} of them")
    with ExitStack() as exits:
        for candidate in automatic_names() if name is None else [name]:
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


class SeveralStacks(DevError):
    """Several dev stacks run, and none of them was named."""


def running_dev(version: str | None = None) -> StackAddress:
    """Return the addresses of this user's dev stack that `DEV_VARIABLE` names, else of the only one that runs.

    Raises DevError, also if it is of another `version`.
    """
    name = os.environ.get(DEV_VARIABLE)
    running, reasons = _running_stacks([state_path(name)] if name and _NAME.fullmatch(name) else _state_files())
    if name and name not in running:
        raise DevError("; ".join([f"no dev stack named {name[:_NAME_CHARS]!r} is running", *reasons]))
    if not running:
        raise DevError("; ".join(reasons) or "no dev stack is running")
    fitting = {known: stack for known, stack in running.items() if version in (None, stack.protocol)}
    if not fitting:
        [protocol, *_] = [stack.protocol for stack in running.values()]
        raise DevError(f"the running dev stack is of protocol {protocol}, not of {version}")
    [first, *others] = fitting
    if others:
        names = ", ".join(fitting)
        raise SeveralStacks(
            f"{len(fitting)} dev stacks are running: {names}; name one, such as: openapi-tool --dev {first} …"
        )
    return fitting[first]


def _state_files() -> list[Path]:
    return sorted(_state_folder().glob(f"{_state_prefix()}*{_STATE_SUFFIX}"))


def _running_stacks(paths: Iterable[Path]) -> tuple[dict[str, StackAddress], list[str]]:
    """Return the running stacks by name, and why others are not used."""
    running, reasons = {}, []
    for path in paths:
        try:
            running[path.name.removeprefix(_state_prefix()).removesuffix(_STATE_SUFFIX)] = _stack_of(path)
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


async def prepare(stack: EmbeddedStack, version: str, schema: str, tools: Iterable[Mapping[str, Any]]) -> None:
    """Create a missing stream and database; keep existing data, such as edited tools.

    The database gets its mark last: a database without the mark is incomplete, so the next start creates it again.
    """
    stack.upstream.fallbacks(*FALLBACKS)
    database = database_of(version)
    async with Caller.open(stack.postgres.dsn(), version, servers=stack.nats.url) as server:
        await server.make_stream(_STREAM_MARK)
        if await _comment(server, database) == MARK:
            return
        await server.database.execute(f"drop database if exists {database} with (force)")
        await prepare_database(stack.postgres.dsn(), database, schema)
        async with Caller.open(stack.postgres.dsn(database), version, servers=stack.nats.url) as caller:
            await caller.set_up_project(PROJECT, AGENT, tools)
        await server.database.execute(f"comment on database {database} is '{MARK}'")


async def _comment(caller: Caller, database: str | None = None) -> str | None:
    comment: str | None = await caller.database.fetchval(
        "select shobj_description(oid, 'pg_database') from pg_database "
        "where datname = coalesce($1, current_database())",
        database,
    )
    return comment


def log_entries(log: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield entries since the last read; an incomplete line is left for the next."""
    while line := log.readline():
        if not line.endswith(b"\n"):
            log.seek(-len(line), os.SEEK_CUR)
            return
        if line.startswith(b"{"):
            yield orjson.loads(line)


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """None means the dev stack's default; `anywhere` allows servers whose data `dev` did not create."""

    tool_name: str
    project_id: str | None
    agent_id: str | None
    channel_id: str
    anywhere: bool


async def save_call(caller: Caller, requested: RequestedCall, arguments: Any) -> PlacedCall:
    """Subscribe to the doorbell of a call, and save the call unpublished.

    Raises DevError if project, agent, tool or stream do not exist; it names the existing ones.
    """
    created_by_dev = await _comment(caller) == MARK
    if not created_by_dev and not requested.anywhere:
        raise DevError(_NOT_OF_DEV.format("database"))
    for option, value in (("--project", requested.project_id), ("--agent", requested.agent_id)):
        if not value and not created_by_dev:
            raise DevError(f"{option} is needed, because this database was not created by `openapi-tool dev`")
    project_id, agent_id = requested.project_id or PROJECT, requested.agent_id or AGENT
    tool = await _tool(caller, project_id, requested.tool_name)
    worker_target = await _worker_target(caller, project_id, agent_id)
    values: dict[str, Any] = {"project_id": project_id, "channel_id": requested.channel_id, "agent_id": agent_id}
    subject = _subject(caller.version, tool, values)
    await _check_stream(caller, subject, anywhere=requested.anywhere)
    try:
        doorbell = wakeup_subject(caller.version, project_id, requested.channel_id, worker_target)
    except ValueError as error:
        raise DevError(str(error)) from None
    await caller.listen(doorbell)
    async with caller.database.transaction():  # rolled back if the database refuses anything
        return await caller.place(
            **values,
            tool_name=requested.tool_name,
            arguments=arguments,
            subject=subject,
            after_execution=tool["after_execution"] or "suspend",
            publish=False,
        )


async def tools_of(caller: Caller, project_id: str) -> dict[str, Mapping[str, Any]]:
    """Return `target_subject` and `after_execution` of a project's tools, by name."""
    rows = await caller.database.fetch(
        "select tool_name, target_subject, after_execution from resource.tools where project_id = $1", project_id
    )
    return {row["tool_name"]: dict(row) for row in rows}


async def _tool(caller: Caller, project_id: str, tool_name: str) -> Mapping[str, Any]:
    tools = await tools_of(caller, project_id)
    if not tools:
        rows = await caller.database.fetch("select distinct project_id from resource.tools")
        known = _listed(row["project_id"] for row in rows)
        raise DevError(f"there is no project {project_id!r} with tools; projects with tools: {known}")
    _require("tool", tool_name, project_id, tools)
    return tools[tool_name]


async def _worker_target(caller: Caller, project_id: str, agent_id: str) -> str:
    rows = await caller.database.fetch(
        "select agent_id, worker_target from resource.project_agents where project_id = $1", project_id
    )
    agents: dict[str, str] = {row["agent_id"]: row["worker_target"] for row in rows}
    _require("agent", agent_id, project_id, agents)
    return agents[agent_id]


def _require(kind: str, name: str, project_id: str, known: Collection[str]) -> None:
    if name not in known:
        raise DevError(f"project {project_id!r} has no {kind} {name!r}; its {kind}s: {_listed(known)}")


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
    return ", ".join(known[:_NAMES_SHOWN]) + more or "none"


def _subject(version: str, tool: Mapping[str, Any], values: Mapping[str, str]) -> str:
    subject = str(tool["target_subject"] or "")
    for name, value in values.items():
        subject = subject.replace(f"{{{name}}}", value)
    try:
        parsed = parse_command_subject(subject).version
    except Unanswerable:
        parsed = None
    if parsed != version or not _SUBJECT.fullmatch(subject):
        raise DevError(f"{tool['tool_name']!r} cannot be called: {subject!r} is no subject of a {version} tool command")
    return subject


async def _check_stream(caller: Caller, subject: str, *, anywhere: bool) -> None:
    jetstream = caller.client.jetstream()
    try:
        name = await jetstream.find_stream_name_by_subject(subject)
    except NotFoundError:
        raise DevError(f"no stream captures {subject}; the kernel or an executor creates it at its start") from None
    if not anywhere:
        info = await jetstream.stream_info(name)
        if not _STREAM_MARK.items() <= (info.config.metadata or {}).items():
            raise DevError(_NOT_OF_DEV.format("stream"))
