"""Interface of one protocol version; no other code depends on the version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from openapi_tool.protocol.command import Command, Delivery
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsonvalue import JsonValue
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.report import Acceptance, Report, ResultContent, Wakeup
from openapi_tool.protocol.trace import SpanContext


class Dialect(Protocol):
    """One version of the protocol, as the pipeline uses it."""

    @property
    def version(self) -> str:
        """Name of the version: the second token of its subjects."""

    def decode(self, delivery: Delivery) -> Command:
        """Decode a delivery. Raises Unanswerable only if its subject is not that of a tool command."""

    def accept(self, identity: CallIdentity, records: CallRecords) -> Acceptance:
        """Return the turn that will take the report. Raises ReportRefused if there is none."""

    def report(
        self, acceptance: Acceptance, span: SpanContext, tracestate: str | None, card_id: str, content: ResultContent
    ) -> Report:
        """Build the report of a result card: inbox row, edge and doorbell."""

    def wakeup(
        self, project_id: str, worker_target: str | None, context_headers: Mapping[str, JsonValue]
    ) -> Wakeup | None:
        """Build the doorbell of an earlier report from the headers of its inbox row."""
