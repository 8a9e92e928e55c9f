"""What a database role needs, and nothing more (protocol section 6): as statements, and as a question."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_NAME_BYTES = 63
_NO_ROLES = ("public", "none")


@dataclass(frozen=True, slots=True)
class Grant:
    """Privileges on tables, in SQL's words."""

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


def grant_statements(role: str, *, registration: bool = False) -> list[str]:
    """The statements that give `role` what the executor needs, and what registering tools needs on top.

    Raises ValueError for a name that no role can have.
    """
    name = quoted_role(role)
    grants = (*EXECUTOR, *REGISTRATION) if registration else EXECUTOR
    return [
        f"grant usage on schema {', '.join(SCHEMAS)} to {name}",
        *(f"grant {', '.join(grant.privileges)} on {', '.join(grant.tables)} to {name}" for grant in grants),
    ]


def quoted_role(role: str) -> str:
    """A role's name as an SQL identifier.

    Raises ValueError for what PostgreSQL would cut off, or would take for everybody even in quotes.
    """
    if role in _NO_ROLES:
        raise ValueError(f"{role!r} is no role's name: PostgreSQL has another meaning for it, even in quotes")
    if not role.isprintable() or not 0 < len(role.encode()) <= _LONGEST_NAME_BYTES:
        raise ValueError(f"a role's name has 1 to {_LONGEST_NAME_BYTES} bytes, all of them printable")
    return '"' + role.replace('"', '""') + '"'


def _missing() -> str:
    """Asks for what this connection's role lacks of the executor's grants, as text; null where it lacks nothing.

    A grant on some columns counts, because the kernel's operator may be stricter than we ask.
    """
    needed = ", ".join(
        f"('{privilege}', '{table}')" for grant in EXECUTOR for privilege in grant.privileges for table in grant.tables
    )
    return f"""
select string_agg(privilege || ' on ' || name, ', ')
from (values {needed}) as needed (privilege, name)
where not coalesce(has_any_column_privilege(to_regclass(name), privilege), false)
"""  # noqa: S608 - constants only


MISSING = _missing()
