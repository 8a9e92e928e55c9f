"""Cards: reading a tool.call, building a tool.result (section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import uuid_utils

from openapi_tool.protocol.command import AfterExecution, Command
from openapi_tool.protocol.errors import BadRequest, NotFound, Status, Unanswerable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import CardRecord

TOOL_CALL = "tool.call"
TOOL_RESULT = "tool.result"
ARTIFACT = "tool.artifact"
LINEAGE = ("step_id", "trace_id", "parent_step_id")
MAX_CONTENT_BYTES = 256 * 1024
MAX_ARGUMENTS = 1_000
MAX_ARGUMENT_DEPTH = 20


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asked for, as the tool.call card holds it.

    `fixed_applied` and `defaults_applied` are the argument names that the worker itself put there.
    """

    arguments: Mapping[str, Any]
    defaults_applied: frozenset[str]
    fixed_applied: frozenset[str]


@dataclass(frozen=True, slots=True)
class Card:
    """A card to be saved; `content` carries its class under `__type__`."""

    card_id: str
    tenant_id: str
    tool_call_id: str | None
    content: dict[str, Any]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptText:
    """The whole text of a result that was cut: `content` is the JSON of its TextContent, made piece by piece."""

    content: bytearray
    chars: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ArtifactCard:
    """A card with a kept text; `content` is JSON already, since it may be megabytes; it expires `ttl_s` seconds on."""

    card_id: str
    tenant_id: str
    content: bytearray
    metadata: dict[str, Any]
    ttl_s: int


def new_id(prefix: str = "") -> str:
    """`prefix` and a time-ordered UUID (v7) in hex."""
    return prefix + uuid_utils.uuid7().hex


def identify(command: Command, card: CardRecord | None) -> CallIdentity:
    """Complete the command's identity from its tool.call card, never from its body.

    Raises Unanswerable when agent, turn or tool call id stay unknown (section 2).
    """
    claimed = command.identity
    metadata = call_metadata(card, claimed.tool_call_id)
    agent_id = claimed.agent_id or _text(metadata.get("author_id"))
    turn_id = claimed.agent_turn_id or _text(metadata.get("agent_turn_id"))
    call_id = claimed.tool_call_id or (card.tool_call_id if card and metadata else None)
    if agent_id is None or turn_id is None or not call_id:
        raise Unanswerable("no_identity", "neither headers nor tool.call card name agent, turn and tool call")
    return CallIdentity(
        project_id=claimed.project_id,
        channel_id=claimed.channel_id,
        agent_id=agent_id,
        agent_turn_id=turn_id,
        turn_epoch=claimed.turn_epoch or 0,
        tool_call_id=call_id,
        step_id=claimed.step_id or _text(metadata.get("step_id")),
        parent_step_id=claimed.parent_step_id or _text(metadata.get("parent_step_id")),
        trace_id=claimed.trace.trace_id if claimed.trace else _text(metadata.get("trace_id")),
        trace=claimed.trace,
        tracestate=claimed.tracestate,
    )


def call_metadata(card: CardRecord | None, tool_call_id: str | None) -> Mapping[str, Any]:
    """The metadata of the call's own tool.call card; empty when `card` is not that card."""
    if card is None or card.metadata.get("type") != TOOL_CALL:
        return {}
    if tool_call_id and card.tool_call_id and card.tool_call_id != tool_call_id:
        return {}
    return card.metadata


def read_tool_call(card: CardRecord | None, tool_call_id: str) -> ToolCall:
    """Read the call out of its card. Raises NotFound or BadRequest, naming what is wrong."""
    if card is None:
        raise NotFound("The tool call's card does not exist in this project; the calling system must save it first.")
    content, metadata = card.content, card.metadata
    if card.oversized:
        raise BadRequest(f"The tool call's card is larger than {MAX_CONTENT_BYTES:,} bytes; call again with less.")
    if metadata.get("type") != TOOL_CALL:
        raise BadRequest("tool_call_card_id points at a card whose type is not tool.call.")
    if not isinstance(content, dict) or content.get("__type__") != "ToolCallContent":
        raise BadRequest("The tool.call card does not hold ToolCallContent.")
    if card.tool_call_id and card.tool_call_id != tool_call_id:
        raise BadRequest("The tool.call card belongs to another tool call than CG-Tool-Call-Id names.")
    return ToolCall(
        arguments=_arguments(content.get("arguments")),
        defaults_applied=_names(metadata.get("tool_args_defaults_applied")),
        fixed_applied=_names(metadata.get("tool_args_fixed_applied")),
    )


def _arguments(arguments: object) -> Mapping[str, Any]:
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise BadRequest("The tool call's arguments must be a JSON object.")
    if arguments.keys() == {"_raw"}:
        raise BadRequest("The tool call's arguments were not a JSON object; send them again as one valid JSON object.")
    _check_shape(arguments)
    return arguments


def _check_shape(arguments: Mapping[str, Any]) -> None:
    """Arguments that nobody sends on purpose end here, before anything walks through them."""
    level: list[Any] = [arguments]
    seen = 0
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [item for value in level for item in _members(value)]
        seen += len(level)
        if not level:
            return
        if seen > MAX_ARGUMENTS:
            raise BadRequest(f"The tool call has more than {MAX_ARGUMENTS:,} values; call again with fewer.")
    raise BadRequest(f"The tool call's arguments are nested deeper than {MAX_ARGUMENT_DEPTH} levels; flatten them.")


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def result_card(
    *,
    actor_id: str,
    function_name: str,
    identity: CallIdentity,
    call_card: CardRecord | None,
    status: Status,
    after_execution: AfterExecution,
    result: Any,
    error: Mapping[str, Any] | None,
    tool_output: Mapping[str, Any] | None,
) -> Card:
    """Build the tool.result card: exactly the fields that readers accept, lineage copied verbatim."""
    metadata = {
        "type": TOOL_RESULT,
        "role": "tool",
        "project_id": identity.project_id,
        "author_id": actor_id,
        "function_name": function_name,
        "agent_turn_id": identity.agent_turn_id,
        "tool_call_id": identity.tool_call_id,
        "created_at": _now(),
        **_lineage(identity, call_card),
    }
    if tool_output is not None:
        metadata["tool_output"] = dict(tool_output)
    content = {
        "__type__": "ToolResultContent",
        "status": status,
        "after_execution": after_execution,
        "result": result,
        "error": None if error is None else dict(error),
    }
    return Card(new_id(), identity.project_id, identity.tool_call_id, content, metadata)


def artifact_card(
    actor_id: str, identity: CallIdentity, call_card: CardRecord | None, kept: KeptText, ttl_s: int
) -> ArtifactCard:
    """A card with the whole text of a result that was cut, of the calling agent's (tool-design section 3).

    Its column `tool_call_id` stays empty: results are found by that.
    """
    metadata = {
        "type": ARTIFACT,
        "project_id": identity.project_id,
        "agent_id": identity.agent_id,
        "author_id": actor_id,
        "agent_turn_id": identity.agent_turn_id,
        "tool_call_id": identity.tool_call_id,
        "created_at": _now(),
        "chars": kept.chars,
        "sha256": kept.sha256,
        **_lineage(identity, call_card),
    }
    return ArtifactCard(new_id(), identity.project_id, kept.content, metadata, ttl_s)


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _lineage(identity: CallIdentity, call_card: CardRecord | None) -> dict[str, Any]:
    metadata = call_metadata(call_card, identity.tool_call_id)
    lineage = {name: metadata[name] for name in LINEAGE if name in metadata}
    if not lineage.get("step_id") and identity.step_id:
        lineage["step_id"] = identity.step_id
    return lineage


def _names(value: object) -> frozenset[str]:
    return frozenset(name for name in value if isinstance(name, str)) if isinstance(value, list) else frozenset()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
