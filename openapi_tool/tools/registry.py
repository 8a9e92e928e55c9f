"""Interface to stored tool definitions; implemented for the kernel's management API and for its database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from openapi_tool.protocol.errors import ExecutorError
from openapi_tool.protocol.jsonvalue import JsonValue

COLUMNS = ("tool_name", "description", "target_subject", "after_execution", "parameters", "options")
"""Columns of a definition except its project."""

TOO_LARGE = " bytes as stored: too large to show"
"""End of the text that takes the place of a column of more than a megabyte."""


class RegistryError(ExecutorError):
    """A definition could not be read or changed; a command for several projects continues with the next one."""


class NoSuchProject(RegistryError):
    """The kernel has no such project."""


class RegistryUnreachable(RegistryError):
    """The store is unreachable; nothing was read or changed, and the command ends."""


class Registry(Protocol):
    """Definitions of projects, as rows of `COLUMNS`. Every method raises RegistryError."""

    async def rows(self, project_id: str) -> list[dict[str, JsonValue]]:
        """Return the definitions of a project, ordered by name. Raises NoSuchProject."""

    async def row(self, project_id: str, tool_name: str) -> dict[str, JsonValue] | None:
        """Return a definition, or None. Raises NoSuchProject."""

    async def put(self, project_id: str, row: Mapping[str, JsonValue]) -> None:
        """Create or replace a definition."""

    async def delete(self, project_id: str, tool_name: str) -> bool:
        """Delete a definition; return False if there was none."""


def stored_row(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return only the known columns of a row."""
    return {name: values.get(name) for name in COLUMNS}
