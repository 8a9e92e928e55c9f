"""What the kernel's tables say about one call: rows read, before any decision (sections 3, 4, 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.protocol.command import Command


@dataclass(frozen=True, slots=True)
class CallKey:
    """What a command gives to find its records by; None where the command did not say."""

    project_id: str
    card_id: str | None
    tool_call_id: str | None
    agent_id: str | None
    agent_turn_id: str | None
    turn_epoch: int | None
    tool_name: str | None


@dataclass(frozen=True, slots=True)
class CardRecord:
    """A live card of the project, whatever its type; what makes an `oversized` one large is not read."""

    card_id: str
    tool_call_id: str | None
    content: Any
    metadata: Mapping[str, Any]
    oversized: bool = False


@dataclass(frozen=True, slots=True)
class ToolRecord:
    """A row of resource.tools; `parameters` and `options` as stored.

    Those of an `oversized` row are not read; one of an `unreadable` row is an object that no parser takes.
    """

    tool_name: str
    after_execution: str | None
    parameters: Any
    options: Any
    oversized: bool = False
    unreadable: bool = False


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The inbox row of the turn that waits: the call's anchor, else the turn's newest row.

    The headers of an `oversized` one are not read.
    """

    inbox_id: str
    message_type: str
    channel_id: str
    agent_turn_id: str
    turn_epoch: int
    context_headers: Mapping[str, Any]
    oversized: bool = False


@dataclass(frozen=True, slots=True)
class RequestEdgeRecord:
    """The oldest request edge of the call."""

    edge_id: str
    recursion_depth: int


@dataclass(frozen=True, slots=True)
class EarlierResult:
    """A tool.result card that the call already has; `report_headers` are those of its inbox row.

    Of its `content` only what a report repeats is read: `status` and `after_execution`.
    """

    card_id: str
    author_id: str | None
    live: bool
    content: Mapping[str, str | None]
    report_headers: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Artifact:
    """A kept text: how long it is in characters, its SHA-256 in hex, and the part of it that was asked for."""

    card_id: str
    chars: int
    sha256: str
    text: str


@dataclass(frozen=True, slots=True)
class CallRecords:
    """Everything that one read brings for a call; None where there is no such row.

    `reported_inbox_id` is the call's tool_result row, whether or not its card is there.
    """

    card: CardRecord | None
    tool: ToolRecord | None
    worker_target: str | None
    target: TargetRecord | None
    request_edge: RequestEdgeRecord | None
    earlier: EarlierResult | None
    reported_inbox_id: str | None = None


def call_key(command: Command) -> CallKey:
    """The look-up key of a command."""
    identity = command.identity
    return CallKey(
        project_id=identity.project_id,
        card_id=command.card_id,
        tool_call_id=identity.tool_call_id,
        agent_id=identity.agent_id,
        agent_turn_id=identity.agent_turn_id,
        turn_epoch=identity.turn_epoch,
        tool_name=command.tool_name,
    )
