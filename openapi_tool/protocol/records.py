"""Rows of one call in the kernel's database, as they are read (protocol sections 3, 4, 6).

- A *card* is a JSON document that never changes: the arguments of a call, or its result.
- A *turn* is one run of an agent. It waits for the results of the tool calls that it made in its last *step*.
- An *inbox row* is a message to an agent, for example that the result of a call is in a card.
- An *edge* records for audits who sent what to whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.protocol.result_objects import ArtifactObject

TOOL_CALL = "tool.call"
UI_ACTION = "ui_action"


@dataclass(frozen=True, slots=True)
class CardRecord:
    """Card of any type that is not deleted. Of an `oversized` card the large column is not read."""

    card_id: str
    tool_call_id: str | None
    content: JsonValue
    metadata: Mapping[str, JsonValue]
    oversized: bool = False


@dataclass(frozen=True, slots=True)
class DefinitionRecord:
    """Row of resource.tools, a stored definition.

    If `oversized`, its JSON is not read. If `unreadable`, the JSON parser refuses a column, which is then None.
    """

    tool_name: str
    after_execution: JsonValue
    parameters: JsonValue
    options: JsonValue
    oversized: bool = False
    unreadable: bool = False


@dataclass(frozen=True, slots=True)
class WaitingTurnRecord:
    """Inbox row of the turn that waits for the call's result.

    It is the row that the kernel wrote with the command (the anchor), else the turn's newest row. If `oversized`, its
    headers are not read.
    """

    inbox_id: str
    message_type: str
    channel_id: str
    agent_turn_id: str
    turn_epoch: int
    context_headers: Mapping[str, JsonValue]
    oversized: bool = False

    @property
    def suspends(self) -> bool:
        """Return whether a worker suspends the turn (protocol section 7)."""
        return self.message_type != UI_ACTION and self.turn_epoch > 0


@dataclass(frozen=True, slots=True)
class RequestEdgeRecord:
    """Oldest request edge of the call, with which the kernel recorded it; in v1r3 its depth may be null."""

    edge_id: str
    recursion_depth: int | None


class ResultContent(TypedDict):
    """Fields of a result card that its report repeats; not checked if another process wrote the card."""

    status: str | None
    after_execution: str | None


@dataclass(frozen=True, slots=True)
class EarlierResult:
    """Existing tool.result card of the call, written by `author_id`.

    - `report_headers`, `report_status`: of the inbox row that reports it; None without a row.
    - `is_of_this_call`: False if it is of another call whose id has the same MD5. The unique index allows only one
      result of both.
    """

    card_id: str
    author_id: str | None
    is_deleted: bool
    content: ResultContent
    report_headers: Mapping[str, JsonValue] | None
    report_status: str | None = None
    is_of_this_call: bool = True


StoredFields = tuple[int, int, int, int | None, str, str, str]
"""One item of a stored text: the fields of `StoredItem` (tools/stored_items.py) in this order: `start`, `shown`, `end`,
`block_start`, `title`, `label`, `after`.

In the card it is a JSON array, which in old cards lacks the last ones.
"""


@dataclass(frozen=True, slots=True)
class Artifact:
    """Part (`text`) of a stored text; `chars`, `sha256` (hex) and `items` are of the whole text."""

    card_id: str
    chars: int
    sha256: str
    text: str
    items: Sequence[StoredFields] | None = None

    @property
    def reference(self) -> ArtifactObject:
        """The `artifact_ref` of a result."""
        return {"card_id": self.card_id, "chars": self.chars, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class CallRecords:
    """Rows of a call; None where there is no such row.

    - `card`: the tool.call card.
    - `worker_target`: where a doorbell wakes the calling agent's worker; None if the agent is not in the roster.
    - `earlier`: a result that the call has already.
    - `reported_inbox_id`: the inbox row of that result, which may exist without its card.
    """

    card: CardRecord | None
    definition: DefinitionRecord | None
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
