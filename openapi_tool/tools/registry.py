"""Where definitions of a project are kept, whoever keeps them: the kernel's management API or its database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from openapi_tool.protocol.errors import ExecutorError

COLUMNS = ("tool_name", "description", "target_subject", "after_execution", "parameters", "options")
"""What is stored of a definition, beside its project."""


class RegistryError(ExecutorError):
    """A definition could not be read or changed; the message says why, the other projects are not concerned."""


class Registry(Protocol):
    """The definitions of projects, as rows of `COLUMNS`. Every method raises RegistryError."""

    async def rows(self, project_id: str) -> list[dict[str, Any]]:
        """Every definition of a project, by name."""

    async def row(self, project_id: str, tool_name: str) -> dict[str, Any] | None:
        """One definition, None where there is none of this name."""

    async def put(self, project_id: str, row: Mapping[str, Any]) -> None:
        """Make or replace a definition."""

    async def delete(self, project_id: str, tool_name: str) -> bool:
        """Take a definition away; False where there was none."""


def stored_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row, whatever else came with it."""
    return {name: values.get(name) for name in COLUMNS}
