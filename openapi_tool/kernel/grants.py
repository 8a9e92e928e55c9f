"""Least privileges of the database roles (protocol section 6), as GRANT statements and as a query for missing ones."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_NAME_BYTES = 63
_NO_ROLES = ("public", "none")


@dataclass(frozen=True, slots=True)
class Grant:
    """Privileges on tables, as written in a GRANT statement."""

    privileges: tuple[str, ...]
    tables: tuple[str, ...]


SCHEMAS = ("public", "resource", "state")
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
    """Return the GRANT statements for a command that only reads. Raises ValueError like `grant_statements`."""
    name = quoted_role(role)
    return [
        f"grant usage on schema public, state to {name}",
        f"grant {', '.join(grant.privileges)} on {', '.join(grant.tables)} to {name}",
    ]


def grant_statements(role: str, *, registration: bool = False) -> list[str]:
    """Return the GRANT statements for a role of the executor, with `registration` also for registering tools.

    Raises ValueError for a name that no role can have.
    """
    name = quoted_role(role)
    grants = (*EXECUTOR, *REGISTRATION) if registration else EXECUTOR
    return [
        f"grant usage on schema {', '.join(SCHEMAS)} to {name}",
        *(f"grant {', '.join(grant.privileges)} on {', '.join(grant.tables)} to {name}" for grant in grants),
    ]


def quoted_role(role: str) -> str:
    """Return a role's name as a quoted SQL identifier.

    Raises ValueError for a name that PostgreSQL would truncate, and for `public` and `none`, which are keywords even in
    quotes: a grant to `public` would be a grant to everybody.
    """
    if role in _NO_ROLES:
        raise ValueError(f"{role!r} cannot be a role's name: PostgreSQL reads it as a keyword, even in quotes")
    if not role.isprintable() or not 0 < len(role.encode()) <= _MAX_NAME_BYTES:
        raise ValueError(f"a role's name must have 1 to {_MAX_NAME_BYTES} bytes, all of them printable")
    return '"' + role.replace('"', '""') + '"'


def _missing() -> str:
    """Return a query for the grants that the connection's role lacks, as one text; null if it lacks none.

    A grant on some columns is enough here: an operator may restrict the role to the columns in use. `inspection.py`
    detects a column that is missing.
    """
    needed = ", ".join(
        f"('{privilege}', '{table}')" for grant in EXECUTOR for privilege in grant.privileges for table in grant.tables
    )
    return f"""
select string_agg(privilege || ' on ' || name, ', ')
from (values {needed}) as needed (privilege, name)
where not coalesce(has_any_column_privilege(to_regclass(name), privilege), false)
"""  # noqa: S608 - constants only


MISSING_GRANTS = _missing()
