"""Rows of the kernel's tables for one call (protocol sections 3, 4, 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openapi_tool.frozen import frozen
from openapi_tool.protocol.jsontext import JsonValue

TOOL_CALL = "tool.call"
UI_ACTION = "ui_action"


@frozen
class CardRecord:
    """Live card of the project, of any type; the large column of an `oversized` card is not read."""

    card_id: str
    tool_call_id: str | None
    content: Any
    metadata: Mapping[str, Any]
    oversized: bool = False


@frozen
class DefinitionRecord:
    """Row of resource.tools; `parameters` and `options` as stored.

    They are not read from an `oversized` row. In an `unreadable` row the parser refuses one of them.
    """

    tool_name: str
    after_execution: str | None
    parameters: Any
    options: Any
    oversized: bool = False
    unreadable: bool = False


@frozen
class WaitingTurnRecord:
    """Inbox row of the waiting turn: the call's anchor, else the turn's newest row.

    Headers of an `oversized` row are not read.
    """

    inbox_id: str
    message_type: str
    channel_id: str
    agent_turn_id: str
    turn_epoch: int
    context_headers: Mapping[str, Any]
    oversized: bool = False

    @property
    def suspends(self) -> bool:
        """Return whether a worker suspends the turn: not for a UI action or in epoch 0 (protocol section 7)."""
        return self.message_type != UI_ACTION and self.turn_epoch > 0


@frozen
class RequestEdgeRecord:
    """Oldest request edge of the call; in v1r3 its depth may be null."""

    edge_id: str
    recursion_depth: int | None


@dataclass(frozen=True, slots=True)
class EarlierResult:
    """Existing tool.result card of the call; `report_headers` and `report_status` are those of its inbox row.

    Only `status` and `after_execution` of its `content` are read; a report repeats them. If not `is_of_this_call`, the
    card is of another call whose id has the same MD5: the database's unique index allows only one result for both.
    """

    card_id: str
    author_id: str | None
    is_deleted: bool
    content: Mapping[str, str | None]
    report_headers: Mapping[str, Any] | None
    report_status: str | None = None
    is_of_this_call: bool = True


@dataclass(frozen=True, slots=True)
class Artifact:
    """Part of a stored text; `chars`, `sha256` (hex) and `items` (their offsets) are of the whole text."""

    card_id: str
    chars: int
    sha256: str
    text: str
    items: Sequence[Sequence[Any]] | None = None

    @property
    def reference(self) -> dict[str, str | int]:
        """Return the `artifact_ref` of a result."""
        return {"card_id": self.card_id, "chars": self.chars, "sha256": self.sha256}


@frozen
class CallRecords:
    """Records that one load returns for a call; a missing row is None.

    `reported_inbox_id` is the call's tool_result row, which may exist without its card.
    """

    card: CardRecord | None
    tool: DefinitionRecord | None
    worker_target: str | None
    waiting_turn: WaitingTurnRecord | None
    request_edge: RequestEdgeRecord | None
    earlier: EarlierResult | None
    reported_inbox_id: str | None = None


def call_metadata(card: CardRecord | None, tool_call_id: str | None) -> Mapping[str, JsonValue]:
    """Return the metadata of the call's own tool.call card; empty if `card` is not that card."""
    if card is None or card.metadata.get("type") != TOOL_CALL:
        return {}
    if tool_call_id and card.tool_call_id and card.tool_call_id != tool_call_id:
        return {}
    return card.metadata
