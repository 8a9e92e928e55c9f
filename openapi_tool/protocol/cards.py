"""Cards of a call: read its tool.call, build its tool.result and its artifact (protocol section 3).

A *card* is a JSON document in the kernel's database that never changes. A tool.call card has the arguments of a call, a
tool.result card its result, and an *artifact* card the whole text of a result that is too long for a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import orjson
import uuid_utils

from openapi_tool.protocol.command import AfterExecution
from openapi_tool.protocol.errors import BadRequest, NotFound, Status
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.ids import MAX_ID_BYTES, is_storable_id
from openapi_tool.protocol.jsontext import JsonValue, levels
from openapi_tool.protocol.records import TOOL_CALL, CardRecord, ResultContent, StoredFields, call_metadata
from openapi_tool.protocol.result_objects import ArtifactObject, ErrorObject, ToolOutputObject

TOOL_RESULT = "tool.result"
ARTIFACT = "tool.artifact"
LINEAGE = ("step_id", "trace_id", "parent_step_id")
"""Metadata that result and artifact cards copy from the call's card: where in the agent's run the call was made."""

# Limits of a tool.call card's content, and of the arguments in it.
MAX_CONTENT_BYTES = 256 * 1024
MAX_ARGUMENT_VALUES = 1_000  # values at all levels together
MAX_ARGUMENT_DEPTH = 20  # levels


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a model, with its `arguments` as `checked_arguments` returned them.

    Some of them are not the model's: the kernel's worker has put defaults and fixed values of the definition into the
    card. `defaults_applied` and `fixed_applied` are the names of these.
    """

    arguments: Mapping[str, JsonValue]
    defaults_applied: frozenset[str] = frozenset()
    fixed_applied: frozenset[str] = frozenset()


class ToolResultContent(ResultContent):
    """Content of a tool.result card: the fields that its report repeats, and the others."""

    __type__: Literal["ToolResultContent"]
    result: object
    error: ErrorObject | None


@dataclass(frozen=True, slots=True)
class ResultCard:
    """Tool.result card to be written."""

    card_id: str
    tool_call_id: str | None
    content: ToolResultContent
    metadata: dict[str, object]


@dataclass(frozen=True, slots=True)
class StoredText:
    """Whole text of a truncated result, to be stored as the artifact card `card_id`.

    `content` is the card's content (TextContent) as JSON. `chars` and `sha256` (hex) are of the text. `items` has the
    positions of the text's items.
    """

    card_id: str
    content: bytearray
    chars: int
    sha256: str
    items: tuple[StoredFields, ...] = ()

    @property
    def reference(self) -> ArtifactObject:
        """The `artifact_ref` of a result."""
        return {"card_id": self.card_id, "chars": self.chars, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class ArtifactCard:
    """Artifact card to be written, with the whole text of a result; it expires after `ttl_s` seconds."""

    card_id: str
    tenant_id: str
    content: bytearray
    metadata: dict[str, JsonValue]
    ttl_s: int


def new_id(prefix: str = "") -> str:
    """Return `prefix` and a time-ordered UUID (v7) in hex."""
    return prefix + uuid_utils.uuid7().hex


def read_tool_call(card: CardRecord | None, tool_call_id: str) -> ToolCall:
    """Return the call in the card that the command of `tool_call_id` names. Raises NotFound or BadRequest."""
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
        raise BadRequest("The tool.call card belongs to another tool call than the command names.")
    for name in LINEAGE:
        if not is_storable_id(metadata.get(name)):  # a missing one (None) is storable
            raise BadRequest(f"The tool.call card's {name} is no text of at most {MAX_ID_BYTES} bytes.")
    return ToolCall(
        arguments=checked_arguments(content.get("arguments")),
        defaults_applied=_names(metadata.get("tool_args_defaults_applied")),
        fixed_applied=_names(metadata.get("tool_args_fixed_applied")),
    )


def checked_arguments(arguments: object) -> Mapping[str, JsonValue]:
    """Return a model's arguments, an empty object for null. Raises BadRequest for what is no object in the limits."""
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise BadRequest("The tool call's arguments must be a JSON object.")
    if arguments.keys() == {"_raw"}:  # text that the worker could not parse
        raise BadRequest("The tool call's arguments were not a JSON object; send them again as one valid JSON object.")
    _check_shape(arguments)
    return arguments


def _check_shape(arguments: Mapping[str, JsonValue]) -> None:
    """Raise BadRequest for too many or too deeply nested arguments, before recursive functions process them."""
    count = 0
    for depth, level in enumerate(levels(arguments), start=1):
        count += len(level)
        if count > MAX_ARGUMENT_VALUES:
            raise BadRequest(f"The tool call has more than {MAX_ARGUMENT_VALUES:,} values; call again with fewer.")
        if depth == MAX_ARGUMENT_DEPTH:
            raise BadRequest(
                f"The tool call's arguments are nested deeper than {MAX_ARGUMENT_DEPTH} levels; flatten them."
            )


def result_card(
    *,
    actor_id: str,
    function_name: str,
    identity: CallIdentity,
    call_card: CardRecord | None,
    status: Status,
    after_execution: AfterExecution,
    result: object,
    error: ErrorObject | None,
    tool_output: ToolOutputObject | None,
) -> ResultCard:
    """Return the tool.result card of a call, with exactly the fields that its readers accept."""
    metadata: dict[str, object] = {
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
    content: ToolResultContent = {
        "__type__": "ToolResultContent",
        "status": status,
        "after_execution": after_execution,
        "result": result,
        "error": None if error is None else error.copy(),
    }
    return ResultCard(new_id(), identity.tool_call_id, content, metadata)


def artifact_card(
    actor_id: str, identity: CallIdentity, call_card: CardRecord | None, stored_text: StoredText, ttl_s: int
) -> ArtifactCard:
    """Return the artifact card with the whole text of a result, for the calling agent (tool-design section 3).

    The tool call id is in its metadata only: the column `tool_call_id` stays empty, as results are found by that
    column.
    """
    metadata: dict[str, JsonValue] = {
        "type": ARTIFACT,
        "project_id": identity.project_id,
        "agent_id": identity.agent_id,
        "author_id": actor_id,
        "agent_turn_id": identity.agent_turn_id,
        "tool_call_id": identity.tool_call_id,
        "created_at": _now(),
        "chars": stored_text.chars,
        "sha256": stored_text.sha256,
        "items": [list(item) for item in stored_text.items],
        **_lineage(identity, call_card),
    }
    return ArtifactCard(stored_text.card_id, identity.project_id, stored_text.content, metadata, ttl_s)


def as_model_reads(content: Mapping[str, object]) -> str:
    """Return the text that a worker shows the model of a result card (protocol section 7)."""
    is_success = content.get("status") == "success"
    shown = content.get("result") if is_success else {"error": content.get("error")}
    return shown if isinstance(shown, str) else orjson.dumps(shown).decode()


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _lineage(identity: CallIdentity, call_card: CardRecord | None) -> dict[str, JsonValue]:
    """Return the LINEAGE in the call's card; if that names no step, the step that the command names."""
    metadata = call_metadata(call_card, identity.tool_call_id)
    lineage: dict[str, JsonValue] = {}
    for name in LINEAGE:
        if name in metadata and is_storable_id(metadata[name]):
            lineage[name] = metadata[name]
    if not lineage.get("step_id") and identity.step_id:
        lineage["step_id"] = identity.step_id
    return lineage


def _names(value: object) -> frozenset[str]:
    """Return the texts in a JSON array, none for any other value."""
    if not isinstance(value, list):
        return frozenset()
    return frozenset(name for name in value if isinstance(name, str))
