"""Pool of connections to the kernel's database, which projects (tenants) share fairly.

It lends connections to `KernelStore`, replaces errors of the driver by Unavailable, and encodes jsonb.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import asyncpg

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.kernel.postgres.failures import (
    PoolShareUsed,
    ReadOnly,
    translate_connection_errors,
    translate_statement_errors,
)
from openapi_tool.kernel.postgres.inspection import check_database
from openapi_tool.kernel.postgres.statements import STATEMENTS, Statements
from openapi_tool.open_files import with_free_file
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.jsontext import dumps, loads
from openapi_tool.telemetry import metrics

NO_PROJECT = ""
"""Project of connections that the service itself needs, for example for a health check."""

_MAX_IDLE_S = 30.0  # until an unused connection is closed; the health check keeps one in use
_RETRY_POOL_S = 0.05  # between attempts to get a connection while the server refuses further ones
_CACHED_STATEMENTS = 100  # prepared statements of a connection; the service has fewer
_JSONB_VERSION = b"\x01"  # first byte of the binary form of jsonb


class Connections:
    """Pool of connections; opening, using and releasing one raises Unavailable."""

    def __init__(self, pool: asyncpg.Pool, timeout_s: float) -> None:
        self._pool = pool
        self._permits = permits = FairSemaphore(pool.get_max_size())  # one for each connection; projects take turns
        self._timeout_s = timeout_s
        metrics.SEMAPHORE_USED.labels("database").set_function(lambda: permits.used)
        metrics.SEMAPHORE_WAITING.labels("database").set_function(lambda: permits.waiting)

    @classmethod
    async def open(cls, options: PoolOptions) -> Connections:
        """Open a pool with one connection, inspected if `options` say so."""
        postgres = options.postgres
        inspected = STATEMENTS[options.version] if options.inspect_on_connect else None
        with translate_connection_errors():
            pool = await asyncpg.create_pool(
                options.dsn,
                min_size=0,  # above 0 the driver reconnects on its own during an outage and logs a traceback each time
                max_size=postgres.pool_size,
                max_inactive_connection_lifetime=_MAX_IDLE_S,
                timeout=postgres.timeout_s,
                command_timeout=postgres.timeout_s,
                statement_cache_size=_CACHED_STATEMENTS if postgres.prepared_statements else 0,
                init=partial(_prepare_connection, inspected=inspected),
                reset=_skip_reset,
                server_settings={"application_name": "openapi-tool"},
            )
        connections = cls(pool, postgres.timeout_s)
        try:
            async with connections.lend(NO_PROJECT):
                return connections
        except BaseException:
            pool.terminate()
            raise

    @asynccontextmanager
    async def lend(self, project_id: str, timeout_s: float | None = None) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection. Raises a defect of the statement unchanged, and Unavailable for any other error."""
        timeout_s = timeout_s or self._timeout_s
        try:
            connection = await self._acquire(project_id, timeout_s)
            try:
                with translate_statement_errors():
                    yield connection
            finally:
                await self._release(connection, project_id, timeout_s)
        except ReadOnly:  # after a failover: new connections may reach the new primary
            await self._pool.expire_connections()
            raise

    async def _acquire(self, project_id: str, timeout_s: float) -> asyncpg.Connection:
        """Take a permit, and with it a connection. Raises PoolShareUsed if there is no permit in time."""
        has_permit = False
        try:
            with translate_connection_errors():
                async with asyncio.timeout(timeout_s):
                    await self._permits.take(project_id)
                    has_permit = True
                    return await self._from_pool()
        except BaseException as error:
            if has_permit:
                self._permits.give(project_id)
            elif isinstance(error, Unavailable):  # the time was over before there was a permit
                raise PoolShareUsed("PostgreSQL: other calls use the project's share of the connections") from None
            raise

    async def _from_pool(self) -> asyncpg.Connection:
        """Return a connection; if the server refuses another one, wait for one of the pool to become idle."""
        while True:
            try:
                return await with_free_file(self._pool.acquire)
            except asyncpg.TooManyConnectionsError:
                if not self._pool.get_size():  # the pool has none that could become idle
                    raise
            await asyncio.sleep(_RETRY_POOL_S)

    async def _release(self, connection: asyncpg.Connection, project_id: str, timeout_s: float) -> None:
        try:
            with translate_connection_errors():
                await self._pool.release(connection, timeout=timeout_s)
        finally:
            self._permits.give(project_id)

    async def aclose(self) -> None:
        """Close every connection; terminate those still in use after the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()


async def _prepare_connection(connection: asyncpg.Connection, *, inspected: Statements | None) -> None:
    """Set the codec of jsonb, and check the database for the statements `inspected`, if they are given."""
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
