"""Pool of connections to the kernel's database, with the statements of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import asyncpg

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.concurrency.long_steps import without_other_long_steps
from openapi_tool.kernel.postgres.commit import Mode
from openapi_tool.kernel.postgres.failures import (
    ADMIT_RESULTS,
    PoolShareUsed,
    ReadOnly,
    kind_of,
    refusal_of,
    translate_connection_errors,
    translate_statement_errors,
)
from openapi_tool.kernel.postgres.inspection import check_access, check_database
from openapi_tool.kernel.postgres.lookups import ARTIFACT, HAS_RESULT, LAST_RESULT_AGE
from openapi_tool.kernel.postgres.statements import STATEMENTS, Statements
from openapi_tool.open_files import with_free_file
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.cards import ArtifactCard, ResultCard, new_id, result_card
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.errors import NeedsOperator, TurnBusy, Unavailable
from openapi_tool.protocol.jsontext import dumps, loads
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report, TurnCondition
from openapi_tool.telemetry import metrics

_JSONB_VERSION = b"\x01"
_MAX_IDLE_S = 30.0  # until a connection is closed; the health check keeps one in use
_NO_PROJECT = ""  # connections for the service itself
_TEST_ID = "openapi_tool"  # id of project, agent and turn, and name of the function, of a result that is only tried
_RETRY_POOL_S = 0.05
_CHECK_TIMEOUT_S = 2.0  # of each step of a health check, to detect a database that hangs


class KernelStore:
    """Loads calls and commits results, scoped by project in every statement. Methods raise Unavailable.

    Projects share the pool fairly.
    """

    def __init__(self, pool: asyncpg.Pool, timeout_s: float, statements: Statements) -> None:
        self._pool = pool
        self._sql = statements
        self._permits = permits = FairSemaphore(pool.get_max_size())  # one for each connection
        metrics.SEMAPHORE_USED.labels("database").set_function(lambda: permits.used)
        metrics.SEMAPHORE_WAITING.labels("database").set_function(lambda: permits.waiting)
        self._timeout_s = timeout_s
        self._inspected = ""  # shape of the tables that passed the last inspection

    @classmethod
    async def open(cls, options: PoolOptions) -> KernelStore:
        """Open a pool with one connection, inspected."""
        postgres, statements = options.postgres, STATEMENTS[options.version]
        with translate_connection_errors():
            pool = await asyncpg.create_pool(
                options.dsn,
                min_size=0,  # above 0 the driver reconnects on its own during an outage and logs a traceback each time
                max_size=postgres.pool_size,
                max_inactive_connection_lifetime=_MAX_IDLE_S,
                timeout=postgres.timeout_s,
                command_timeout=postgres.timeout_s,
                statement_cache_size=100 if postgres.prepared_statements else 0,
                init=partial(_prepare_connection, inspected=statements if options.inspect_on_connect else None),
                reset=_skip_reset,
                server_settings={"application_name": "openapi-tool"},
            )
        store = cls(pool, postgres.timeout_s, statements)
        try:
            async with store._connection(_NO_PROJECT):
                return store
        except BaseException:
            pool.terminate()
            raise

    async def ping(self, *, thorough: bool = False) -> bool:
        """Check privileges, writability and, if the tables have changed or if `thorough`, columns and indexes.

        Return whether the tables have changed since the last success, so that what failed may succeed now. After a
        failure the whole inspection must pass again. Raises Unavailable.
        """
        timeout_s = min(_CHECK_TIMEOUT_S, self._timeout_s)
        inspected, self._inspected = self._inspected, ""
        with translate_connection_errors():  # all of them: no call's values are involved
            async with self._connection(_NO_PROJECT, timeout_s) as connection:
                shape = await check_access(connection, timeout_s)
                if thorough or shape != inspected:
                    shape = await check_database(connection, self._sql, timeout_s)
        self._inspected = shape
        return shape != inspected

    async def encrypted(self) -> bool:
        """Return whether connections use TLS."""
        async with self._connection(_NO_PROJECT) as connection:
            return bool(await connection.fetchval("select ssl from pg_stat_ssl where pid = pg_backend_pid()"))

    async def has_result(self, project_id: str, tool_call_id: str) -> bool:
        """Return whether a call has a result."""
        async with self._connection(project_id) as connection:
            return bool(await connection.fetchval(HAS_RESULT, project_id, tool_call_id))

    async def load(self, command: Command) -> CallRecords:
        """Load the records of a call in one round trip."""
        async with self._connection(command.identity.project_id) as connection:
            row = await connection.fetchrow(self._sql.LOAD, *self._sql.call_values(command))
            if row["read_only"]:
                raise ReadOnly
        return self._sql.call_records(row)

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Return the age in seconds of the newest result of a step, None without one."""
        async with self._connection(project_id) as connection:
            age_s: float | None = await connection.fetchval(LAST_RESULT_AGE, project_id, agent_turn_id, step_id)
        return age_s

    async def commit(
        self,
        card: ResultCard,
        report: Report,
        artifact: ArtifactCard | None = None,
        condition: TurnCondition | None = None,
    ) -> bool:
        """Write card, artifact, inbox row and edge, all or nothing.

        Return False if it was refused: since the load the call got a result, or its turn or request edge was deleted.
        Raises TurnBusy, and has written nothing, if the `condition` does not hold.
        """
        new_cards = (card.content, card.metadata, *_artifact_values(artifact))
        text_bytes = len(artifact.content) if artifact else 0
        return await self._write(self._sql.COMMIT, card.card_id, report, condition, new_cards, text_bytes)

    async def report(self, card_id: str, report: Report, condition: TurnCondition | None = None) -> bool:
        """Write inbox row and edge for a result card that exists already; otherwise as `commit`."""
        return await self._write(self._sql.REPORT, card_id, report, condition)

    async def is_turn_busy(self, report: Report, quiet_s: float) -> bool:
        """Return whether a commit, which may be large, would raise TurnBusy now."""
        async with self._connection(report.project_id) as connection:
            row = await connection.fetchrow(self._sql.REPORT, *self._sql.report_values("", report, Mode.LOOK, quiet_s))
        return bool(row["busy"])

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return a part of an agent's live artifact, or None."""
        async with self._connection(project_id) as connection:
            row = await connection.fetchrow(ARTIFACT, project_id, agent_id, card_id, start, chars)
        return None if row is None else Artifact(card_id, row["chars"], row["sha256"], row["text"], row["items"])

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

        If the database refuses them, find out whether it refuses those of any call: then this raises NeedsOperator.
        """
        async with self._connection(report.project_id) as connection:
            execute = partial(self._execute, connection, statement, card_id, report, condition, new_cards)
            await without_other_long_steps(text_bytes)
            row = await _unless_refused(execute)
            if row is None or not (row["written"] or row["busy"]):
                await self._require_writable(connection, report)
                try:  # again, as what refused every result may just have ended
                    row = await execute()
                except asyncpg.UniqueViolationError:
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
        """Execute a statement in the mode (`Mode`) that checks the condition."""
        quiet_s = None if condition is None else condition.quiet_s

        def values(mode: Mode) -> tuple[Any, ...]:
            return self._sql.report_values(card_id, report, mode, quiet_s)

        if condition is None:  # write in any case
            return await connection.fetchrow(statement, *values(Mode.AT_ONCE), *new_cards)
        if quiet_s is None:  # write only if the step has no other command, of any age
            return await connection.fetchrow(statement, *values(Mode.ALONE), *new_cards)
        # Other replicas may write results of this turn now. The second run's snapshot is younger than the lock of the
        # first one, so it shows what the last holder of the lock has written. Both runs are one message and one
        # transaction.
        locking = *values(Mode.LOCK), *(None,) * len(new_cards)
        [_, row] = await connection.fetchmany(statement, [locking, (*values(Mode.IN_TURN), *new_cards)])
        return row

    async def _require_writable(self, connection: asyncpg.Connection, report: Report) -> None:
        """Raise NeedsOperator if the database refuses or discards the rows of any result, not only those of this one.

        Two small results are tried and rolled back: of another call of this agent, as the database may know its project
        only, and of an agent and project that do not exist, as it may refuse all results of this one.
        """
        refusals = [await self._refusal(connection, report, project_id) for project_id in (report.project_id, _TEST_ID)]
        if all(refusals):
            raise NeedsOperator(f"PostgreSQL: no result can be written: {refusals[0]}", ADMIT_RESULTS)

    async def _refusal(self, connection: asyncpg.Connection, report: Report, project_id: str) -> str:
        """Return why the database does not store a small result; empty if it does."""
        card, tested = _test_result(report, project_id)
        values = *self._sql.report_values(card.card_id, tested, Mode.TEST, None), card.content, card.metadata
        transaction = connection.transaction()
        await transaction.start()
        try:
            await connection.execute("set constraints all immediate")
            row = await connection.fetchrow(self._sql.COMMIT, *values, *_artifact_values(None))
        except asyncpg.PostgresError as error:
            if kind_of(error.sqlstate) != "defect":
                raise
            return refusal_of(error)
        finally:
            await transaction.rollback()
        discarded: str = row["discarded"]
        return discarded and f"the database discards new rows of {discarded}, as a trigger does that returns null"

    @asynccontextmanager
    async def _connection(self, project_id: str, timeout_s: float | None = None) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection. Raises a defect of the statement unchanged, and Unavailable for any other error."""
        timeout_s = timeout_s or self._timeout_s
        try:
            connection = await self._acquire(project_id, timeout_s)
            try:
                with translate_statement_errors():
                    yield connection
            finally:
                await self._release(connection, project_id, timeout_s)
        except ReadOnly:  # a failover: new connections may reach the new primary
            await self._pool.expire_connections()
            raise

    async def _acquire(self, project_id: str, timeout_s: float) -> asyncpg.Connection:
        permitted = False
        try:
            with translate_connection_errors():
                async with asyncio.timeout(timeout_s):
                    await self._permits.take(project_id)
                    permitted = True
                    return await self._from_pool()
        except BaseException as error:
            if permitted:
                self._permits.give(project_id)
            elif isinstance(error, Unavailable):
                raise PoolShareUsed("PostgreSQL: other calls use the project's share of the connections") from None
            raise

    async def _from_pool(self) -> asyncpg.Connection:
        """Return a connection; if the server refuses another one, wait for one of the pool to become idle."""
        while True:
            try:
                return await with_free_file(self._pool.acquire)
            except asyncpg.TooManyConnectionsError:
                if not self._pool.get_size():
                    raise
            await asyncio.sleep(_RETRY_POOL_S)

    async def _release(self, connection: asyncpg.Connection, project_id: str, timeout_s: float) -> None:
        try:
            with translate_connection_errors():
                await self._pool.release(connection, timeout=timeout_s)
        finally:
            self._permits.give(project_id)

    async def aclose(self) -> None:
        """Close every connection; terminate those in use after `timeout_s`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()


async def _unless_refused(execute: Callable[[], Awaitable[asyncpg.Record]]) -> asyncpg.Record | None:
    """Execute a statement; return None if the database refuses its rows."""
    try:
        return await execute()
    except asyncpg.PostgresError as error:
        if kind_of(error.sqlstate) != "defect":
            raise
        return None


def _artifact_values(artifact: ArtifactCard | None) -> tuple[Any, ...]:
    """Return the last parameters of COMMIT."""
    if artifact is None:
        return (None,) * 4
    return artifact.card_id, artifact.content, artifact.metadata, artifact.ttl_s


def _test_result(report: Report, project_id: str) -> tuple[ResultCard, Report]:
    """Return a small result like that of `report`, of a call that does not exist; in another project also its agent."""
    identity = replace(report.acceptance.identity, tool_call_id=new_id("test_"))
    turn = report.acceptance.waiting_turn
    if project_id != report.project_id:
        identity = replace(identity, project_id=project_id, agent_id=project_id, agent_turn_id=project_id)
        turn = replace(turn, agent_turn_id=project_id)
    acceptance = replace(report.acceptance, identity=identity, waiting_turn=turn, request_edge_id=new_id("edge_"))
    card = result_card(
        actor_id=report.actor_id,
        function_name=_TEST_ID,
        identity=identity,
        call_card=None,
        status="success",
        after_execution="suspend",
        result="",
        error=None,
        tool_output=None,
    )
    return card, replace(report, acceptance=acceptance, inbox_id=new_id("inbox_"), edge_id=new_id("edge_"))


async def _prepare_connection(connection: asyncpg.Connection, *, inspected: Statements | None) -> None:
    with translate_connection_errors():
        await connection.set_type_codec(
            "jsonb", schema="pg_catalog", encoder=_encode_jsonb, decoder=_decode_jsonb, format="binary"
        )
        if inspected is not None:
            await check_database(connection, inspected)


async def _skip_reset(connection: asyncpg.Connection) -> None:
    """Replace the driver's reset, a round trip on each release: no statement changes the session's state."""


def _encode_jsonb(value: object) -> bytes:
    """Return the binary form of jsonb; a `bytearray` is JSON already (`ArtifactCard.content`)."""
    return _JSONB_VERSION + (value if isinstance(value, bytearray) else dumps(value))


def _decode_jsonb(data: bytes) -> Any:
    """Return the parsed value, or None if jsonb accepted what the parser refuses (deep nesting, huge numbers)."""
    try:
        return loads(data[1:])
    except ValueError:
        return None
