"""Results that are too long for a model: the first part at once, every later part for a cursor.

`Pagination.show` cuts a long text, and returns its first part and the whole text, which the door stores as an artifact.
The first part ends with a cursor. If the model gives it in another call, `later_part` returns what follows, and
`search` returns passages of the stored text (`stored_search.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from cachetools import LRUCache

from openapi_tool.engine.call import Call
from openapi_tool.engine.ports import Artifacts
from openapi_tool.engine.stored_search import StoredSearch, load_window
from openapi_tool.isolation.service import Isolation
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.result_objects import ArtifactObject
from openapi_tool.tools.argument_check import ArgumentCheck
from openapi_tool.tools.arguments import CURSOR, cursor_schema, takes_cursor
from openapi_tool.tools.blocks import OPENING_CHARS, opening_lines
from openapi_tool.tools.cursors import Cursors, Position
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.frames import Part, framed, without_old_frames
from openapi_tool.tools.inline_bounds import SMALL
from openapi_tool.tools.later_parts import later_part
from openapi_tool.tools.output import Item, ToolOutput
from openapi_tool.tools.result import RenderedResult, ShownOutput
from openapi_tool.tools.result_limit import ResultLimit
from openapi_tool.tools.shown_state import shown_state, without_state
from openapi_tool.tools.stored_items import Place, StoredItem, stored_items_of
from openapi_tool.tools.stored_text import stored_text
from openapi_tool.tools.text_search import SearchRequest
from openapi_tool.tools.truncation import Truncated, truncate, uncut_parts
from openapi_tool.tools.wording import counted

_MAX_DEFINITIONS = 1_000  # of which it is remembered whether they reject a cursor
_MAX_CHECK_S = 2.0  # for the check whether a definition rejects a cursor
_SAMPLE_CURSOR = "a" * 44  # as long as a real one
_ADVICE = {"target_selector": "Read a part with target_selector", "count": "Ask for fewer results with count"}
"""How a model gets a shorter result, by the argument that it needs for that."""
_UNCONTINUED_FACTOR = 2
"""Factor of the limits for a definition whose schema rejects `cursor`: its model can never read the rest."""


class _Fit(NamedTuple):
    """How a text fits its limit.

    - `uncut`: its parts if it fits as a whole, else None.
    - `can_continue`: whether the model can give a cursor to read the rest of a cut text.
    """

    limit: ResultLimit
    uncut: Sequence[Part] | None
    can_continue: bool


class Pagination:
    """Cuts long results, and returns later parts and passages to the agent that owns the result.

    Every public method takes `max_result_tokens`, the limit that the call itself sets, if any.
    """

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
        self._stored_search = StoredSearch(artifacts, cursors, self._isolation)

    async def show(
        self, call: Call, definition: ToolDefinition, output: ToolOutput, max_result_tokens: int | None = None
    ) -> ShownOutput:
        """Return what the model is shown of an output: all of it or its first part, and notes on the cost."""
        limit = self._limit(definition, max_result_tokens)
        if _shows_state(definition):
            # In a thread, as shortening the texts of a thousand results takes 60 ms.
            output = replace(output, state=await asyncio.to_thread(shown_state, output.state, limit))
        cost = _cost_note(output, self._options.cost_note_tokens)
        if call.accounts:
            cost += call.accounts.note
        fit = await self._fit(call, definition, output, limit, len(cost))
        if fit.uncut is not None:
            return ShownOutput(output, RenderedResult(framed(fit.uncut) + cost))
        return await self._show_first_part(call, definition, output, fit, cost)

    async def _show_first_part(
        self, call: Call, definition: ToolDefinition, output: ToolOutput, fit: _Fit, cost: str
    ) -> ShownOutput:
        """Return the first part of an output that is too long, and the whole text if it may be stored."""
        first = truncate(output.items, fit.limit)
        text = framed(first.parts) + cost
        missing = _missing(first)
        if not output.may_store:  # the page was read with "do not track"
            note = f"[{missing} They are not stored.{_shorter_result_advice(definition)}]"
            return ShownOutput(output, RenderedResult(f"{text}\n\n{note}", truncated=True))
        encode = partial(stored_text, output.items, first.stored_items)
        full_text = await asyncio.to_thread(encode) if first.left_chars > SMALL else encode()
        reference = full_text.reference
        if fit.can_continue:
            rendered = self._with_cursor(call, definition, text, missing, reference, first.next)
        else:
            note = f"[{missing} This tool cannot show them.{_shorter_result_advice(definition)}]"
            rendered = RenderedResult(f"{text}\n\n{note}", truncated=True, artifact_ref=reference)
        return ShownOutput(output, rendered, full_text)

    async def _fit(
        self, call: Call, definition: ToolDefinition, output: ToolOutput, limit: ResultLimit, note_chars: int
    ) -> _Fit:
        """Return how the text of an output fits into `limit`, beside notes of `note_chars` and a state that is shown.

        The limit is higher if the model could not read on in a cut text.
        """
        text_limit = _limit_of_text(definition, output, limit.minus(note_chars))
        uncut = uncut_parts(output.items, text_limit)
        if uncut is not None or not takes_cursor(definition):
            return _Fit(text_limit, uncut, can_continue=True)
        if not await self._schema_rejects_cursor(call, definition):
            return _Fit(text_limit, uncut, can_continue=True)
        max_chars = self._options.max_uncontinued_chars or _UNCONTINUED_FACTOR * self._options.max_result_chars
        higher = ResultLimit(max_chars, _UNCONTINUED_FACTOR * limit.tokens)
        text_limit = _limit_of_text(definition, output, higher.minus(note_chars))
        return _Fit(text_limit, uncut_parts(output.items, text_limit), can_continue=False)

    async def later_part(
        self, call: Call, definition: ToolDefinition, cursor: str, max_result_tokens: int | None = None
    ) -> ShownOutput:
        """Return the part at `cursor`. Raises NotFound, Unavailable."""
        position = self._cursors.read(call.identity, cursor)
        load = partial(load_window, self._artifacts, call.identity, position.card_id)
        # The first part has already shown the beginnings of the items, together at most `max_result_chars`. The
        # function `later_part` skips them, so load as much again.
        artifact = await load(position.start, 2 * self._options.max_result_chars)
        opening = ""
        if position.block_start is not None:
            block = await load(position.block_start, OPENING_CHARS)
            opening = opening_lines(block.text)
        stored_items = stored_items_of(artifact.items, artifact.chars)
        place = Place(position.start, position.block_start)
        part = later_part(stored_items, place, artifact.text, opening, self._limit(definition, max_result_tokens))
        parts = part.parts
        if artifact.items is None:  # an earlier version stored the text, with frames and without items
            parts = tuple(map(without_old_frames, parts))
        shown = framed(parts)
        missing = f"{counted(_unseen_chars(stored_items, part.next), 'character', 'left')}."
        state = {"card_id": artifact.card_id, "from": position.start, "to": part.end, "chars": artifact.chars}
        output = ToolOutput((Item(caption=shown),), state)
        return ShownOutput(output, self._with_cursor(call, definition, shown, missing, artifact.reference, part.next))

    async def search(
        self,
        call: Call,
        definition: ToolDefinition,
        request: SearchRequest,
        cursor: str,
        max_result_tokens: int | None = None,
    ) -> ShownOutput:
        """Search the text of `cursor`, and return the passages found. Raises NotFound, Unavailable, ToolTimeout."""
        return await self._stored_search.run(call, request, cursor, self._limit(definition, max_result_tokens))

    async def _schema_rejects_cursor(self, call: Call, definition: ToolDefinition) -> bool:
        """Return whether the definition's schema refuses a call with only a cursor; remembered by definition."""
        known = self._rejects_cursor.get(definition.digest) if definition.digest else None
        if known is not None:
            return known
        check = ArgumentCheck(cursor_schema(definition, definition.hidden), {CURSOR: _SAMPLE_CURSOR}, {}, {})
        try:
            checked = await self._isolation.check_arguments(definition, check, call.project, _MAX_CHECK_S)
        except ToolError:  # the result is paid: rather show it with a cursor that the schema may refuse
            return False
        rejects = bool(checked.problems or checked.repairs)
        self._rejects_cursor[definition.digest] = rejects
        return rejects

    def _limit(self, definition: ToolDefinition, max_result_tokens: int | None) -> ResultLimit:
        """Return the limit of a result: the definition's, else that of the settings. The call may only lower it."""
        tokens = definition.max_result_tokens or self._options.max_result_tokens
        if max_result_tokens:
            tokens = min(tokens, max_result_tokens)
        return ResultLimit(self._options.max_result_chars, tokens)

    def _with_cursor(
        self,
        call: Call,
        definition: ToolDefinition,
        text: str,
        missing: str,
        reference: ArtifactObject,
        place: Place | None,
    ) -> RenderedResult:
        """Return a shown text, with a cursor if the stored text goes on at `place`; `missing` says how much."""
        if place is None:
            return RenderedResult(text, artifact_ref=reference)
        position = Position(reference["card_id"], place.start, place.block_start)
        cursor = self._cursors.issue(call.identity, position)
        next_call = "call this tool again" if takes_cursor(definition) else "call the tool that reads one page"
        note = f'[{missing} To continue at no cost, {next_call}, with only cursor "{cursor}".]'
        return RenderedResult(f"{text}\n\n{note}", truncated=True, artifact_ref=reference, next_cursor=cursor)


def _shows_state(definition: ToolDefinition) -> bool:
    """Return whether the model also reads the state of an output."""
    return definition.result_format != "text"


def _limit_of_text(definition: ToolDefinition, output: ToolOutput, limit: ResultLimit) -> ResultLimit:
    """Return what is left of a limit for the text, beside the state if that is shown."""
    return without_state(limit, output.state) if _shows_state(definition) else limit


def _cost_note(output: ToolOutput, above: int) -> str:
    """Return a note on a cost of more than `above` tokens, else an empty text."""
    tokens = output.usage.tokens
    return f"\n\n[This result cost {tokens:,} tokens.{output.cost_advice}]" if tokens > above else ""


def _shorter_result_advice(definition: ToolDefinition) -> str:
    """Return how a model gets a shorter result, if the definition takes an argument for that."""
    list_argument = definition.built_in.list_argument  # such as `urls`
    if list_argument:
        return f" Give fewer {list_argument}."
    accepted = definition.model_arguments & definition.built_in.arguments.model_fields.keys()
    for argument, way in _ADVICE.items():
        if argument in accepted:
            return f" {way}."
    return ""


def _unseen_chars(stored_items: Sequence[StoredItem], place: Place | None) -> int:
    """Return how many characters after `place` the model has not been shown."""
    if place is None:
        return 0
    return sum(max(0, item.end - max(item.shown, place.start)) for item in stored_items)


def _missing(first: Truncated) -> str:
    """Return how much the first part does not show.

    For example `12 characters in 2 items are left out. The last item is left out altogether.`
    """
    cut_items = [part for part in first.parts if part.left_chars]
    unseen = sum(not part.text for part in cut_items)
    where = f" in {counted(len(cut_items), 'item')}" if len(first.stored_items) > 1 else ""
    verb = "is" if first.left_chars == 1 else "are"
    missing = f"{counted(first.left_chars, 'character')}{where} {verb} left out."
    if unseen == 1:
        missing += " The last item is left out altogether."
    elif unseen:
        missing += f" The last {unseen} items are left out altogether."
    return missing
