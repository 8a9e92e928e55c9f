"""Protocol v1r3: commands, reports and doorbells (protocol sections 2 and 6).

In this version the identity of a call is in the command's body. Inbox rows have neither turn nor headers, so no row
shows which turn waits for a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson

from openapi_tool.protocol import headers as header
from openapi_tool.protocol.cards import new_id
from openapi_tool.protocol.command import Command, CommandBody, Delivery, command_of, read_body, valid_name
from openapi_tool.protocol.errors import ReportRefused
from openapi_tool.protocol.headers import MAX_EPOCH, HeaderReader
from openapi_tool.protocol.identity import CallIdentity, ClaimedIdentity
from openapi_tool.protocol.ids import MAX_ID_BYTES
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object, loads, storable_text
from openapi_tool.protocol.records import CallRecords, ResultContent, WaitingTurnRecord
from openapi_tool.protocol.report import MAX_DEPTH, Acceptance, Doorbell, Report, refuse_reported, trace_headers
from openapi_tool.protocol.subjects import CommandSubject, doorbell_subject, parse_command_subject
from openapi_tool.protocol.tracing import SpanContext

# Headers of a command that its doorbell repeats. It must not repeat others: `Nats-Msg-Id`, for example, could make the
# server drop the doorbell as a duplicate.
_DOORBELL_HEADERS = (header.DEPTH, header.TRACEPARENT, header.TRACESTATE)


class V1r3:
    """Implements `Dialect` (`dialect.py`) for v1r3; `actor_id` is the author of reports."""

    version = "v1r3"
    namespace: ClassVar[str] = "v1r3"

    def __init__(self, actor_id: str) -> None:
        self._actor_id = actor_id

    def decode(self, delivery: Delivery) -> Command:
        """Decode a delivery. Raises Unanswerable only for a subject that is no tool command's."""
        subject = parse_command_subject(delivery.subject)
        body = read_body(delivery)
        return command_of(subject, _identity_in_body(subject, delivery.headers, body), body)

    @staticmethod
    def claimed_identity(subject: CommandSubject, headers: Mapping[str, str], data: bytes) -> ClaimedIdentity:
        """Return the ids in subject, headers and body, unverified. Raises nothing."""
        return _identity_in_body(subject, headers, CommandBody(_fields(data)))

    def accept(self, identity: CallIdentity, records: CallRecords) -> Acceptance:
        """Return what the report needs. Raises ReportRefused.

        A call is refused if its report exists but not its result card, or if its recursion depth is at the limit. The
        depth is the request edge's, else the command's, else 0.
        """
        refuse_reported(records)
        depth = records.request_edge.recursion_depth if records.request_edge else None
        if depth is None:
            depth = identity.recursion_depth or 0
        if not 0 <= depth < MAX_DEPTH:
            raise ReportRefused("recursion_depth", f"the call's recursion depth {depth} is no number below {MAX_DEPTH}")
        turn = WaitingTurnRecord(
            inbox_id="",
            message_type="turn",
            channel_id=identity.channel_id,
            agent_turn_id=identity.agent_turn_id,
            turn_epoch=identity.turn_epoch,
            context_headers={},
        )
        return Acceptance(identity, records.worker_target, turn, request_edge_id=new_id("edge_"), depth=depth)

    def report(
        self, acceptance: Acceptance, span: SpanContext, tracestate: str | None, card_id: str, content: ResultContent
    ) -> Report:
        """Build the report of a result card, with its doorbell."""
        identity, depth = acceptance.identity, acceptance.depth
        inbox_id = new_id("inbox_")
        headers = {
            header.CHANNEL: identity.channel_id,
            header.AGENT: identity.agent_id,
            header.DEPTH: str(depth),
            **trace_headers(span, tracestate),
        }
        payload: JsonObject = {
            "tool_call_id": identity.tool_call_id,
            "agent_turn_id": identity.agent_turn_id,
            "turn_epoch": identity.turn_epoch,
            "agent_id": identity.agent_id,
            "after_execution": content["after_execution"],
            "status": content["status"],
            "tool_result_card_id": card_id,
        }
        if identity.step_id:
            payload["step_id"] = identity.step_id
        return Report(
            acceptance,
            self._actor_id,
            inbox_id,
            edge_id=new_id("edge_"),
            trace_id=span.trace_id,
            parent_step_id=identity.step_id,
            context_headers=headers,
            payload=payload,
            edge_metadata={"message_type": "tool_result", "inbox_id": inbox_id, "recursion_depth": depth},
            doorbell=self.doorbell(identity.project_id, acceptance.worker_target, headers),
        )

    def doorbell(
        self, project_id: str, worker_target: str | None, context_headers: Mapping[str, JsonValue]
    ) -> Doorbell | None:
        """Build a doorbell whose body names the agent; its headers are the recursion depth and the report's trace."""
        if worker_target is None:
            return None
        try:
            subject = doorbell_subject(self.version, project_id, str(context_headers[header.CHANNEL]), worker_target)
        except ValueError:  # an invalid token
            return None
        headers = {
            name: str(context_headers[name]) for name in _DOORBELL_HEADERS if context_headers.get(name) is not None
        }
        return Doorbell(subject, headers, orjson.dumps({"agent_id": context_headers[header.AGENT]}))


def _identity_in_body(subject: CommandSubject, headers: Mapping[str, str], body: CommandBody) -> ClaimedIdentity:
    """Return the identity that body, subject and headers claim; add problems with its fields to `body.problems`.

    A step id in the body is ignored, as it is not that of the call: that one is in the tool.call card only.
    """
    reader = HeaderReader(headers)
    return ClaimedIdentity(
        project_id=subject.project_id,
        channel_id=subject.channel_id,
        agent_id=_id(body, "agent_id"),
        agent_turn_id=_id(body, "agent_turn_id"),
        turn_epoch=_epoch(body),
        step_id=None,
        tool_call_id=_tool_call_id(body),
        parent_step_id=None,
        recursion_depth=reader.number(header.DEPTH),
        trace=reader.trace(),
        tracestate=reader.text(header.TRACESTATE),
        problems=tuple(reader.problems),
        context_box_id=valid_name(body.fields.get("context_box_id")),
    )


def _fields(data: bytes) -> JsonObject:
    """Return the fields of a body, none if it cannot be parsed."""
    try:
        fields = loads(data)
    except ValueError:  # not JSON, or a truncated body
        return {}
    return as_object(fields)


def _id(body: CommandBody, name: str) -> str | None:
    value = valid_name(body.fields.get(name))
    if value is None or not _is_storable(body.fields[name]):
        body.problems.append(f"body field {name} must be a non-empty string of at most {MAX_ID_BYTES} bytes")
        return None
    return value


def _tool_call_id(body: CommandBody) -> str | None:
    value = body.fields.get("tool_call_id")
    if isinstance(value, str) and value.strip() and _is_storable(value):
        return value.strip()
    body.problems.append("body field tool_call_id must be a non-empty string")
    return None


def _is_storable(value: object) -> bool:
    """Return whether a value is a text that the database can store as it is.

    An id is never changed to make it storable: the changed id might be that of another call.
    """
    return isinstance(value, str) and storable_text(value) == value


def _epoch(body: CommandBody) -> int | None:
    value = body.fields.get("turn_epoch")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_EPOCH:
        return value
    body.problems.append("body field turn_epoch must be an integer >= 0")
    return None
