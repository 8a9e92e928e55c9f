"""Privileges that a database role needs, and the GRANT statements for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_MAX_NAME_BYTES = 63  # PostgreSQL cuts off longer names


class Grant(NamedTuple):
    """The same privileges on several tables."""

    privileges: tuple[str, ...]
    tables: tuple[str, ...]


EXECUTOR = (
    Grant(("select",), ("resource.tools", "resource.project_agents")),
    Grant(("select", "insert"), ("cards", "state.agent_inbox", "state.execution_edges")),
)
"""Privileges of `openapi-tool serve`."""

REGISTRATION = (
    Grant(("select",), ("public.projects",)),
    Grant(("insert", "update", "delete"), ("resource.tools",)),
)
"""Privileges that `openapi-tool tools` needs beside EXECUTOR, to register tools."""

INSPECT = Grant(("select",), ("cards", "state.agent_inbox", "state.execution_edges"))  # of `openapi-tool inspect`
USAGE = Grant(("select",), ("cards", "state.agent_inbox"))  # of `openapi-tool usage`


def reader_grants(role: str, grant: Grant) -> list[str]:
    """Return the GRANT statements for a command that only reads. Raises ValueError as `grant_statements` does."""
    return _grants(role, "public, state", (grant,))


def grant_statements(role: str, *, registration: bool = False) -> list[str]:
    """Return the GRANT statements for the executor's role. Raises ValueError for a name that no role can have."""
    grants = (*EXECUTOR, *REGISTRATION) if registration else EXECUTOR
    return _grants(role, "public, resource, state", grants)


def _grants(role: str, schemas: str, grants: Iterable[Grant]) -> list[str]:
    name = quoted_role(role)
    return [
        f"grant usage on schema {schemas} to {name}",
        *(f"grant {', '.join(grant.privileges)} on {', '.join(grant.tables)} to {name}" for grant in grants),
    ]


def quoted_role(role: str) -> str:
    """Return a role's name as a quoted SQL identifier. Raises ValueError for a name that is too long or a keyword.

    A grant to `public` would be a grant to everybody.
    """
    if role in ("public", "none"):
        raise ValueError(f"{role!r} cannot be a role's name: PostgreSQL reads it as a keyword, even in quotes")
    if not role.isprintable() or not 0 < len(role.encode()) <= _MAX_NAME_BYTES:
        raise ValueError(f"a role's name must have 1 to {_MAX_NAME_BYTES} bytes, all of them printable")
    return '"' + role.replace('"', '""') + '"'
