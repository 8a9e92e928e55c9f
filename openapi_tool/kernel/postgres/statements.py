"""The SQL of each version of the kernel's protocol, and the interface of the modules that contain it.

The versions store the same things in partly different columns. So each has a module with its statements, built from
the common parts in `load.py` and `commit.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from openapi_tool.kernel.postgres import v1r3, v1r4
from openapi_tool.kernel.postgres.commit import Mode
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.report import Report


class Statements(Protocol):
    """Module with the SQL of one version."""

    VERSION: str
    INBOX_COLUMN: str
    """Column of `state.agent_inbox` that no other version has, by which `inspection` tells databases apart."""
    LOAD: str
    """Reads everything about a call, as one row (`load.py`)."""
    COMMIT: str
    """Writes all rows of a result (`commit.py`)."""
    REPORT: str
    """Writes inbox row and edge of an existing result card (`commit.py`)."""
    SAMPLE_COMMIT: tuple[Any, ...]
    """Sample parameters of COMMIT, each of the type that its column must have."""
    TIMELINE: str
    """Reads the inbox rows of a call, for `openapi-tool inspect`."""

    def call_values(self, command: Command) -> tuple[Any, ...]:
        """Return the parameters of LOAD."""

    def call_records(self, row: Mapping[str, Any]) -> CallRecords:
        """Return the records in a row of LOAD."""

    def report_values(self, card_id: str, report: Report, mode: Mode, quiet_s: float | None) -> tuple[Any, ...]:
        """Return the parameters of REPORT, which are also the first ones of COMMIT."""


STATEMENTS: Mapping[str, Statements] = {v1r4.VERSION: v1r4, v1r3.VERSION: v1r3}
