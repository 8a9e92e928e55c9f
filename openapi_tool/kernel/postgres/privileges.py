"""Privileges of the database role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_MAX_NAME_BYTES = 63


class Grant(NamedTuple):
    """Privileges on tables."""

    privileges: tuple[str, ...]
    tables: tuple[str, ...]


EXECUTOR = (
    Grant(("select",), ("resource.tools", "resource.project_agents")),
    Grant(("select", "insert"), ("cards", "state.agent_inbox", "state.execution_edges")),
)
REGISTRATION = (
    Grant(("select",), ("public.projects",)),
    Grant(("insert", "update", "delete"), ("resource.tools",)),
)
INSPECT = Grant(("select",), ("cards", "state.agent_inbox", "state.execution_edges"))
USAGE = Grant(("select",), ("cards", "state.agent_inbox"))


def reader_grants(role: str, grant: Grant) -> list[str]:
    """Return the GRANT statements for a command that only reads. Raises ValueError."""
    return _grants(role, "public, state", (grant,))


def grant_statements(role: str, *, registration: bool = False) -> list[str]:
    """Return the GRANT statements for the executor's role. Raises ValueError for a name that no role can have."""
    return _grants(role, "public, resource, state", (*EXECUTOR, *REGISTRATION) if registration else EXECUTOR)


def _grants(role: str, schemas: str, grants: Iterable[Grant]) -> list[str]:
    name = quoted_role(role)
    return [
        f"grant usage on schema {schemas} to {name}",
        *(f"grant {', '.join(grant.privileges)} on {', '.join(grant.tables)} to {name}" for grant in grants),
    ]


def quoted_role(role: str) -> str:
    """Return a role's name as a quoted SQL identifier. Raises ValueError for one that is too long or a keyword.

    A grant to `public` would be one to everybody.
    """
    if role in ("public", "none"):
        raise ValueError(f"{role!r} cannot be a role's name: PostgreSQL reads it as a keyword, even in quotes")
    if not role.isprintable() or not 0 < len(role.encode()) <= _MAX_NAME_BYTES:
        raise ValueError(f"a role's name must have 1 to {_MAX_NAME_BYTES} bytes, all of them printable")
    return '"' + role.replace('"', '""') + '"'
