"""State of a gateway in a file, shared by the processes of one machine."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.gateway.call_row import CALLS_DAYS, CallRow
from openapi_tool.gateway.operator import SwitchMonitor, follow, session_key
from openapi_tool.gateway.state import BUDGETS_TTL_S, LIMITS_TTL_S, TOKENS
from openapi_tool.gateway.usage import usage_by_tool
from openapi_tool.state.port import ListedRecords, Records
from openapi_tool.state.sqlite import SqliteTexts, StateFile
from openapi_tool.tools.switches import Switches

_DAY_S = 86_400


class FileState:
    """Implements `GatewayState` over a state file."""

    def __init__(self, file: StateFile) -> None:
        self.file = file
        self.time = time.time
        self.limits: Records = file.records("limits", LIMITS_TTL_S)
        self.budgets: Records = file.records("budgets", BUDGETS_TTL_S)
        self.tokens: ListedRecords = file.records(TOKENS)
        self.rows = FileRows(file)

    def texts(self, bucket: str, ttl_s: float) -> SqliteTexts:
        """Return the texts of a bucket, which expire `ttl_s` seconds after they were stored."""
        return self.file.texts(bucket, ttl_s)

    async def session_key(self) -> bytes:
        """Return the key that signs session identities and cursors. Raises Unavailable, also for a damaged key."""
        return await session_key(self.file)

    @asynccontextmanager
    async def operated(
        self, name: str, use: Callable[[Switches], None], snapshot: Callable[[], Mapping[str, Any]]
    ) -> AsyncIterator[None]:
        """While the context is open pass an operator's switches to `use`, and answer requests for statistics.

        `name` is the name of this process, and `snapshot` returns its statistics.
        """
        switches = SwitchMonitor(self.file, use)
        await switches.check()
        following = in_background(follow(self.file, name, switches, snapshot), "operator")
        try:
            yield
        finally:
            await cancel_until_ended(following)


class FileRows:
    """Rows of calls in a table of a state file (`CallRows`); every method raises Unavailable."""

    def __init__(self, file: StateFile) -> None:
        self._file = file

    async def store(self, row: CallRow) -> None:
        """Store a row, and delete the rows of its project that are older than 90 days."""

        def insert_and_delete(connection: sqlite3.Connection) -> None:
            insert_row(connection, row)
            oldest = time.time() - CALLS_DAYS * _DAY_S
            connection.execute("DELETE FROM calls WHERE project = ? AND at < ?", (row.project, oldest))

        await self._file.run(insert_and_delete)

    async def by_tool(self, project: str, agent: str, since: float) -> list[dict[str, Any]]:
        """Return the figures of an agent's calls since a time, by tool, the most expensive first."""
        return await usage_by_tool(self._file, project, agent, since)


def insert_row(connection: sqlite3.Connection, row: CallRow) -> None:
    """Insert a row within a transaction."""
    placeholders = ", ".join("?" * len(row.values))
    connection.execute(f"INSERT INTO calls VALUES ({placeholders})", row.values)  # noqa: S608 - constants
