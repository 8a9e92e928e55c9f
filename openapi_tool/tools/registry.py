"""Definitions in a store, the kernel's database or a gateway's state: their columns, and the errors of the store."""

from __future__ import annotations

from collections.abc import Mapping

from openapi_tool.protocol.errors import ExecutorError
from openapi_tool.protocol.jsontext import JsonValue

COLUMNS = ("tool_name", "description", "target_subject", "after_execution", "parameters", "options")
"""Columns of a definition except its project."""

TOO_LARGE = " bytes as stored: too large to show"
"""End of the text that replaces a column of more than a megabyte; the number of bytes stands before it."""


class RegistryError(ExecutorError):
    """A definition could not be read or changed; commands continue with the next project."""


class NoSuchProject(RegistryError):
    """The kernel has no such project."""


class RegistryUnreachable(RegistryError):
    """The store is unreachable; nothing was changed, and the command ends."""


def stored_row(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return only the known columns of a row."""
    return {name: values.get(name) for name in COLUMNS}
