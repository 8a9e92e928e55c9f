"""Who calls, by subject, headers and tool.call card of a command (protocol section 2).

`ClaimedIdentity` is what the command says. `identify` completes it from the card, and returns a `CallIdentity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.headers import (
    AGENT,
    CHANNEL,
    DEPTH,
    EPOCH,
    PARENT_STEP,
    PROJECT,
    STEP,
    TOOL_CALL,
    TRACESTATE,
    TURN,
    HeaderReader,
)
from openapi_tool.protocol.ids import MAX_ID_BYTES, is_storable_id
from openapi_tool.protocol.records import CardRecord, call_metadata
from openapi_tool.protocol.subjects import CommandSubject
from openapi_tool.protocol.tracing import SpanContext

CONTROL_FIELDS = frozenset(
    {
        "project_id",
        "channel_id",
        "channel",
        "agent_id",
        "agent_turn_id",
        "turn_epoch",
        "step_id",
        "tool_call_id",
        "trace_id",
        "traceparent",
        "tracestate",
        "parent_agent_id",
        "parent_agent_turn_id",
        "parent_step_id",
        "parent_traceparent",
        "recursion_depth",
    }
)
"""Names under which a body might give ids of the call or its caller. In v1r4 they are forbidden there."""


@dataclass(frozen=True, slots=True)
class ClaimedIdentity:
    """Identity as a command claims it, unverified; None where the command names no valid id.

    `trace` is the sender's span, `problems` are the ways in which the headers break the protocol.
    """

    project_id: str
    channel_id: str
    agent_id: str | None
    agent_turn_id: str | None
    turn_epoch: int | None
    step_id: str | None
    tool_call_id: str | None
    parent_step_id: str | None
    recursion_depth: int | None
    trace: SpanContext | None
    tracestate: str | None
    problems: tuple[str, ...]
    context_box_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """Who calls: project and agent, to which sessions, cursors and stored texts belong, and the ids of the call.

    A call of the kernel has channel, turn and tool call id. Calls that arrive by another door, such as a gateway, have
    fewer ids; the others are empty or None. `trace` is the sender's span, `trace_id` that of the call.
    """

    project_id: str
    agent_id: str
    channel_id: str = ""
    agent_turn_id: str = ""
    turn_epoch: int = 0
    tool_call_id: str = ""
    step_id: str | None = None
    parent_step_id: str | None = None
    trace_id: str | None = None
    trace: SpanContext | None = None
    tracestate: str | None = None
    recursion_depth: int | None = None
    context_box_id: str | None = None


def read_identity(subject: CommandSubject, headers: Mapping[str, str]) -> ClaimedIdentity:
    """Return the identity that subject and headers claim, with all problems of the headers."""
    reader = HeaderReader(headers)
    reader.must_equal(PROJECT, subject.project_id)
    reader.must_equal(CHANNEL, subject.channel_id)
    return ClaimedIdentity(
        project_id=subject.project_id,
        channel_id=subject.channel_id,
        agent_id=reader.required(AGENT, reader.id),
        agent_turn_id=reader.id(TURN),
        turn_epoch=reader.number(EPOCH),
        step_id=reader.id(STEP),
        tool_call_id=reader.required(TOOL_CALL, reader.text),
        parent_step_id=reader.id(PARENT_STEP),
        recursion_depth=reader.number(DEPTH),
        trace=reader.trace(),
        tracestate=reader.text(TRACESTATE),
        problems=tuple(reader.problems),
    )


def identify(claimed: ClaimedIdentity, card: CardRecord | None) -> CallIdentity:
    """Complete a command's identity from its tool.call card (protocol section 2).

    Raises Unanswerable if agent, turn or tool call id stay unknown.
    """
    metadata = call_metadata(card, claimed.tool_call_id)
    agent_id = claimed.agent_id or _id(metadata.get("author_id"))
    turn_id = claimed.agent_turn_id or _id(metadata.get("agent_turn_id"))
    call_id = claimed.tool_call_id or (card.tool_call_id if card and metadata else None)
    if agent_id is None or turn_id is None or not call_id:
        raise unidentified()
    return CallIdentity(
        project_id=claimed.project_id,
        channel_id=claimed.channel_id,
        agent_id=agent_id,
        agent_turn_id=turn_id,
        turn_epoch=claimed.turn_epoch or 0,
        tool_call_id=call_id,
        step_id=claimed.step_id or _id(metadata.get("step_id")),
        parent_step_id=claimed.parent_step_id or _id(metadata.get("parent_step_id")),
        trace_id=claimed.trace.trace_id if claimed.trace else _id(metadata.get("trace_id")),
        trace=claimed.trace,
        tracestate=claimed.tracestate,
        recursion_depth=claimed.recursion_depth,
        context_box_id=claimed.context_box_id,
    )


def unidentified() -> Unanswerable:
    """Return the error for a command whose caller stays unknown."""
    return Unanswerable(
        "no_identity",
        f"neither command nor tool.call card name agent, turn (at most {MAX_ID_BYTES} bytes each) and tool call",
    )


def _id(value: object) -> str | None:
    """Return a card's value if it is a valid id, else None."""
    return value if isinstance(value, str) and value and is_storable_id(value) else None
