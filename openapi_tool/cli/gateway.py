"""Commands that ask a gateway's state, a file or in NATS, instead of a kernel's servers.

First the choice of the state, then the commands. `gateway_usage` has the command `usage`.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.cli.kernel import find_dev, is_given, servers_of_named_dev, with_nats
from openapi_tool.cli.output import fail, print_json, print_line, print_status
from openapi_tool.cli.tables import output, redraw
from openapi_tool.gateway.call_row import CallRow
from openapi_tool.gateway.file_state import insert_row
from openapi_tool.gateway.opening import NATS
from openapi_tool.gateway.operator import ask_statistics
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import given_values
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.state.sqlite import MEMORY, StateFile
from openapi_tool.state.sqlite_file import StateUnusable, default_path
from openapi_tool.tools.switches import SwitchRecordInvalid
from openapi_tool.tools.wording import short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from openapi_tool.bootstrap import Bootstrap
    from openapi_tool.gateway.nats_rows import NatsRows
    from openapi_tool.nats_client.client import BusClient

T = TypeVar("T")
Rows = Callable[["NatsRows"], Awaitable[list[CallRow]]]
_NO_PROCESS = 1
_NOT_CONFIRMED = 1
_LOCAL = "local"  # project of `mcp` without --project, and of `gateway` without tokens
_PURGED = "budgets, limits, switches of tools, tokens, stored texts and results, and the rows of calls"


def chosen_state(option: Path | None) -> Path:
    """Return the state of a gateway: by default in the NATS of the settings, without one the default file."""
    if option is not None:
        return option
    try:
        return NATS if is_given(given_values(), "nats", "servers") else default_path(os.environ)
    except (SourceUnreadable, UnreadableVariable) as error:
        fail(str(error))
    except StateUnusable as error:
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
    if "nats" in configured or find_dev()[0] is not None:
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
    """Return the state file that a command is about, None if it asks over NATS, as of a kernel's executors."""
    path = selected_state(option)
    return None if path == NATS else path


def project_or_default(project: str | None, path: Path | None) -> str:
    """Return the project that a command is about: without the option the default one of the gateway's doors."""
    if project is None and path is None:
        fail("--project is missing; name the project")
    return _LOCAL if project is None else project


def with_state(path: Path, work: Callable[[StateFile], Awaitable[T]], rows: Rows | None = None) -> T:
    """Return the result of `work` with an existing state file, or print why there is none and exit with 2.

    If the state is in NATS, `work` gets a state file in memory, filled with the rows of calls that `rows` reads.
    """
    if path == NATS:
        return _with_rows(work, rows)

    async def opened() -> T:
        async with aclosing(StateFile.open(path, create=False)) as state:
            return await work(state)

    try:
        return asyncio.run(opened())
    except (StateUnusable, Unavailable, SwitchRecordInvalid) as error:
        fail(str(error))


def _with_rows(work: Callable[[StateFile], Awaitable[T]], rows: Rows | None) -> T:
    from openapi_tool.gateway.nats_rows import NatsRows  # noqa: PLC0415 - drivers that a file does not need
    from openapi_tool.state.nats_texts import Patience  # noqa: PLC0415

    async def read(_: Bootstrap, client: BusClient) -> T:
        found = await rows(NatsRows(Patience(client))) if rows else []

        def insert(connection: sqlite3.Connection) -> None:
            for row in found:
                insert_row(connection, row)

        async with aclosing(StateFile.open(MEMORY)) as state:
            await state.run(insert)
            return await work(state)

    return with_nats(read, user=NatsUser.GATEWAY)


def show_statistics(
    path: Path,
    draw: Callable[[Sequence[Mapping[str, Any]]], RenderableType],
    select: Callable[[Sequence[Mapping[str, Any]]], Any],
    *,
    as_json: bool,
    every_s: float | None = None,
    lacks: str = "",
) -> None:
    """Draw the statistics of all processes of a gateway, once or every `every_s` seconds, or print them as JSON.

    `draw` gets the statistics of each process. `select` returns what of them is printed as JSON. `lacks` is a remark on
    what statistics of an executor would show, and those of a gateway do not.
    """

    async def work(state: StateFile) -> None:
        async def redrawn() -> RenderableType:
            return draw(await ask_statistics(state))

        processes = await ask_statistics(state)
        if not processes:
            fail(f"{path}: no process of this gateway runs; usage shows what its calls have cost", _NO_PROCESS)
        if as_json:
            print_json(select(processes))
            return
        print_status(lacks, quiet=not lacks)
        if every_s is None:
            output().print(draw(processes))
        else:
            await redraw(output(), draw(processes), redrawn, every_s)

    with_state(path, work)


def inspect(path: Path, tool_call_id: str, *, project: str, as_json: bool) -> None:
    """Print what a gateway has stored of one call."""
    query = "SELECT * FROM calls WHERE project = ? AND tool_call_id = ?"

    def read(connection: sqlite3.Connection) -> dict[str, Any] | None:
        connection.row_factory = sqlite3.Row
        row = connection.execute(query, (project, tool_call_id)).fetchone()
        return dict(row) if row else None

    row = with_state(path, lambda state: state.run(read), lambda rows: rows.of_project(project, tool_call_id))
    if row is None:
        fail(f"project {short(project)!r} has no call {short(tool_call_id)!r} in {path}, or it is older than 90 days")
    attempts = orjson.loads(row.pop("details"))["attempts"]
    began = datetime.fromtimestamp(row.pop("at"), UTC)
    row["at"] = began.isoformat(timespec="milliseconds")
    if as_json:
        print_json({**row, "attempts": attempts, "no_data": "commands, cards and doorbells: a gateway has none"})
        return
    print_line(f"{row['at']}  {row['tool']} called by agent {row['agent']} of project {row['project']}")
    for attempt in attempts:
        status = attempt.get("http_status") or attempt.get("error_code") or "not answered"
        print_line(f"  +{attempt['at_ms']} ms  upstream request: {status} after {attempt.get('ms', '?')} ms")
    remark = _remark_on(row)
    shown_remark = f" ({remark})" if remark else ""
    print_line(f"  +{row['latency_ms']} ms  {row['status']}{shown_remark}, {row['tokens']:,} tokens")
    print_status("no data for arguments, texts, commands, cards and doorbells: a gateway stores none of a call")


def _remark_on(row: Mapping[str, Any]) -> str:
    """Return what the status of a call does not say about its end; may be empty."""
    if row["error"]:
        return str(row["error"]) if row["error"] != row["status"] else ""
    if row["truncated"]:
        return "truncated"
    return "from the cache" if row["cached"] else ""


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
