"""The state of a gateway, as commands open it, and `openapi-tool state purge`.

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

from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.output import fail, print_status
from openapi_tool.cli.selection import check_not_memory
from openapi_tool.gateway.call_row import CallRow
from openapi_tool.gateway.file_state import insert_row
from openapi_tool.gateway.opening import NATS
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.sqlite import MEMORY, StateFile
from openapi_tool.state.sqlite_file import StateUnusable, default_path
from openapi_tool.tools.switches import SwitchRecordInvalid

if TYPE_CHECKING:
    from openapi_tool.bootstrap import Bootstrap
    from openapi_tool.gateway.nats_rows import NatsRows
    from openapi_tool.nats_client.client import BusClient

T = TypeVar("T")

_NOT_CONFIRMED = 1

_PURGED = "budgets, limits, switches of tools, tokens, stored texts and results, and the rows of calls"


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
    check_not_memory(option)
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
