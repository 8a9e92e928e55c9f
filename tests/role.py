"""The database role that executors log in as: it may do what `openapi-tool sql grants` prints, and nothing else."""

from __future__ import annotations

import secrets

import asyncpg

from openapi_tool.kernel.grants import grant_statements, quoted_role
from openapi_tool.local.stack import EmbeddedStack

ROLE = "openapi_tool"
_PASSWORD = secrets.token_urlsafe(18)


async def make_role(dsn: str, role: str = ROLE, *, registration: bool = False) -> None:
    """Make the role, if it is not there, and give it its grants in this database."""
    connection = await asyncpg.connect(dsn)
    if not await connection.fetchval("select exists (select from pg_roles where rolname = $1)", role):
        await connection.execute(f"create role {quoted_role(role)} login password '{_PASSWORD}'")
    await connection.execute(";".join(grant_statements(role, registration=registration)))
    await connection.close()


def dsn_of(stack: EmbeddedStack, database: str, role: str = ROLE, *, at: str = "") -> str:
    """How the executor connects; `at` is another `host:port` than the stack's, or several with commas."""
    return f"postgresql://{role}:{_PASSWORD}@{at or f'127.0.0.1:{stack.postgres.port}'}/{database}"
