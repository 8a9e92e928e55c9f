"""Interface of one protocol version; unverified identity of a command of any version, to list and search commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from openapi_tool.protocol.command import Acceptance, Body, Command, Delivery, Report, Wakeup
from openapi_tool.protocol.identity import CallIdentity, ClaimedIdentity, CommandSubject, SpanContext, read_identity
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, loads
from openapi_tool.protocol.records import CallRecords, ResultContent
from openapi_tool.protocol.v1r3 import V1r3, identity_in_body


class Dialect(Protocol):
    """One version of the protocol, as the pipeline uses it."""

    @property
    def version(self) -> str:
        """Name of the version: the second token of its subjects."""

    def decode(self, delivery: Delivery) -> Command:
        """Decode a delivery. Raises Unanswerable only if its subject is not that of a tool command."""

    def accept(self, identity: CallIdentity, records: CallRecords) -> Acceptance:
        """Return what the report needs to know about the waiting turn. Raises ReportRefused if no turn will take it."""

    def report(
        self, acceptance: Acceptance, span: SpanContext, tracestate: str | None, card_id: str, content: ResultContent
    ) -> Report:
        """Build the report of a result card: inbox row, edge and doorbell."""

    def wakeup(
        self, project_id: str, worker_target: str | None, context_headers: Mapping[str, JsonValue]
    ) -> Wakeup | None:
        """Build the doorbell of an earlier report from the headers of its inbox row."""


def claimed_identity(subject: str, headers: Mapping[str, str], data: bytes) -> ClaimedIdentity:
    """Return the ids in subject, headers and, in v1r3, the body; empty or None if unknown. Raises nothing."""
    tokens = [*subject.split(".", 4), "", "", "", ""]
    parsed = CommandSubject(tokens[1], tokens[2], tokens[3], "", "")
    if parsed.version == V1r3.version:
        return identity_in_body(parsed, headers, Body(_fields(data)))
    return read_identity(parsed, headers)


def _fields(data: bytes) -> JsonObject:
    try:
        fields = loads(data)
    except ValueError:  # not JSON, or a truncated body
        return {}
    return fields if isinstance(fields, dict) else {}
