"""Types of a report: the inbox row and response edge that announce a result, and its doorbell (protocol section 6).

`Dialect.accept` builds an `Acceptance` before the call runs, `Dialect.report` a `Report` from it afterwards. The kernel
package writes its rows, and `bus/connection.py` publishes its `Wakeup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.frozen import frozen
from openapi_tool.protocol import identity as header
from openapi_tool.protocol.command import AFTER_EXECUTION
from openapi_tool.protocol.errors import ReportRefused
from openapi_tool.protocol.identity import CallIdentity, SpanContext, TraceLink, new_root, parse_traceparent
from openapi_tool.protocol.records import CallRecords, WaitingTurnRecord

MAX_DEPTH = 20
"""The kernel's limit of the recursion depth, which is the length of the chain of agents that call each other.

The kernel refuses a report at this depth or a greater one.
"""

ResultContent = Mapping[str, Any]
"""Content of a result card, with at least `status` and `after_execution`."""

STATUSES = frozenset({"success", "failed", "canceled", "timeout", "partial"})
"""Statuses of a result that the kernel's workers accept."""


@frozen
class Acceptance:
    """Call whose report the kernel will accept.

    `worker_target` is the subject token of the agent's worker, to which the doorbell is sent; None if unknown.
    `request_edge_id` is the call's request edge, empty if the report may create it (v1r3). `depth` is the recursion
    depth of the waiting turn. v1r3 has no row of the waiting turn; `waiting_turn` is then derived from the command.
    """

    identity: CallIdentity
    worker_target: str | None
    waiting_turn: WaitingTurnRecord
    request_edge_id: str
    depth: int


@frozen
class Wakeup:
    """Doorbell: makes an agent's worker read its inbox."""

    subject: str
    headers: Mapping[str, str]
    body: bytes


@frozen
class Report:
    """One tool_result row with its response edge, ready to be written.

    `actor_id` is this service, the sender; `agent_id` is the agent that gets the result. `context_headers` are those
    of the inbox row of the waiting turn (agent, turn, epoch, parents, depth) with the report's own trace; the worker
    uses them to match the result to the turn. `waiting_inbox_id` is empty if no row of that turn is checked (v1r3),
    `request_edge_id` the call's edge or a new id for a missing one. `wakeup` is published after the commit; None if no
    worker can be addressed.
    """

    inbox_id: str
    edge_id: str
    project_id: str
    channel_id: str
    agent_id: str
    agent_turn_id: str
    turn_epoch: int
    tool_call_id: str
    actor_id: str
    depth: int
    trace_id: str
    parent_step_id: str | None
    context_headers: Mapping[str, str]
    payload: Mapping[str, str | int]
    edge_metadata: Mapping[str, Any]
    waiting_inbox_id: str
    request_edge_id: str
    wakeup: Wakeup | None


def refuse_reported(records: CallRecords) -> None:
    """Raise ReportRefused if an inbox row reports the call but its card is gone: no second row can be written."""
    if records.earlier is None and records.reported_inbox_id is not None:
        raise ReportRefused("already_reported", f"row {records.reported_inbox_id!r} reports the call without a card")


def trace_headers(span: SpanContext, tracestate: str | None) -> dict[str, str]:
    """Return the trace headers of a span; `tracestate` only if it has a value."""
    headers = {header.TRACEPARENT: span.traceparent()}
    return headers | {header.TRACESTATE: tracestate} if tracestate else headers


def trace_link(identity: CallIdentity, waiting_turn: WaitingTurnRecord) -> TraceLink:
    """Return parent and link of the report's span, which must be in the trace of the waiting turn.

    The worker refuses a row with another trace id. So an inbound span of another trace becomes a link, not the parent.
    If neither command nor row has a trace, the report gets the trace id of the tool.call card.
    """
    inbound, of_turn = identity.trace, _trace_of(waiting_turn)
    if inbound is not None and (of_turn is None or inbound.trace_id == of_turn.trace_id):
        return TraceLink(parent=inbound, tracestate=identity.tracestate, linked=None)
    tracestate = _text(waiting_turn.context_headers.get(header.TRACESTATE))
    return TraceLink(parent=of_turn or new_root(identity.trace_id), tracestate=tracestate, linked=inbound)


def _trace_of(waiting_turn: WaitingTurnRecord) -> SpanContext | None:
    try:
        return parse_traceparent(str(waiting_turn.context_headers.get(header.TRACEPARENT, "")))
    except ValueError:
        return None


def reportable_content(content: Mapping[str, Any]) -> bool:
    """Return whether the kernel's workers accept a stored tool.result; they check these two fields."""
    return content.get("status") in STATUSES and content.get("after_execution") in AFTER_EXECUTION


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
