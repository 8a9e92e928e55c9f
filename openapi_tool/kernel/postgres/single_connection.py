"""A connection for one command of the command line that only reads from the kernel's database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from openapi_tool.kernel.postgres.failures import translate_connection_errors, translate_statement_errors
from openapi_tool.kernel.postgres.inspection import refuse_other_version
from openapi_tool.kernel.postgres.statements import STATEMENTS
from openapi_tool.options.postgres import PoolOptions

_CONNECT_TIMEOUT_S = 10.0  # also of the end of the connection


@asynccontextmanager
async def connected(pool: PoolOptions, timeout_s: float) -> AsyncIterator[asyncpg.Connection]:
    """Connect, with a timeout for each statement.

    Raises Unavailable, also for errors in the context, and for a database of another protocol version.
    """
    with translate_connection_errors():
        connection = await asyncpg.connect(pool.dsn, timeout=_CONNECT_TIMEOUT_S, command_timeout=timeout_s)
    try:
        with translate_statement_errors():
            await refuse_other_version(connection, STATEMENTS[pool.version])
            yield connection
    finally:
        await connection.close(timeout=_CONNECT_TIMEOUT_S)
