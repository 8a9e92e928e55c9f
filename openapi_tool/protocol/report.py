"""The report: may it be accepted, and what it writes (section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.protocol import identity as header
from openapi_tool.protocol.cards import new_id
from openapi_tool.protocol.command import AFTER_EXECUTION
from openapi_tool.protocol.errors import ReportRefused
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import CallRecords, RequestEdgeRecord, TargetRecord
from openapi_tool.protocol.trace import SpanContext, TraceLink, new_root, parse_traceparent

MAX_DEPTH = 20
STATUSES = frozenset({"success", "failed", "canceled", "timeout", "partial"})


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A turn that will take the report, and the request edge that proves the call."""

    target: TargetRecord
    edge: RequestEdgeRecord
    depth: int


@dataclass(frozen=True, slots=True)
class Report:
    """One tool_result row with its response edge, ready to be written."""

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
    payload: Mapping[str, str]
    edge_metadata: Mapping[str, Any]
    target_inbox_id: str
    request_edge_id: str


def accept(identity: CallIdentity, records: CallRecords) -> Acceptance:
    """Check, before anything is billed, that the kernel will take the report.

    Raises ReportRefused: the call is reported without a card, no turn waits for it, the turn's headers are too large,
    or the request edge is missing or differs.
    """
    if records.earlier is None and records.reported_inbox_id is not None:
        raise ReportRefused("already_reported", f"row {records.reported_inbox_id!r} reports the call without a card")
    target, edge = records.target, records.request_edge
    if target is None:
        raise ReportRefused("stale_turn", f"no turn {identity.agent_turn_id!r} of the agent waits for this tool call")
    if target.oversized:
        raise ReportRefused("turn_headers", "the headers of the turn that waits are larger than any message's")
    depth = _depth(target.context_headers)
    if depth is None or depth >= MAX_DEPTH:
        raise ReportRefused("recursion_depth", f"the turn's recursion depth is no number below {MAX_DEPTH}")
    if edge is None:
        raise ReportRefused("no_request_edge", "the call has no request edge")
    if edge.recursion_depth != depth:
        raise ReportRefused(
            "depth_mismatch", f"the turn's recursion depth {depth} is not the request edge's {edge.recursion_depth}"
        )
    return Acceptance(target, edge, depth)


def _depth(headers: Mapping[str, Any]) -> int | None:
    value = str(headers.get(header.DEPTH, "0"))
    return int(value) if value.isascii() and value.isdigit() and len(value) <= len(str(MAX_DEPTH)) else None


def trace_link(identity: CallIdentity, target: TargetRecord) -> TraceLink:
    """The report belongs to the waiting turn's trace; an inbound span of another trace is a link."""
    inbound, own = identity.trace, _row_trace(target)
    if inbound is not None and (own is None or inbound.trace_id == own.trace_id):
        return TraceLink(inbound, identity.tracestate, None)
    return TraceLink(own or new_root(), _text(target.context_headers.get(header.TRACESTATE)), inbound)


def _row_trace(target: TargetRecord) -> SpanContext | None:
    try:
        return parse_traceparent(str(target.context_headers.get(header.TRACEPARENT, "")))
    except ValueError:
        return None


def build_report(
    *,
    actor_id: str,
    identity: CallIdentity,
    acceptance: Acceptance,
    span: SpanContext,
    tracestate: str | None,
    card_id: str,
    card_content: Mapping[str, Any],
) -> Report:
    """Everything that the report writes for a result card, in the kernel's own spelling."""
    target = acceptance.target
    context = _context_headers(identity, acceptance)
    inbox_id = new_id("inbox_")
    return Report(
        inbox_id=inbox_id,
        edge_id=new_id("edge_"),
        project_id=identity.project_id,
        channel_id=target.channel_id,
        agent_id=identity.agent_id,
        agent_turn_id=target.agent_turn_id,
        turn_epoch=target.turn_epoch,
        tool_call_id=identity.tool_call_id,
        actor_id=actor_id,
        depth=acceptance.depth,
        trace_id=span.trace_id,
        parent_step_id=context.get(header.PARENT_STEP),
        context_headers=context | _trace_headers(span, tracestate),
        payload={
            "after_execution": card_content["after_execution"],
            "status": card_content["status"],
            "tool_result_card_id": card_id,
        },
        edge_metadata={
            "message_type": "tool_result",
            "inbox_id": inbox_id,
            "recursion_depth": acceptance.depth,
            "cg_ctx": _edge_context(context, target.turn_epoch, acceptance.depth, span.trace_id),
        },
        target_inbox_id=target.inbox_id,
        request_edge_id=acceptance.edge.edge_id,
    )


def _context_headers(identity: CallIdentity, acceptance: Acceptance) -> dict[str, str]:
    """The target's headers in full topology: every CG-* header that has a value."""
    target = acceptance.target
    known = {name: str(target.context_headers.get(name) or "") for name in header.TOPOLOGY} | {
        header.PROJECT: identity.project_id,
        header.CHANNEL: target.channel_id,
        header.AGENT: identity.agent_id,
        header.TURN: target.agent_turn_id,
        header.EPOCH: str(target.turn_epoch),
        header.TOOL_CALL: identity.tool_call_id,
        header.DEPTH: str(acceptance.depth),
    }
    return {name: value for name, value in known.items() if value}


def _trace_headers(span: SpanContext, tracestate: str | None) -> dict[str, str]:
    headers = {header.TRACEPARENT: span.traceparent()}
    return headers | {header.TRACESTATE: tracestate} if tracestate else headers


def _edge_context(context: Mapping[str, str], epoch: int, depth: int, trace_id: str) -> dict[str, Any]:
    return {
        "project_id": context[header.PROJECT],
        "channel_id": context[header.CHANNEL],
        "agent_id": context[header.AGENT],
        "agent_turn_id": context[header.TURN],
        "turn_epoch": epoch,
        "step_id": context.get(header.STEP),
        "tool_call_id": context[header.TOOL_CALL],
        "trace_id": trace_id,
        "recursion_depth": depth,
        "parent_agent_id": context.get(header.PARENT_AGENT),
        "parent_agent_turn_id": context.get(header.PARENT_TURN),
        "parent_step_id": context.get(header.PARENT_STEP),
    }


DOORBELL_CONTEXT = (header.PROJECT, header.CHANNEL, header.AGENT, header.TURN, header.EPOCH)


def doorbell_headers(context_headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a wakeup: project, channel, agent, turn, epoch, trace, and nothing of the step."""
    wanted = (*DOORBELL_CONTEXT, header.TRACEPARENT, header.TRACESTATE)
    return {name: str(context_headers[name]) for name in wanted if context_headers.get(name)}


def reportable_content(content: Mapping[str, Any]) -> bool:
    """Whether a stored tool.result can be reported as it is (readers enforce the same)."""
    return content.get("status") in STATUSES and content.get("after_execution") in AFTER_EXECUTION


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
