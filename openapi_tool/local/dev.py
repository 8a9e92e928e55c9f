"""The simulated kernel of `dev`: its database and stream, its project, and the log of its executors.

This module needs none of the packages of the extra [local], as `call` uses it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.dev_state import database_of

if TYPE_CHECKING:
    from openapi_tool.local.stack import EmbeddedStack

PROJECT, AGENT = "proj_dev", "agent_dev"
MARK = "openapi-tool dev"
"""Comment on the database of `dev`, and metadata of its stream: they tell them from those of a real kernel."""

FALLBACKS = ({"match": "://", "answer": "r-post-json"}, {"answer": "s-post-json"})
"""Recordings for requests without one: a page if the request has an address, else a list of results."""

KEY_NAMES = ("JINA_API_KEY", "SEARCH_API_KEY")
"""Variables with keys of the double."""

STREAM_MARK = {"made_by": MARK}


async def prepare(stack: EmbeddedStack, version: str, schema: str, tools: Iterable[Mapping[str, Any]]) -> None:
    """Create a missing stream and database; keep existing data, such as edited tools.

    The database gets its mark last: a database without the mark is incomplete, so the next start creates it again.
    """
    stack.upstream.fallbacks(*FALLBACKS)
    database = database_of(version)
    async with Caller.open(stack.postgres.dsn(), version, servers=stack.nats.url) as server:
        await server.make_stream(STREAM_MARK)
        if await mark_of(server, database) == MARK:
            return
        await server.database.execute(f"drop database if exists {database} with (force)")
        await prepare_database(stack.postgres.dsn(), database, schema)
        async with Caller.open(stack.postgres.dsn(database), version, servers=stack.nats.url) as caller:
            await caller.set_up_project(PROJECT, AGENT, tools)
        await server.database.execute(f"comment on database {database} is '{MARK}'")


async def mark_of(caller: Caller, database: str | None = None) -> str | None:
    """Return the comment on a database, by default that of the connection."""
    comment: str | None = await caller.database.fetchval(
        "select shobj_description(oid, 'pg_database') from pg_database "
        "where datname = coalesce($1, current_database())",
        database,
    )
    return comment


def log_entries(log: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines since the last read; an incomplete line is left for the next one."""
    for line in iter(log.readline, b""):
        if not line.endswith(b"\n"):
            log.seek(-len(line), os.SEEK_CUR)
            return
        if line.startswith(b"{"):
            yield orjson.loads(line)
