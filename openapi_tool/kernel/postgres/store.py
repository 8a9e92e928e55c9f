"""The kernel's database as the pipeline uses it: load calls, commit results, read artifacts.

To *load* a call is to read its rows: the card with its arguments, the tool's definition, the turn (the run of an agent)
that waits for it. To *commit* a result is to write its *report*, an inbox row and an edge, with its card. An *artifact*
is a card with a text that is too long for a result. The statements themselves are in `load.py`, `commit.py`, and the
modules of the protocol's versions.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Write:
    """Rows to write.

    - `statement`: COMMIT, or REPORT for a result card that exists already.
    - `condition`: on which the rows may be written; None to write them in any case.
    - `new_cards`: the last parameters of COMMIT, for its card and its artifact; none for REPORT.
    """

    statement: str
    card_id: str
    report: Report
    condition: TurnCondition | None
    new_cards: tuple[Any, ...] = ()


class KernelStore:
    """Loads calls and commits results, scoped by project in every statement. Methods raise Unavailable."""

    def __init__(self, connections: Connections, timeout_s: float, statements: Statements) -> None:
        self._connections = connections
        self._timeout_s = timeout_s
        self._sql = statements
        self._inspected = ""  # shape of the tables that passed the last inspection, a hash (`check_access`)

    @classmethod
    async def open(cls, options: PoolOptions) -> KernelStore:
        """Open a pool with one connection."""
        connections = await Connections.open(options)
        return cls(connections, options.postgres.timeout_s, STATEMENTS[options.version])

    async def aclose(self) -> None:
        """Close every connection."""
        await self._connections.aclose()

    async def ping(self, *, thorough: bool = False) -> bool:
        """Check privileges and writability; if the tables have changed, or if `thorough`, also columns and indexes.

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
            if row["read_only"]:  # perhaps a standby, which lags: a missing row would prove nothing
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
        return await self._write(_Write(self._sql.COMMIT, card.card_id, report, condition, new_cards), text_bytes)

    async def report(self, card_id: str, report: Report, condition: TurnCondition | None = None) -> bool:
        """Write inbox row and edge for a result card that exists already; return and raise as `commit` does."""
        return await self._write(_Write(self._sql.REPORT, card_id, report, condition))

    async def is_turn_busy(self, report: Report, quiet_s: float) -> bool:
        """Return whether a commit would raise TurnBusy now. A commit may be large, this statement is small.

        Other commands of the step count while they are younger than `quiet_s` seconds.
        """
        async with self._connections.lend(report.project_id) as connection:
            row = await connection.fetchrow(self._sql.REPORT, *self._sql.report_values("", report, Mode.LOOK, quiet_s))
        return bool(row["busy"])

    async def _write(self, write: _Write, text_bytes: int = 0) -> bool:
        """Execute COMMIT or REPORT; return whether it wrote the rows. `text_bytes` is the size of an artifact.

        Raises TurnBusy, and NeedsOperator if the database refuses the rows of any result.
        """
        async with self._connections.lend(write.report.project_id) as connection:
            await without_other_long_steps(text_bytes)
            row = await self._execute_unless_refused(connection, write)
            if row is None or not (row["written"] or row["busy"]):  # refused, or nothing was written
                await require_writable(connection, self._sql, write.report)
                # Once more: if the database refused every result, that may just have ended.
                try:
                    row = await self._execute(connection, write)
                except asyncpg.UniqueViolationError:  # the inbox row exists without its card
                    return False
            if row["busy"]:
                raise TurnBusy
            return bool(row["written"])

    async def _execute_unless_refused(self, connection: asyncpg.Connection, write: _Write) -> asyncpg.Record | None:
        """Execute COMMIT or REPORT; return None if the database refuses the rows because of their values."""
        try:
            return await self._execute(connection, write)
        except asyncpg.PostgresError as error:
            if kind_of(error.sqlstate) != "defect":
                raise
            return None

    async def _execute(self, connection: asyncpg.Connection, write: _Write) -> asyncpg.Record:
        """Execute COMMIT or REPORT in the mode that checks the condition; return its row."""
        condition = write.condition
        quiet_s = None if condition is None else condition.quiet_s

        def values(mode: Mode) -> tuple[Any, ...]:
            return self._sql.report_values(write.card_id, write.report, mode, quiet_s)

        if condition is None:
            return await connection.fetchrow(write.statement, *values(Mode.AT_ONCE), *write.new_cards)
        if condition.needs_no_other:  # command of the step
            return await connection.fetchrow(write.statement, *values(Mode.ALONE), *write.new_cards)
        # Other replicas may write results of this turn now, so the statement is executed twice: the first run takes the
        # turn's lock, the second one writes. The second run's snapshot is younger than the lock, so it shows what the
        # last holder of the lock has written. Both runs are one message to the server and one transaction.
        locking = *values(Mode.LOCK), *(None,) * len(write.new_cards)
        writing = *values(Mode.IN_TURN), *write.new_cards
        [_, row] = await connection.fetchmany(write.statement, [locking, writing])
        return row
