"""Stored definitions in the kernel's database, as `openapi-tool tools` reads and writes them (table resource.tools)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

from openapi_tool.kernel.postgres.failures import describe_connection_error
from openapi_tool.kernel.postgres.inspection import refuse_other_version
from openapi_tool.kernel.postgres.sizes import fits
from openapi_tool.kernel.postgres.statements import STATEMENTS
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.errors import NeedsOperator
from openapi_tool.protocol.jsontext import dumps, loads
from openapi_tool.tools.registry import (
    COLUMNS,
    TOO_LARGE,
    NoSuchProject,
    RegistryError,
    RegistryUnreachable,
    stored_row,
)
from openapi_tool.tools.tool_names import RESERVED_NAMES
from openapi_tool.tools.wording import short

_CONNECTIONS = 4  # most connections of a command
_MAX_JSON_BYTES = 1_000_000  # of `parameters`, and of `options`, as text


def _in_bounds(column: str) -> str:
    """Return the SQL of a column; instead of JSON that is too large, a text: `1234567 bytes as stored: too large …`."""
    if column not in ("parameters", "options"):
        return column
    return (
        f"case when {fits(column, _MAX_JSON_BYTES)} then {column} "
        f"else to_jsonb(format('%s{TOO_LARGE}', pg_column_size({column}))) end as {column}"
    )


_COLUMNS_IN_BOUNDS = ", ".join(map(_in_bounds, COLUMNS))
_SELECT = f"select {_COLUMNS_IN_BOUNDS} from resource.tools where project_id = $1"  # noqa: S608 - constants only
_UPSERT = """
insert into resource.tools
    (project_id, tool_name, description, target_subject, after_execution, parameters, options)
select $1, $2, $3, $4, $5, $6, $7 from public.projects where project_id = $1
on conflict (project_id, tool_name) do update set
    description = excluded.description, target_subject = excluded.target_subject,
    after_execution = excluded.after_execution, parameters = excluded.parameters, options = excluded.options
returning tool_name
"""
_DELETE = "delete from resource.tools where project_id = $1 and tool_name = $2 returning tool_name"


class ToolRows:
    """Tool definitions in the kernel's database. A definition is a row of resource.tools, as a dict by column."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    @classmethod
    @asynccontextmanager
    async def open(cls, options: PoolOptions) -> AsyncIterator[ToolRows]:
        """Connect to PostgreSQL. Raises RegistryError, also for a database of another protocol version."""
        timeout_s = options.postgres.timeout_s
        with _translate_errors():
            pool = await asyncpg.create_pool(
                options.dsn,
                min_size=1,
                max_size=_CONNECTIONS,
                timeout=timeout_s,
                command_timeout=timeout_s,
                statement_cache_size=0,
                init=_prepare_connection,
                server_settings={"application_name": "openapi-tool"},
            )
        try:
            with _translate_errors():
                async with pool.acquire() as connection:
                    await refuse_other_version(connection, STATEMENTS[options.version])
            yield cls(pool)
        finally:
            await pool.close()

    async def rows(self, project_id: str) -> list[dict[str, Any]]:
        """Return a project's definitions by name. Raises RegistryError, also for an unknown project."""
        with _translate_errors():
            await self._check_project(project_id)
        return await self.definitions(project_id)

    async def definitions(self, project_id: str) -> list[dict[str, Any]]:
        """Return the definitions, none for an unknown project. Raises RegistryError.

        Unlike `rows` it needs no privilege on the table `projects`, which the executor's role has not.
        """
        with _translate_errors():
            return [stored_row(row) for row in await self._pool.fetch(f"{_SELECT} order by tool_name", project_id)]

    async def row(self, project_id: str, tool_name: str) -> dict[str, Any] | None:
        """Return a definition, None without one. Raises RegistryError, also for an unknown project."""
        with _translate_errors():
            await self._check_project(project_id)
            row = await self._pool.fetchrow(f"{_SELECT} and tool_name = $2", project_id, tool_name)
        return stored_row(row) if row else None

    async def put(self, project_id: str, row: Mapping[str, Any]) -> None:
        """Create or replace a definition. Raises RegistryError, also for an unknown project."""
        _check_name(row["tool_name"])
        if row["parameters"] is None or row["options"] is None:
            raise RegistryError("parameters and options must be objects")
        with _translate_errors():
            done = await self._pool.fetchval(_UPSERT, project_id, *(row[name] for name in COLUMNS))
        if done is None:
            raise _no_such_project(project_id)

    async def delete(self, project_id: str, tool_name: str) -> bool:
        """Delete a definition; return False if there was none. Raises RegistryError."""
        _check_name(tool_name)
        row = await self.row(project_id, tool_name)
        if row is None:
            return False
        if ".cmd.tool." not in (row["target_subject"] or ""):  # the kernel runs it itself
            name = short(tool_name)
            raise RegistryError(f"bad_request: {name!r} is one of the kernel's own tools and cannot be deleted")
        with _translate_errors():
            return await self._pool.fetchval(_DELETE, project_id, tool_name) is not None

    async def _check_project(self, project_id: str) -> None:
        exists = await self._pool.fetchval("select true from public.projects where project_id = $1", project_id)
        if not exists:
            raise _no_such_project(project_id)


def _check_name(tool_name: str) -> None:
    if tool_name in RESERVED_NAMES:
        raise RegistryError(f"bad_request: the name {tool_name!r} is reserved by the kernel")


def _no_such_project(project_id: str) -> NoSuchProject:
    return NoSuchProject(f"not_found: there is no project {short(project_id)!r}")


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise RegistryError for an error of the database, RegistryUnreachable if it does not answer."""
    try:
        yield
    except (OSError, asyncpg.InvalidAuthorizationSpecificationError, asyncpg.CannotConnectNowError) as error:
        raise RegistryUnreachable(f"PostgreSQL: {describe_connection_error(error)}") from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise RegistryError(
            f"PostgreSQL: {error}. An operator must correct this: grant what `openapi-tool sql grants --registration` "
            "prints"
        ) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise RegistryError(f"PostgreSQL: {type(error).__name__}: {error}") from error
    except NeedsOperator as refusal:
        raise RegistryError(str(refusal)) from None


async def _prepare_connection(connection: asyncpg.Connection) -> None:
    await connection.set_type_codec(
        "jsonb", schema="pg_catalog", encoder=lambda value: dumps(value).decode(), decoder=_json_or_text
    )


def _json_or_text(text: str) -> Any:
    """Return the parsed value, or the text if the parser refuses it: one bad row must not hide others."""
    try:
        return loads(text)
    except ValueError:
        return text
