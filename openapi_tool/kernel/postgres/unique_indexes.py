"""The unique indexes without which a call could get two results, and which of them a database lacks.

The kernel's migrations create these indexes, under any names. So they are found by their columns, as PostgreSQL's
catalogue shows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import asyncpg

# Unique indexes with their keys and predicates as PostgreSQL prints them.
_UNIQUE_INDEXES = """
select
    needed.name,
    array(select pg_get_indexdef(i.indexrelid, n, true) from generate_series(1, i.indnkeyatts) as n) as keys,
    coalesce(pg_get_expr(i.indpred, i.indrelid, true), '') as predicate
from (values ('cards'), ('state.agent_inbox'), ('state.execution_edges')) as needed (name)
join pg_index as i on i.indrelid = to_regclass(needed.name)
where i.indisunique and i.indisvalid
"""

# What `unique_index` removes from an index as PostgreSQL prints it.
_DECORATION = re.compile(r'::"?(?:text|character varying)"?|\bmd5\b|[\s()"]')  # casts, hashes, white space, brackets
_NOT_NULL = "tool_call_idISNOTNULLAND"  # `tool_call_id IS NOT NULL AND`, which the needed index need not have
_HASHED = {"tool_call_id", "correlation_id"}  # columns that the kernel's indexes hash


class UniqueIndex(NamedTuple):
    """Unique index on columns or their hashes.

    `predicate` is the condition of a partial index without white space, else empty.
    """

    table: str
    keys: frozenset[str]
    predicate: str = ""

    def __str__(self) -> str:
        """Return what follows `on` in the statement that creates the index as the kernel does."""
        keys = [f"md5({key})" if key in _HASHED else key for key in sorted(self.keys)]
        statement = f"{self.table} ({', '.join(keys)})"
        if self.predicate:  # only that of `cards` has one
            statement += " where tool_call_id is not null and metadata ->> 'type' = 'tool.result'"
        return statement


NEEDED_INDEXES = (
    UniqueIndex("cards", frozenset({"tenant_id", "tool_call_id"}), "metadata->>'type'='tool.result'"),
    UniqueIndex("state.agent_inbox", frozenset({"project_id", "message_type", "correlation_id"})),
    UniqueIndex("state.execution_edges", frozenset({"project_id", "correlation_id", "primitive", "edge_phase"})),
)


async def missing_indexes(connection: asyncpg.Connection, timeout_s: float | None) -> list[str]:
    """Return the needed indexes that the database lacks, each as text for people to read."""
    rows = await connection.fetch(_UNIQUE_INDEXES, timeout=timeout_s)
    existing = {unique_index(row["name"], row["keys"], row["predicate"]) for row in rows}
    return [str(index) for index in NEEDED_INDEXES if index not in existing]


def unique_index(table: str, keys: Iterable[str], predicate: str) -> UniqueIndex:
    """Return an index as PostgreSQL prints it, without casts, hashes, brackets and implied NOT NULL.

    For example, the key `md5((tool_call_id)::text)` becomes `tool_call_id`.
    """
    columns = frozenset(_DECORATION.sub("", key) for key in keys)
    where = _DECORATION.sub("", predicate).removeprefix(_NOT_NULL)
    return UniqueIndex(table, columns, where)
