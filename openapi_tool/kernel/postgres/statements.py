"""The SQL of each protocol version, and its interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from openapi_tool.kernel.postgres import v1r3, v1r4
from openapi_tool.kernel.postgres.commit import Mode
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.report import Report


class Statements(Protocol):
    """Module with the SQL of one version; only its `state.agent_inbox` has the column `INBOX_COLUMN`."""

    VERSION: str
    INBOX_COLUMN: str
    LOAD: str
    COMMIT: str
    REPORT: str
    SAMPLE_COMMIT: tuple[Any, ...]
    """Parameters of COMMIT, each of the type that its column must have."""
    TIMELINE: str

    def call_values(self, command: Command) -> tuple[Any, ...]:
        """Return the parameters of LOAD."""

    def call_records(self, row: Mapping[str, Any]) -> CallRecords:
        """Return the records in a row of LOAD."""

    def report_values(self, card_id: str, report: Report, mode: Mode, quiet_s: float | None) -> tuple[Any, ...]:
        """Return the parameters of REPORT, the first ones of COMMIT."""


STATEMENTS: Mapping[str, Statements] = {v1r4.VERSION: v1r4, v1r3.VERSION: v1r3}
