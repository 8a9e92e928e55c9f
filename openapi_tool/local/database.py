"""Connection of a simulated kernel to its database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import orjson


@asynccontextmanager
async def open_database(dsn: str, timeout_s: float) -> AsyncIterator[asyncpg.Connection]:
    """Connect to a database; jsonb columns are decoded. Raises asyncpg's errors or OSError."""
    database = await asyncpg.connect(dsn, timeout=timeout_s)
    try:
        await database.set_type_codec(
            "jsonb", schema="pg_catalog", encoder=lambda v: orjson.dumps(v).decode(), decoder=orjson.loads
        )
        yield database
    finally:
        await database.close()
