"""Checks of a database, before its first use and by the health check: that calls can be loaded and results written.

`check_access` is one cheap statement. It also returns the *shape* of the tables, a hash of what the other checks depend
on, so that `check_database` need not run again until the shape changes. The checks depend on the version of the
kernel's protocol, whose `Statements` are to be executed later.
"""

from __future__ import annotations

import re
from typing import Any

import asyncpg

from openapi_tool.kernel.postgres.failures import (
    BYPASS_ROW_SECURITY,
    GRANT_PRIVILEGES,
    RUN_MIGRATIONS,
    SET_SEARCH_PATH,
    SET_VERSION,
    UPGRADE,
    ReadOnly,
)
from openapi_tool.kernel.postgres.privileges import EXECUTOR
from openapi_tool.kernel.postgres.statements import STATEMENTS, Statements
from openapi_tool.kernel.postgres.unique_indexes import missing_indexes
from openapi_tool.protocol.errors import NeedsOperator

# Needed privileges as rows of SQL: ('select', 'resource.tools'), …
_NEEDED = ", ".join(
    f"('{privilege}', '{table}')" for grant in EXECUTOR for privilege in grant.privileges for table in grant.tables
)

_TABLES = tuple(dict.fromkeys(table for grant in EXECUTOR for table in grant.tables))

# Hash of what `check_database` and commits depend on: columns with types and privileges, indexes, privileges on tables,
# triggers with their functions, constraints.
_SHAPE = f"""
with tables as (select to_regclass(name) as oid from unnest(array{list(_TABLES)}) as name)
select md5(string_agg(line, ';' order by line)) from (
    select concat_ws(' ', attrelid, attname, atttypid, attnotnull, atthasdef, attidentity, attacl) as line
    from pg_attribute join tables on attrelid = oid where attnum > 0 and not attisdropped
    union all
    select concat_ws(' ', indexrelid, indrelid, indisunique, indisvalid, indkey, indexprs, indpred)
    from pg_index join tables on indrelid = oid
    union all
    select concat_ws(' ', c.oid, relacl, nspacl, relrowsecurity, relforcerowsecurity)
    from pg_class as c join tables on c.oid = tables.oid join pg_namespace as n on n.oid = relnamespace
    union all
    select concat_ws(' ', t.oid, tgenabled, p.xmin)
    from pg_trigger as t join tables on tgrelid = tables.oid join pg_proc as p on p.oid = tgfoid
    union all
    select concat_ws(' ', c.oid) from pg_constraint as c join tables on conrelid = tables.oid
) as lines
"""  # noqa: S608 - constants only

# A privilege counts as present if it is for any column: an operator may grant only the columns in use. If one of these
# is missing, `check_database` detects that.
_ACCESS = f"""
select current_setting('transaction_read_only') = 'on' as read_only, (
    select string_agg(privilege || ' on ' || name, ', ') from (values {_NEEDED}) as needed (privilege, name)
    where not coalesce(has_any_column_privilege(to_regclass(name), privilege), false)
) as missing, ({_SHAPE}) as shape
"""  # noqa: S608 - constants only

# Every role may read the catalogue, which shows whether a table is missing or only a grant.
_MISSING_TABLES = """
select string_agg(needed.name, ', ')
from unnest(array['cards', 'resource.tools', 'resource.project_agents', 'state.agent_inbox', 'state.execution_edges'])
    as needed (name)
where not exists (
    select from pg_catalog.pg_class as c join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p', 'v', 'f') and c.relname = split_part('.' || needed.name, '.', -1)
        and (needed.name not like '%.%' or n.nspname = split_part(needed.name, '.', 1))
)
"""

# From the catalogue, because a role that registers tools has no privilege on the schema `state`.
_INBOX_COLUMNS = """
select array_agg(a.attname::text)
from pg_catalog.pg_attribute as a
join pg_catalog.pg_class as c on c.oid = a.attrelid
join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
where n.nspname = 'state' and c.relname = 'agent_inbox' and a.attnum > 0 and not a.attisdropped
"""


# Tables of $1 of which a policy may hide rows.
_ROW_SECURITY = """
select string_agg(name, ', ') from unnest($1::text[]) as name where row_security_active(to_regclass(name))
"""

# Columns of the tables $1 that must have a value, apart from the columns $2 (`table.column`) that COMMIT writes. Only
# tables that COMMIT writes count.
_REQUIRED_COLUMNS = """
select string_agg(name || '.' || attname, ', ' order by name, attnum)
from unnest($1::text[]) as name join pg_attribute on attrelid = to_regclass(name)
where attnum > 0 and attnotnull and not (attisdropped or atthasdef or attidentity <> '' or attgenerated <> '')
    and name in (select regexp_replace(written, '[.][^.]*$', '') from unnest($2::text[]) as written)
    and name || '.' || attname <> all ($2::text[])
"""
_MAY_BE_NULL = {"enqueue_mode", "parent_step_id", "tracestate", "target_agent_turn_id"}
"""Columns to which COMMIT may write null."""

_INSERTS = re.compile(r"insert into (\S+) \(([^)]*)\)")  # table and columns of `insert into cards (card_id, …)`
_SAMPLE_LOAD = ("x", "x", "x", "x", "x", None, "x", "x")  # parameters of LOAD; the sixth has a type of the version
_WRONG_TYPES = (asyncpg.DataError, asyncpg.DatatypeMismatchError, asyncpg.UndefinedFunctionError)


async def check_access(connection: asyncpg.Connection, timeout_s: float | None = None) -> str:
    """Check privileges, tables and that the database is writable, in one statement; return the tables' shape.

    `check_database` passes again as long as the shape is the same. Raises Unavailable.
    """
    row = await connection.fetchrow(_ACCESS, timeout=timeout_s)
    if row["missing"]:
        raise await _reason_of_missing(connection, row["missing"], timeout_s)
    if row["read_only"]:
        raise ReadOnly
    return str(row["shape"])


async def _reason_of_missing(connection: asyncpg.Connection, privileges: str, timeout_s: float | None) -> NeedsOperator:
    """Return the error of missing privileges: a table is missing, or is not found, or only the grants are missing."""
    absent = await connection.fetchval(_MISSING_TABLES, timeout=timeout_s)
    if absent:
        return NeedsOperator(f"PostgreSQL: missing: table {absent}", RUN_MIGRATIONS)
    if await connection.fetchval("select to_regclass('cards') is null", timeout=timeout_s):
        return NeedsOperator("PostgreSQL: the search_path of the role does not find the table cards", SET_SEARCH_PATH)
    return NeedsOperator(f"PostgreSQL: missing: {privileges}", GRANT_PRIVILEGES)


async def check_database(connection: asyncpg.Connection, statements: Statements, timeout_s: float | None = None) -> str:
    """Check access, unique indexes, columns and their privileges; return the tables' shape. Raises Unavailable."""
    shape = await check_access(connection, timeout_s)
    missing = await missing_indexes(connection, timeout_s)
    try:  # to plan the statements shows whether columns and their privileges are there
        await _explain(connection, statements.LOAD, _SAMPLE_LOAD, timeout_s)
        await _explain(connection, statements.COMMIT, statements.SAMPLE_COMMIT, timeout_s)
    except _WRONG_TYPES as error:  # the driver encodes a sample value by its column's type
        raise NeedsOperator(f"PostgreSQL: a column has another type: {error}", RUN_MIGRATIONS) from error
    except asyncpg.UndefinedColumnError:
        await refuse_other_version(connection, statements, timeout_s)
        raise
    except asyncpg.InvalidColumnReferenceError:  # an `on conflict` finds no unique index; the message below names it
        if not missing:
            raise
    if missing:
        raise NeedsOperator(f"PostgreSQL: missing: unique index on {'; '.join(missing)}", RUN_MIGRATIONS)
    if hidden := await connection.fetchval(_ROW_SECURITY, list(_TABLES), timeout=timeout_s):
        # A row that a policy hides would look like a tool, card or turn that does not exist.
        raise NeedsOperator(f"PostgreSQL: row-level security may hide rows of {hidden}", BYPASS_ROW_SECURITY)
    await _check_required_columns(connection, statements, timeout_s)
    return shape


async def _explain(
    connection: asyncpg.Connection, statement: str, values: tuple[Any, ...], timeout_s: float | None
) -> None:
    """Plan a statement and check its privileges, without running it, as on a new connection.

    The statement is not cached: a cached one would keep the types with which it was prepared. It has no name, and a
    transaction around it, because of poolers in transaction mode, which may use another connection for each
    transaction.
    """
    async with connection.transaction():
        planned = await connection.prepare(f"explain {statement}", name="", timeout=timeout_s)
        await planned.fetch(*values, timeout=timeout_s)


async def _check_required_columns(
    connection: asyncpg.Connection, statements: Statements, timeout_s: float | None
) -> None:
    """Raise NeedsOperator if a row needs a value that COMMIT does not write."""
    columns_by_table: dict[str, set[str]] = {}
    for table, names in _INSERTS.findall(statements.COMMIT):
        columns = set(names.replace(",", " ").split()) - _MAY_BE_NULL
        # COMMIT has two inserts into cards: only a column that both write has a value in each row.
        columns_by_table[table] = columns_by_table.get(table, columns) & columns
    written = [f"{table}.{column}" for table, columns in columns_by_table.items() for column in columns]
    required = await connection.fetchval(_REQUIRED_COLUMNS, list(_TABLES), written, timeout=timeout_s)
    if required:
        raise NeedsOperator(f"PostgreSQL: columns that this version does not write are required: {required}", UPGRADE)


async def refuse_other_version(
    connection: asyncpg.Connection, statements: Statements, timeout_s: float | None = None
) -> None:
    """Raise NeedsOperator if the columns are those of another protocol version."""
    columns = set(await connection.fetchval(_INBOX_COLUMNS, timeout=timeout_s) or ())
    versions = {version for version, other in STATEMENTS.items() if other.INBOX_COLUMN in columns}
    expected = statements.VERSION
    # With the columns of no version, or of several, the version is unknown; then other checks say what is missing.
    if len(versions) == 1 and expected not in versions:
        raise NeedsOperator(
            f"PostgreSQL: this is a database of protocol {versions.pop()}, but {expected} is configured for it",
            SET_VERSION,
        )
