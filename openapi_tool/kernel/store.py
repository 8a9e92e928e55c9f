"""The executor's port to the kernel's tables."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from openapi_tool.kernel import statements
from openapi_tool.kernel.grants import MISSING
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.jsontext import dumps, loads
from openapi_tool.protocol.records import (
    Artifact,
    CallKey,
    CallRecords,
    CardRecord,
    EarlierResult,
    RequestEdgeRecord,
    TargetRecord,
    ToolRecord,
)
from openapi_tool.protocol.report import Report
from openapi_tool.tools.naming import unmangled

_JSONB_VERSION = b"\x01"
_REMEDY = "Only an operator can mend this: `openapi-tool sql grants` prints what the role needs"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How many connections, how long to wait for one or for a statement (seconds)."""

    dsn: str = field(repr=False)
    size: int
    timeout_s: float
    prepared_statements: bool


class KernelStore:
    """Loads calls and commits results, scoped by project in every statement."""

    def __init__(self, pool: asyncpg.Pool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    @classmethod
    async def open(cls, options: PoolOptions) -> KernelStore:
        """Connect. Raises Unavailable when the database cannot be reached."""
        with _unavailable():
            pool = await asyncpg.create_pool(
                options.dsn,
                min_size=1,
                max_size=options.size,
                timeout=options.timeout_s,
                command_timeout=options.timeout_s,
                statement_cache_size=100 if options.prepared_statements else 0,
                init=_prepare_connection,
                reset=_keep_connection,
                server_settings={"application_name": "openapi-tool"},
            )
        return cls(pool, options.timeout_s)

    async def ping(self) -> None:
        """Ask the database whether we may do what calls need. Raises Unavailable."""
        async with self._connection() as connection:
            missing = await connection.fetchval(MISSING)
        if missing:
            raise Unavailable(f"PostgreSQL: missing: {missing}. {_REMEDY}")

    async def answered(self, project_id: str, tool_call_id: str) -> bool:
        """Whether a call of a project has a result. Raises Unavailable."""
        async with self._connection() as connection:
            return bool(await connection.fetchval(statements.ANSWERED, project_id, tool_call_id))

    async def load(self, key: CallKey) -> CallRecords:
        """Everything that is known of a call, in one round trip. Raises Unavailable."""
        async with self._connection() as connection:
            row = await connection.fetchrow(
                statements.LOAD,
                key.project_id,
                key.card_id,
                key.tool_call_id,
                key.agent_id,
                key.agent_turn_id,
                key.turn_epoch or 0,
                key.tool_name,
                key.tool_name and unmangled(key.tool_name),
            )
        return _records(row)

    async def commit(self, card: Card, report: Report, artifact: ArtifactCard | None = None) -> bool:
        """Write card, artifact, inbox row and edge, all or nothing.

        False when nothing was written: the call has a result by now, or its turn or request edge
        is gone. Raises Unavailable.
        """
        kept = (artifact.card_id, artifact.content, artifact.metadata, artifact.ttl_s) if artifact else (None,) * 4
        return await self._write(statements.COMMIT, card.card_id, report, card.content, card.metadata, *kept)

    async def report(self, card_id: str, report: Report) -> bool:
        """Write inbox row and edge for a result card that is already there; as `commit` otherwise."""
        return await self._write(statements.REPORT, card_id, report)

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """At most `chars` characters from `start` of an agent's live artifact, None without one. Raises Unavailable."""
        async with self._connection() as connection:
            row = await connection.fetchrow(statements.ARTIFACT, project_id, agent_id, card_id, start, chars)
        return None if row is None else Artifact(card_id, row["chars"], row["sha256"], row["text"])

    async def _write(self, statement: str, card_id: str, report: Report, *card: Any) -> bool:
        async with self._connection() as connection:
            try:
                written = await connection.fetchval(
                    statement,
                    report.project_id,
                    card_id,
                    report.inbox_id,
                    report.agent_id,
                    report.channel_id,
                    report.tool_call_id,
                    report.agent_turn_id,
                    report.turn_epoch,
                    report.context_headers,
                    report.payload,
                    report.edge_id,
                    report.actor_id,
                    report.depth,
                    report.trace_id,
                    report.parent_step_id,
                    report.edge_metadata,
                    report.target_inbox_id,
                    report.request_edge_id,
                    *card,
                )
            except asyncpg.UniqueViolationError:
                return False
        return bool(written)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[asyncpg.Connection]:
        with _unavailable():
            async with asyncio.timeout(self._timeout_s) as patience, self._pool.acquire() as connection:
                patience.reschedule(None)
                yield connection

    async def aclose(self) -> None:
        """Close every connection, waiting no longer than one statement may take."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()


@contextlib.contextmanager
def _unavailable() -> Any:
    try:
        yield
    except (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError):
        raise  # what was said to the database is wrong, which no waiting mends
    except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedTableError) as denial:
        raise Unavailable(f"PostgreSQL: {denial} (SQLSTATE {denial.sqlstate}). {_REMEDY}") from denial
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
        raise Unavailable(f"PostgreSQL: {type(error).__name__}: {error}") from error


async def _prepare_connection(connection: asyncpg.Connection) -> None:
    await connection.set_type_codec(
        "jsonb", schema="pg_catalog", encoder=_encode_jsonb, decoder=_decode_jsonb, format="binary"
    )


async def _keep_connection(connection: asyncpg.Connection) -> None:
    """No reset statement on release: this room leaves no session state behind."""


def _encode_jsonb(value: object) -> bytes:
    """The binary form of jsonb; a `bytearray` is JSON already."""
    return _JSONB_VERSION + (value if isinstance(value, bytearray) else dumps(value))


def _decode_jsonb(data: bytes) -> Any:
    """The value; None for one that jsonb holds but no parser takes (nested too deeply, absurd numbers)."""
    try:
        return loads(data[1:])
    except ValueError:
        return None


def _records(row: Mapping[str, Any]) -> CallRecords:
    return CallRecords(
        card=_card(row),
        tool=_tool(row),
        worker_target=row["worker_target"],
        target=_target(row),
        request_edge=None if row["edge_id"] is None else RequestEdgeRecord(row["edge_id"], row["recursion_depth"]),
        earlier=_earlier(row),
        reported_inbox_id=row["reported_inbox_id"],
    )


def _card(row: Mapping[str, Any]) -> CardRecord | None:
    if row["call_card_id"] is None:
        return None
    metadata = row["call_metadata"]
    return CardRecord(
        card_id=row["call_card_id"],
        tool_call_id=row["call_tool_call_id"],
        content=row["call_content"],
        metadata=metadata if isinstance(metadata, dict) else {},
        oversized=row["call_fits"] is False,
    )


def _tool(row: Mapping[str, Any]) -> ToolRecord | None:
    if row["tool_name"] is None:
        return None
    parameters, options, oversized = row["parameters"], row["options"], row["tool_fits"] is False
    return ToolRecord(
        tool_name=row["tool_name"],
        after_execution=row["after_execution"],
        parameters=parameters,
        options=options,
        oversized=oversized,
        unreadable=not oversized and row["tool_objects"] and (parameters is None or options is None),
    )


def _target(row: Mapping[str, Any]) -> TargetRecord | None:
    if row["target_inbox_id"] is None:
        return None
    headers = row["target_headers"]
    return TargetRecord(
        inbox_id=row["target_inbox_id"],
        message_type=row["target_message_type"],
        channel_id=row["target_channel_id"],
        agent_turn_id=row["target_turn_id"],
        turn_epoch=row["target_epoch"],
        context_headers=headers if isinstance(headers, dict) else {},
        oversized=row["target_fits"] is False,
    )


def _earlier(row: Mapping[str, Any]) -> EarlierResult | None:
    if row["result_card_id"] is None:
        return None
    return EarlierResult(
        card_id=row["result_card_id"],
        author_id=row["result_author"],
        live=row["result_live"],
        content={"status": row["result_status"], "after_execution": row["result_after"]},
        report_headers=row["report_headers"],
    )
