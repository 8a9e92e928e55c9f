"""The report that announces a result, and its doorbell (protocol section 6).

The *report* is an inbox row for the calling agent, which says in which card the result is, and an edge that records it.
The *doorbell* is a message that wakes the agent's worker, so that it reads the row at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openapi_tool.protocol import headers as header
from openapi_tool.protocol.command import AFTER_EXECUTION
from openapi_tool.protocol.errors import ReportRefused
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.protocol.records import CallRecords, WaitingTurnRecord
from openapi_tool.protocol.tracing import SpanContext, TraceLink, new_root, parse_traceparent

MAX_DEPTH = 20
"""Recursion depth from which on the kernel refuses a report: the length of the chain of agents that call each other."""

STATUSES = frozenset({"success", "failed", "canceled", "timeout", "partial"})
"""Statuses of a result that the kernel's workers accept."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What is needed for a report that the kernel will accept; checked before the call runs.

    - `worker_target`: the subject token of the agent's worker, None if it is unknown.
    - `waiting_turn`: the turn that gets the result. No row shows it in v1r3, so there it is derived from the command.
    - `request_edge_id`: the edge with which the kernel recorded the call. In v1r3 it may be missing; then this is the
      id for a new one.
    - `depth`: the recursion depth of the waiting turn.
    """

    identity: CallIdentity
    worker_target: str | None
    waiting_turn: WaitingTurnRecord
    request_edge_id: str
    depth: int


@dataclass(frozen=True, slots=True)
class Doorbell:
    """Message by which a worker hears of a result."""

    subject: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """One tool_result row (`inbox_id`) with its response edge (`edge_id`), ready to be written.

    - `actor_id`: the sender, that is, this service.
    - `context_headers`: those of the waiting turn's row, with the report's own trace. By them the worker matches the
      result to the turn.
    - `payload`, `edge_metadata`: JSON columns of row and edge.
    - `doorbell`: published after the commit; None if no worker can be addressed.
    """

    acceptance: Acceptance
    actor_id: str
    inbox_id: str
    edge_id: str
    trace_id: str
    parent_step_id: str | None
    context_headers: Mapping[str, str]
    payload: Mapping[str, JsonValue]
    edge_metadata: Mapping[str, JsonValue]
    doorbell: Doorbell | None

    @property
    def project_id(self) -> str:
        """Project of the call."""
        return self.acceptance.identity.project_id


@dataclass(frozen=True, slots=True)
class TurnCondition:
    """Condition on which a result may be written (ADR 8): the worker has read the other results of the same step.

    Another command of the step counts as well, as its result may come at any moment. It is allowed only if it is at
    least `quiet_s` seconds old; if `quiet_s` is None, no other command is allowed, of any age.
    """

    quiet_s: float | None

    @classmethod
    def no_other_command(cls) -> TurnCondition:
        """Return the condition for the only command of its step."""
        return cls(None)

    @classmethod
    def others_older_than(cls, quiet_s: float) -> TurnCondition:
        """Return the condition that lets the step have other commands, of at least this age."""
        return cls(quiet_s)

    @property
    def needs_no_other(self) -> bool:
        """Return whether the step must have no other command."""
        return self.quiet_s is None


def refuse_reported(records: CallRecords) -> None:
    """Raise ReportRefused if a row reports the call but its card is gone: no second row can be written."""
    if records.earlier is None and records.reported_inbox_id is not None:
        raise ReportRefused("already_reported", f"row {records.reported_inbox_id!r} reports the call without a card")


def trace_headers(span: SpanContext, tracestate: str | None) -> dict[str, str]:
    """Return the trace headers of a span."""
    headers = {header.TRACEPARENT: span.traceparent()}
    if tracestate:
        headers[header.TRACESTATE] = tracestate
    return headers


def trace_link(identity: CallIdentity, waiting_turn: WaitingTurnRecord) -> TraceLink:
    """Return parent and link of the report's span.

    The worker refuses a row whose trace is not that of the waiting turn. So the command's span becomes the parent only
    if it is of the turn's trace; otherwise the turn's span is the parent, and the command's a link. If neither has a
    trace, the report gets the trace id of the tool.call card.
    """
    command_span = identity.trace
    headers = waiting_turn.context_headers
    try:
        turn_span = parse_traceparent(str(headers.get(header.TRACEPARENT, "")))
    except ValueError:
        turn_span = None
    if command_span is not None and (turn_span is None or command_span.trace_id == turn_span.trace_id):
        return TraceLink(parent=command_span, tracestate=identity.tracestate, linked=None)
    tracestate = headers.get(header.TRACESTATE)
    return TraceLink(
        parent=turn_span or new_root(identity.trace_id),
        tracestate=tracestate if isinstance(tracestate, str) and tracestate else None,
        linked=command_span,
    )


def reportable_content(content: Mapping[str, object]) -> bool:
    """Return whether the kernel's workers accept a stored tool.result."""
    return content.get("status") in STATUSES and content.get("after_execution") in AFTER_EXECUTION
