"""Interface of the SQL of one protocol version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from openapi_tool.kernel import v1r3, v1r4
from openapi_tool.protocol.command import Command, Report
from openapi_tool.protocol.records import CallRecords


class Statements(Protocol):
    """Statements, their parameters, and the mapping of rows. The modules `v1r4` and `v1r3` implement it.

    COMMIT takes the values of `report_values`, then content and metadata of the result card, then id, content, metadata
    and lifetime in seconds of the artifact card, null without one; REPORT takes the values of `report_values`.
    `INBOX_COLUMN` is a column of `state.agent_inbox` that no other version has.
    """

    VERSION: str
    INBOX_COLUMN: str
    LOAD: str
    HAS_RESULT: str
    LAST_RESULT_AGE: str
    COMMIT: str
    REPORT: str
    ARTIFACT: str
    TIMELINE: str

    def call_values(self, command: Command) -> tuple[Any, ...]:
        """Return the parameters of LOAD."""

    def report_values(self, card_id: str, report: Report) -> tuple[Any, ...]:
        """Return the parameters of REPORT; COMMIT takes the same ones first."""

    def call_records(self, row: Mapping[str, Any]) -> CallRecords:
        """Return the records of a call from a row of LOAD."""


_ALL: tuple[Statements, ...] = (v1r4, v1r3)
STATEMENTS: Mapping[str, Statements] = {each.VERSION: each for each in _ALL}
"""Statements by protocol version."""
