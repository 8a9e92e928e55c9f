"""Connections to the database of a simulated kernel, and its creation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import orjson

CONNECT_S = 10.0


@asynccontextmanager
async def open_database(dsn: str, timeout_s: float) -> AsyncIterator[asyncpg.Connection]:
    """Connect; jsonb columns are decoded. Raises asyncpg's errors or OSError."""
    database = await asyncpg.connect(dsn, timeout=timeout_s)
    try:
        await database.set_type_codec(
            "jsonb", schema="pg_catalog", encoder=lambda v: orjson.dumps(v).decode(), decoder=orjson.loads
        )
        yield database
    finally:
        await database.close()


async def prepare_database(server_dsn: str, database: str, schema: str | None, template: str | None = None) -> None:
    """Create a database, as a copy of `template` if that is given, and run the statements of `schema` in it."""
    # The default strategy, wal_log, takes twice as long.
    copy = f' template "{template}" strategy file_copy' if template else ""
    async with open_database(server_dsn, CONNECT_S) as server:
        await server.execute(f'create database "{database}"{copy}')
    if schema is not None:
        address_of_server = server_dsn.rpartition("/")[0]
        async with open_database(f"{address_of_server}/{database}", CONNECT_S) as created:
            await created.execute(schema)
