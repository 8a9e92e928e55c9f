"""The state of a gateway that a command is about, and `openapi-tool state purge`.

A gateway stores budgets, limits, switches of tools, tokens, texts and a row for each call. They are in a file (SQLite),
or in NATS, which the path `NATS` stands for.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.cli.kernel import find_dev, is_given, servers_of_named_dev
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.output import fail, print_status
from openapi_tool.gateway.call_row import CallRow
from openapi_tool.gateway.file_state import insert_row
from openapi_tool.gateway.opening import NATS
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import is_token
from openapi_tool.settings import given_values
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.state.sqlite import MEMORY, StateFile
from openapi_tool.state.sqlite_file import StateUnusable, default_path
from openapi_tool.tools.switches import SwitchRecordInvalid
from openapi_tool.tools.wording import short

if TYPE_CHECKING:
    from openapi_tool.bootstrap import Bootstrap
    from openapi_tool.gateway.nats_rows import NatsRows
    from openapi_tool.nats_client.client import BusClient

T = TypeVar("T")
_NOT_CONFIRMED = 1
_LOCAL = "local"  # project of `mcp` without --project, and of `gateway` without tokens
_PURGED = "budgets, limits, switches of tools, tokens, stored texts and results, and the rows of calls"


def chosen_state(option: Path | None) -> Path:
    """Return the state of a gateway: by default in the NATS of the settings, without one the default file."""
    if option is not None:
        return option
    try:
        return NATS if is_given(given_values(), "nats", "servers") else default_path(os.environ)
    except (SourceUnreadable, UnreadableVariable, StateUnusable) as error:
        fail(str(error))


def selected_state(option: Path | None) -> Path | None:
    """Return the state that a command is about, None for a kernel.

    Without the option the settings decide:

    - PostgreSQL is configured, or `--dev` names a dev stack: a kernel.
    - Servers of NATS are configured: the state in NATS.
    - Something else of NATS is configured, or a dev stack runs: a kernel.
    - Nothing is configured: the default file, if it exists.
    """
    if option is not None:
        return option
    try:
        configured = given_values()
    except (SourceUnreadable, UnreadableVariable):
        return None  # reported when the settings are loaded
    if "postgres" in configured or servers_of_named_dev():
        return None
    if is_given(configured, "nats", "servers"):
        return NATS
    if "nats" in configured or find_dev().stack is not None:
        return None
    return _default_file()


def _default_file() -> Path | None:
    """Return the default state file; say so if there is none, as the command then has nothing to ask."""
    try:
        path = default_path(os.environ)
    except StateUnusable:
        return None
    if path.exists():
        return path
    print_status(f"no settings name a server, no `dev` runs, and there is no gateway's state file {path}: see --state")
    return None


def selected_file(option: Path | None) -> Path | None:
    """Return the state file that a command is about; None for a kernel, and for a gateway whose state is in NATS.

    For commands that ask these two in the same way, over NATS.
    """
    path = selected_state(option)
    return None if path == NATS else path


def chosen_project(option: str | None, state: Path | None) -> str:
    """Return the project that a command is about; exit with 2 if the option is invalid.

    For a gateway the option may be missing: then it is the default project of its doors.
    """
    if option is None and state is None:
        fail("--project is missing; name the project")
    project = _LOCAL if option is None else option
    if not is_token(project):
        fail(f"--project: {short(project)!r} is no project id: it is empty or contains blanks or `.*>`")
    return project


def with_state(
    path: Path,
    work: Callable[[StateFile], Awaitable[T]],
    read_rows: Callable[[NatsRows], Awaitable[list[CallRow]]] | None = None,
) -> T:
    """Return the result of `work` with an existing state file, or print why there is none and exit with 2.

    If the state is in NATS, `work` gets a state file in memory, which has only the rows of calls that `read_rows`
    reads: so the same SQL works for both.
    """
    if path == NATS:
        return _with_copied_rows(work, read_rows)

    async def open_and_work() -> T:
        async with aclosing(StateFile.open(path, create=False)) as state:
            return await work(state)

    try:
        return asyncio.run(open_and_work())
    except (StateUnusable, Unavailable, SwitchRecordInvalid) as error:
        fail(str(error))


def _with_copied_rows(
    work: Callable[[StateFile], Awaitable[T]], read_rows: Callable[[NatsRows], Awaitable[list[CallRow]]] | None
) -> T:
    from openapi_tool.gateway.nats_rows import NatsRows  # noqa: PLC0415 - drivers that a file does not need
    from openapi_tool.state.nats_texts import Patience  # noqa: PLC0415

    async def work_on_copy(_: Bootstrap, client: BusClient) -> T:
        rows = await read_rows(NatsRows(Patience(client))) if read_rows else []

        def insert_rows(connection: sqlite3.Connection) -> None:
            for row in rows:
                insert_row(connection, row)

        async with aclosing(StateFile.open(MEMORY)) as state:
            await state.run(insert_rows)
            return await work(state)

    return with_nats(work_on_copy, user=NatsUser.GATEWAY)


def purge(option: Path | None, *, yes: bool) -> None:
    """Delete everything from the state file."""
    try:
        path = option or default_path(os.environ)
    except StateUnusable as error:
        fail(str(error))
    if path == NATS:
        fail("--state: what is in NATS is shared with others, so it is deleted there: nats kv ls lists the buckets")
    if not yes:
        fail(f"this deletes {_PURGED} from {path}: add --yes", _NOT_CONFIRMED)
    with_state(path, lambda state: state.purge())
    print_status(f"deleted {_PURGED} from {path}")
