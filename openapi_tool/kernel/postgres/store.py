"""The kernel's database as the pipeline uses it: load calls, commit results, read artifacts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg

from openapi_tool.concurrency.long_steps import without_other_long_steps
from openapi_tool.kernel.postgres.commit import Mode, artifact_values
from openapi_tool.kernel.postgres.connections import NO_PROJECT, Connections
from openapi_tool.kernel.postgres.failures import ReadOnly, kind_of, translate_connection_errors
from openapi_tool.kernel.postgres.inspection import check_access, check_database
from openapi_tool.kernel.postgres.lookups import ARTIFACT, HAS_RESULT, LAST_RESULT_AGE
from openapi_tool.kernel.postgres.statements import STATEMENTS, Statements
from openapi_tool.kernel.postgres.writability import require_writable
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.cards import ArtifactCard, ResultCard
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.errors import TurnBusy
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report, TurnCondition

_CHECK_TIMEOUT_S = 2.0  # of each step of a health check, to detect a database that hangs

_Write = Callable[[], Awaitable[asyncpg.Record]]
"""Executes COMMIT or REPORT, and returns its row."""


class KernelStore:
    """Loads calls and commits results, scoped by project in every statement. Methods raise Unavailable."""

    def __init__(self, connections: Connections, timeout_s: float, statements: Statements) -> None:
        self._connections = connections
        self._timeout_s = timeout_s
        self._sql = statements
        self._inspected = ""  # shape (`check_access`) of the tables that passed the last inspection

    @classmethod
    async def open(cls, options: PoolOptions) -> KernelStore:
        """Open a pool with one connection."""
        connections = await Connections.open(options)
        return cls(connections, options.postgres.timeout_s, STATEMENTS[options.version])

    async def aclose(self) -> None:
        """Close every connection."""
        await self._connections.aclose()

    async def ping(self, *, thorough: bool = False) -> bool:
        """Check privileges, writability and, if the tables have changed or if `thorough`, columns and indexes.

        Return whether the tables have changed since the last success, so that what failed may succeed now. After a
        failure the whole inspection must pass again. Raises Unavailable.
        """
        timeout_s = min(_CHECK_TIMEOUT_S, self._timeout_s)
        inspected = self._inspected
        self._inspected = ""  # until this inspection passes
        with translate_connection_errors():  # all errors: no call's values are involved
            async with self._connections.lend(NO_PROJECT, timeout_s) as connection:
                shape = await check_access(connection, timeout_s)
                if thorough or shape != inspected:
                    shape = await check_database(connection, self._sql, timeout_s)
        self._inspected = shape
        return shape != inspected

    async def encrypted(self) -> bool:
        """Return whether connections use TLS."""
        async with self._connections.lend(NO_PROJECT) as connection:
            return bool(await connection.fetchval("select ssl from pg_stat_ssl where pid = pg_backend_pid()"))

    async def load(self, command: Command) -> CallRecords:
        """Load the records of a call in one round trip."""
        async with self._connections.lend(command.identity.project_id) as connection:
            row = await connection.fetchrow(self._sql.LOAD, *self._sql.call_values(command))
            if row["read_only"]:
                raise ReadOnly
        return self._sql.call_records(row)

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Return the age in seconds of the newest result of a step, None without one."""
        async with self._connections.lend(project_id) as connection:
            age_s: float | None = await connection.fetchval(LAST_RESULT_AGE, project_id, agent_turn_id, step_id)
        return age_s

    async def has_result(self, project_id: str, tool_call_id: str) -> bool:
        """Return whether a call has a result."""
        async with self._connections.lend(project_id) as connection:
            return bool(await connection.fetchval(HAS_RESULT, project_id, tool_call_id))

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return `chars` characters of an agent's artifact from `start` on; None if there is no such artifact now."""
        async with self._connections.lend(project_id) as connection:
            row = await connection.fetchrow(ARTIFACT, project_id, agent_id, card_id, start, chars)
        return None if row is None else Artifact(card_id, row["chars"], row["sha256"], row["text"], row["items"])

    async def commit(
        self,
        card: ResultCard,
        report: Report,
        artifact: ArtifactCard | None = None,
        condition: TurnCondition | None = None,
    ) -> bool:
        """Write card, artifact, inbox row and edge, all or nothing.

        Return False if nothing was written: since the load the call got a result, or its turn or request edge was
        deleted. Raises TurnBusy, and has written nothing, if the `condition` does not hold.
        """
        new_cards = (card.content, card.metadata, *artifact_values(artifact))
        text_bytes = len(artifact.content) if artifact else 0
        return await self._write(self._sql.COMMIT, card.card_id, report, condition, new_cards, text_bytes)

    async def report(self, card_id: str, report: Report, condition: TurnCondition | None = None) -> bool:
        """Write inbox row and edge for a result card that exists already; return and raise as `commit` does."""
        return await self._write(self._sql.REPORT, card_id, report, condition)

    async def is_turn_busy(self, report: Report, quiet_s: float) -> bool:
        """Return whether a commit would raise TurnBusy now. A commit may be large, this statement is small.

        Other commands of the step count while they are younger than `quiet_s` seconds.
        """
        async with self._connections.lend(report.project_id) as connection:
            row = await connection.fetchrow(self._sql.REPORT, *self._sql.report_values("", report, Mode.LOOK, quiet_s))
        return bool(row["busy"])

    async def _write(
        self,
        statement: str,
        card_id: str,
        report: Report,
        condition: TurnCondition | None,
        new_cards: tuple[Any, ...] = (),
        text_bytes: int = 0,
    ) -> bool:
        """Execute COMMIT or REPORT, whose parameters end with `new_cards`; return whether it wrote the rows.

        Raises TurnBusy, and NeedsOperator if the database refuses the rows of any result.
        """
        async with self._connections.lend(report.project_id) as connection:
            write = partial(self._execute, connection, statement, card_id, report, condition, new_cards)
            await without_other_long_steps(text_bytes)
            row = await _unless_refused(write)
            if row is None or not (row["written"] or row["busy"]):
                await require_writable(connection, self._sql, report)
                # Once more: if the database refused every result, that may just have ended.
                try:
                    row = await write()
                except asyncpg.UniqueViolationError:  # the inbox row exists without its card
                    return False
            if row["busy"]:
                raise TurnBusy
            return bool(row["written"])

    async def _execute(
        self,
        connection: asyncpg.Connection,
        statement: str,
        card_id: str,
        report: Report,
        condition: TurnCondition | None,
        new_cards: tuple[Any, ...],
    ) -> asyncpg.Record:
        """Execute COMMIT or REPORT in the mode that checks the condition; return its row."""
        quiet_s = None if condition is None else condition.quiet_s

        def values(mode: Mode) -> tuple[Any, ...]:
            return self._sql.report_values(card_id, report, mode, quiet_s)

        if condition is None:  # write in any case
            return await connection.fetchrow(statement, *values(Mode.AT_ONCE), *new_cards)
        if condition.needs_no_other:
            return await connection.fetchrow(statement, *values(Mode.ALONE), *new_cards)
        # Other replicas may write results of this turn now, so the statement is executed twice: the first run takes the
        # turn's lock, the second one writes. The second run's snapshot is younger than the lock, so it shows what the
        # last holder of the lock has written. Both runs are one message to the server and one transaction.
        locking = *values(Mode.LOCK), *(None,) * len(new_cards)
        writing = *values(Mode.IN_TURN), *new_cards
        [_, row] = await connection.fetchmany(statement, [locking, writing])
        return row


async def _unless_refused(write: _Write) -> asyncpg.Record | None:
    """Write rows; return None if the database refuses them because of their values."""
    try:
        return await write()
    except asyncpg.PostgresError as error:
        if kind_of(error.sqlstate) != "defect":
            raise
        return None
