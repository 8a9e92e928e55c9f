"""Result truncation and pagination: the first part now, the whole text as an artifact card, later parts by cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from cachetools import LRUCache

from openapi_tool.engine.call import Call
from openapi_tool.engine.ports import Artifacts
from openapi_tool.engine.stored_search import StoredSearch, load_part
from openapi_tool.isolation.service import Isolation
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.cards import StoredText
from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.result_objects import ArtifactObject
from openapi_tool.tools.argument_check import ArgumentCheck
from openapi_tool.tools.arguments import CURSOR, cursor_schema, takes_cursor
from openapi_tool.tools.cursors import Cursors, Position
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.frames import Part, framed, without_frames
from openapi_tool.tools.inline_bounds import SMALL
from openapi_tool.tools.output import Item, ToolOutput
from openapi_tool.tools.result import RenderedResult, ShownOutput
from openapi_tool.tools.shown_state import shown_state, without_state
from openapi_tool.tools.stored_text import stored_text
from openapi_tool.tools.text_search import SearchRequest
from openapi_tool.tools.truncation import (
    OPENING_CHARS,
    Place,
    ResultLimit,
    StoredItem,
    Truncated,
    later_part,
    opening_lines,
    stored_items_of,
    truncate,
    uncut_parts,
)
from openapi_tool.tools.wording import counted

_MAX_DEFINITIONS = 1_000
_MAX_CHECK_S = 2.0
_SAMPLE_CURSOR = "a" * 44  # as long as a real one
_ADVICE = {"target_selector": "Read a part with target_selector", "count": "Ask for fewer results with count"}
_UNCONTINUED_FACTOR = 2
"""By this the limits are multiplied if the definition's schema rejects `cursor`: its model can never read the rest."""


class _Fit(NamedTuple):
    """Limit of a text, its parts if it fits uncut, and whether its model could read on if it is cut."""

    limit: ResultLimit
    parts: Sequence[Part] | None
    can_continue: bool


class Pagination:
    """Truncates long results, and returns the next part to the agent that owns the result."""

    def __init__(
        self,
        artifacts: Artifacts,
        cursors: Cursors,
        options: ToolOptions,
        isolation: Isolation | None = None,
    ) -> None:
        self._isolation = isolation or Isolation()
        self._rejects_cursor: LRUCache[bytes, bool] = LRUCache(_MAX_DEFINITIONS)
        self._artifacts = artifacts
        self._cursors = cursors
        self._options = options
        self._search = StoredSearch(artifacts, cursors, self._isolation)

    async def show(
        self, call: Call, definition: ToolDefinition, output: ToolOutput, max_result_tokens: int | None = None
    ) -> ShownOutput:
        """Return what the model is shown of an output, with notes on the cost.

        `max_result_tokens` is the call's own limit.
        """
        if definition.result_format != "text":  # then the model reads the state, too
            limit = self._limit(definition, max_result_tokens)
            output = replace(output, state=await asyncio.to_thread(shown_state, output.state, limit))
        rendered, full_text = await self._rendered(call, definition, output, max_result_tokens)
        return ShownOutput(output, rendered, full_text)

    async def _rendered(
        self, call: Call, definition: ToolDefinition, output: ToolOutput, max_result_tokens: int | None
    ) -> tuple[RenderedResult, StoredText | None]:
        """Return what the model is shown, and the whole text if that is truncated and may be stored."""
        cost = _cost_note(output, self._options.cost_note_tokens) + (call.accounts.note if call.accounts else "")
        fit = await self._fit(call, definition, output, max_result_tokens, len(cost))
        if fit.parts is not None:
            return RenderedResult(framed(fit.parts) + cost), None
        truncated = truncate(output.items, fit.limit)
        shown = framed(truncated.parts) + cost
        missing = _left_out(truncated)
        if not output.may_store:  # the page was read with "do not track"
            why = f"{missing} They are not stored.{_shorter_result_advice(definition)}"
            return RenderedResult(f"{shown}\n\n[{why}]", truncated=True), None
        store = partial(stored_text, output.items, truncated.stored_items)
        full_text = await asyncio.to_thread(store) if truncated.left > SMALL else store()
        if not fit.can_continue:
            why = f"{missing} This tool cannot show them.{_shorter_result_advice(definition)}"
            return RenderedResult(f"{shown}\n\n[{why}]", truncated=True, artifact_ref=full_text.reference), full_text
        return self._with_cursor(call, definition, shown, missing, full_text.reference, truncated.next), full_text

    async def _fit(
        self, call: Call, definition: ToolDefinition, output: ToolOutput, max_result_tokens: int | None, note_chars: int
    ) -> _Fit:
        """Return the text's limit beside notes of `note_chars`, and its parts if it fits uncut.

        The limit is higher if the model could not continue a cut text.
        """
        total = self._limit(definition, max_result_tokens)
        limit = self._for_text(definition, output, total.minus(note_chars))
        parts = uncut_parts(output.items, limit)
        if parts is not None or not takes_cursor(definition) or not await self._schema_rejects_cursor(call, definition):
            return _Fit(limit, parts, can_continue=True)
        max_chars = self._options.max_uncontinued_chars or _UNCONTINUED_FACTOR * self._options.max_result_chars
        higher = ResultLimit(max_chars, _UNCONTINUED_FACTOR * total.tokens)
        limit = self._for_text(definition, output, higher.minus(note_chars))
        return _Fit(limit, uncut_parts(output.items, limit), can_continue=False)

    async def resume(
        self, call: Call, definition: ToolDefinition, cursor: str, max_result_tokens: int | None = None
    ) -> ShownOutput:
        """Return the part at `cursor`. Raises NotFound, Unavailable."""
        position = self._cursors.read(call.identity, cursor)
        load = partial(load_part, self._artifacts, call.identity, position.card_id)
        # The first part has shown the beginning of each item, at most the limit of characters together. `later_part`
        # skips these, so load twice the limit.
        artifact = await load(position.start, 2 * self._options.max_result_chars)
        # First lines of the code block or table that is cut at the cursor.
        opening = "" if position.opening is None else (await load(position.opening, OPENING_CHARS)).text
        stored_items = stored_items_of(artifact.items, artifact.chars)
        place = Place(position.start, position.opening)
        part = later_part(
            stored_items, place, artifact.text, opening_lines(opening), self._limit(definition, max_result_tokens)
        )
        # A text of an earlier version, stored without its items, contains the marks around untrusted text.
        shown = framed(part.parts if artifact.items is not None else [without_frames(old) for old in part.parts])
        missing = f"{counted(_unseen_chars(stored_items, part.next), 'character', 'left')}."
        state = {"card_id": artifact.card_id, "from": position.start, "to": part.end, "chars": artifact.chars}
        output = ToolOutput((Item(caption=shown),), state)
        return ShownOutput(output, self._with_cursor(call, definition, shown, missing, artifact.reference, part.next))

    async def find(
        self,
        call: Call,
        definition: ToolDefinition,
        search: SearchRequest,
        cursor: str,
        max_result_tokens: int | None = None,
    ) -> ShownOutput:
        """Search the text of `cursor`, and return the passages found. Raises NotFound, Unavailable, ToolTimeout."""
        return await self._search.run(call, search, cursor, self._limit(definition, max_result_tokens))

    async def _schema_rejects_cursor(self, call: Call, definition: ToolDefinition) -> bool:
        known = self._rejects_cursor.get(definition.digest) if definition.digest else None
        if known is not None:
            return known
        check = ArgumentCheck(cursor_schema(definition, definition.hidden), {CURSOR: _SAMPLE_CURSOR}, {}, {})
        try:
            checked = await self._isolation.check_arguments(definition, check, call.project, _MAX_CHECK_S)
        except ToolError:  # the result is paid for; show it, with a cursor that this tool may refuse
            return False
        self._rejects_cursor[definition.digest] = rejects = bool(checked.problems or checked.repairs)
        return rejects

    def _limit(self, definition: ToolDefinition, max_result_tokens: int | None) -> ResultLimit:
        """Return the limit of a call: the definition's, else that of the settings; the call may only lower it."""
        tokens = definition.max_result_tokens or self._options.max_result_tokens
        return ResultLimit(self._options.max_result_chars, min(tokens, max_result_tokens or tokens))

    @staticmethod
    def _for_text(definition: ToolDefinition, output: ToolOutput, limit: ResultLimit) -> ResultLimit:
        """Return what the state leaves of a limit, if the model reads the state, too."""
        return limit if definition.result_format == "text" else without_state(limit, output.state)

    def _with_cursor(
        self,
        call: Call,
        definition: ToolDefinition,
        text: str,
        missing: str,
        reference: ArtifactObject,
        place: Place | None,
    ) -> RenderedResult:
        if place is None:
            return RenderedResult(text, artifact_ref=reference)
        position = Position(reference["card_id"], place.start, place.opening)
        cursor = self._cursors.issue(call.identity, position)
        next_call = "call this tool again" if takes_cursor(definition) else "call the tool that reads one page"
        note = f'[{missing} To continue at no cost, {next_call}, with only cursor "{cursor}".]'
        return RenderedResult(f"{text}\n\n{note}", truncated=True, artifact_ref=reference, next_cursor=cursor)


def _cost_note(output: ToolOutput, above: int) -> str:
    tokens = output.usage.tokens
    return f"\n\n[This result cost {tokens:,} tokens.{output.cost_advice}]" if tokens > above else ""


def _shorter_result_advice(definition: ToolDefinition) -> str:
    """Return how a model gets a shorter result, if the definition takes an argument for that."""
    if items := definition.built_in.list_argument:
        return f" Give fewer {items}."
    accepted = definition.model_arguments & definition.built_in.arguments.model_fields.keys()
    return next((f" {way}." for name, way in _ADVICE.items() if name in accepted), "")


def _unseen_chars(stored_items: Sequence[StoredItem], place: Place | None) -> int:
    """Return the number of characters after `place` that the model has not been shown."""
    return sum(max(0, item.end - max(item.shown, place.start)) for item in stored_items) if place else 0


def _left_out(truncated: Truncated) -> str:
    cut_items = sum(shown.left > 0 for shown in truncated.parts)
    unseen = sum(not shown.text for shown in truncated.parts if shown.left)
    where = f" in {counted(cut_items, 'item')}" if len(truncated.stored_items) > 1 else ""
    unseen_items = "item is" if unseen == 1 else f"{unseen} items are"
    note = f" The last {unseen_items} left out altogether." if unseen else ""
    return f"{counted(truncated.left, 'character')}{where} {'is' if truncated.left == 1 else 'are'} left out.{note}"
