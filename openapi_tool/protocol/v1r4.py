"""Protocol v1r4: commands, reports and doorbells (protocol sections 2 and 6).

In this version the identity of a call is in the command's headers. An inbox row of the waiting turn has headers, too,
which the report repeats.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from openapi_tool.protocol import headers as header
from openapi_tool.protocol.cards import new_id
from openapi_tool.protocol.command import Command, Delivery, command_of, read_body
from openapi_tool.protocol.errors import ReportRefused
from openapi_tool.protocol.identity import CONTROL_FIELDS, CallIdentity, ClaimedIdentity, read_identity
from openapi_tool.protocol.jsontext import JsonObject, JsonValue
from openapi_tool.protocol.records import CallRecords, ResultContent
from openapi_tool.protocol.report import MAX_DEPTH, Acceptance, Doorbell, Report, refuse_reported, trace_headers
from openapi_tool.protocol.subjects import CommandSubject, doorbell_subject, parse_command_subject
from openapi_tool.protocol.tracing import SpanContext

_DOORBELL_HEADERS = (  # headers of a report that its doorbell repeats; not the step
    header.PROJECT,
    header.CHANNEL,
    header.AGENT,
    header.TURN,
    header.EPOCH,
    header.TRACEPARENT,
    header.TRACESTATE,
)
_SENDER = "openapi-tool"


class V1r4:
    """Implements `Dialect` (`dialect.py`) for v1r4; `actor_id` is the author of reports."""

    version = "v1r4"
    namespace: ClassVar[str] = ""

    def __init__(self, actor_id: str) -> None:
        self._actor_id = actor_id

    def decode(self, delivery: Delivery) -> Command:
        """Decode a delivery. Raises Unanswerable only for a subject that is no tool command's."""
        subject = parse_command_subject(delivery.subject)
        identity = read_identity(subject, delivery.headers)
        body = read_body(delivery)
        control = sorted(CONTROL_FIELDS & body.fields.keys())
        if control:
            body.problems.append(
                f"control fields are forbidden in the body ({', '.join(control)}): they belong in CG-* headers"
            )
        return command_of(subject, identity, body)

    @staticmethod
    def claimed_identity(subject: CommandSubject, headers: Mapping[str, str], data: bytes) -> ClaimedIdentity:  # noqa: ARG004 - the body has no ids
        """Return the ids in subject and headers, unverified. Raises nothing."""
        return read_identity(subject, headers)

    def accept(self, identity: CallIdentity, records: CallRecords) -> Acceptance:
        """Return what the report needs. Raises ReportRefused.

        A call is refused if no turn waits for it, if its report exists but not its result card, or if turn and request
        edge do not have the same recursion depth, below the limit.
        """
        refuse_reported(records)
        turn, edge = records.waiting_turn, records.request_edge
        if turn is None:
            raise ReportRefused(
                "stale_turn", f"no turn {identity.agent_turn_id!r} of the agent waits for this tool call"
            )
        if turn.oversized:
            raise ReportRefused("turn_headers", "the headers of the turn that waits are larger than any message's")
        depth = _depth(turn.context_headers)
        if depth is None or depth >= MAX_DEPTH:
            raise ReportRefused("recursion_depth", f"the turn's recursion depth is no number below {MAX_DEPTH}")
        if edge is None:
            raise ReportRefused("no_request_edge", "the call has no request edge")
        if edge.recursion_depth != depth:
            raise ReportRefused(
                "depth_mismatch", f"the turn's recursion depth {depth} is not the request edge's {edge.recursion_depth}"
            )
        return Acceptance(identity, records.worker_target, turn, edge.edge_id, depth)

    def report(
        self, acceptance: Acceptance, span: SpanContext, tracestate: str | None, card_id: str, content: ResultContent
    ) -> Report:
        """Build the report of a result card, with its doorbell."""
        inbox_id = new_id("inbox_")
        context = _topology(acceptance)
        headers = context | trace_headers(span, tracestate)
        return Report(
            acceptance,
            self._actor_id,
            inbox_id,
            edge_id=new_id("edge_"),
            trace_id=span.trace_id,
            parent_step_id=context.get(header.PARENT_STEP),
            context_headers=headers,
            payload={
                "after_execution": content["after_execution"],
                "status": content["status"],
                "tool_result_card_id": card_id,
            },
            edge_metadata={
                "message_type": "tool_result",
                "inbox_id": inbox_id,
                "recursion_depth": acceptance.depth,
                "cg_ctx": _edge_context(context, acceptance, span.trace_id),
            },
            doorbell=self.doorbell(context[header.PROJECT], acceptance.worker_target, headers),
        )

    def doorbell(
        self, project_id: str, worker_target: str | None, context_headers: Mapping[str, JsonValue]
    ) -> Doorbell | None:
        """Build the doorbell from the headers of a report's row; None if no worker can be addressed."""
        headers = {name: str(context_headers[name]) for name in _DOORBELL_HEADERS if context_headers.get(name)}
        if worker_target is None or header.CHANNEL not in headers:
            return None
        try:
            subject = doorbell_subject(self.version, project_id, headers[header.CHANNEL], worker_target)
        except ValueError:  # an invalid token
            return None
        message_headers = {
            "CG-Timestamp": str(time.time_ns() // 1_000_000),
            "CG-Version": self.version,
            "CG-Msg-Type": "dict",
            "CG-Sender": _SENDER,
        }
        return Doorbell(subject, headers | message_headers, b"{}")


def _depth(headers: Mapping[str, JsonValue]) -> int | None:
    """Return the recursion depth in the headers of a turn, 0 if they have none; None if it is no small number."""
    value = str(headers.get(header.DEPTH, "0"))
    is_number = value.isascii() and value.isdigit() and len(value) <= len(str(MAX_DEPTH))
    return int(value) if is_number else None


def _topology(acceptance: Acceptance) -> dict[str, str]:
    """Return the headers that identify the call: those of the waiting turn's row, corrected by what is known of it."""
    identity, turn = acceptance.identity, acceptance.waiting_turn
    known = {name: str(turn.context_headers.get(name) or "") for name in header.TOPOLOGY} | {
        header.PROJECT: identity.project_id,
        header.CHANNEL: turn.channel_id,
        header.AGENT: identity.agent_id,
        header.TURN: turn.agent_turn_id,
        header.EPOCH: str(turn.turn_epoch),
        header.TOOL_CALL: identity.tool_call_id,
        header.DEPTH: str(acceptance.depth),
    }
    return {name: value for name, value in known.items() if value}


def _edge_context(context: Mapping[str, str], acceptance: Acceptance, trace_id: str) -> JsonObject:
    """Return the metadata `cg_ctx` of a response edge: the same ids as in the headers, by the kernel's field names."""
    return {
        "project_id": context[header.PROJECT],
        "channel_id": context[header.CHANNEL],
        "agent_id": context[header.AGENT],
        "agent_turn_id": context[header.TURN],
        "turn_epoch": acceptance.waiting_turn.turn_epoch,
        "step_id": context.get(header.STEP),
        "tool_call_id": context[header.TOOL_CALL],
        "trace_id": trace_id,
        "recursion_depth": acceptance.depth,
        "parent_agent_id": context.get(header.PARENT_AGENT),
        "parent_agent_turn_id": context.get(header.PARENT_TURN),
        "parent_step_id": context.get(header.PARENT_STEP),
    }
