"""Search in the stored text of a long result, at no upstream cost; each passage gets a cursor to read on from.

A search is for a *phrase* (argument `find`), which is found literally, or for a *question* (argument `question`), whose
words are looked for. `tools/stored_search.py` finds the passages; this module loads the text and words the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from openapi_tool.engine.call import Call
from openapi_tool.engine.ports import Artifacts
from openapi_tool.isolation.pool import PoolBusy, TaskKilled
from openapi_tool.isolation.service import Isolation
from openapi_tool.protocol.errors import ToolTimeout
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import Artifact
from openapi_tool.tools.arguments import FIND, QUESTION
from openapi_tool.tools.cursors import Cursors, Position, unknown_cursor
from openapi_tool.tools.frames import INTRO_CHARS, Part, framed, without_frames
from openapi_tool.tools.output import Item, ToolOutput
from openapi_tool.tools.result import RenderedResult, ShownOutput
from openapi_tool.tools.stored_search import SEARCH_TEXT, Found, found_passages, search_task, search_text
from openapi_tool.tools.text_search import MAX_SHOWN, SearchRequest
from openapi_tool.tools.tokens import estimate_tokens, fitting_chars
from openapi_tool.tools.truncation import (
    FRAME_CHARS,
    FRAME_CHARS_PER_TOKEN,
    MIN_CHARS,
    ResultLimit,
    StoredItem,
    boundary,
    stored_items_of,
)
from openapi_tool.tools.wording import counted

_WINDOW_CHARS = 512 * 1024  # read from the database at once
_MAX_WAIT_S = 60.0  # of a search for a worker process and its answer; mostly the call's deadline comes earlier
_READ_ON = "Each cursor reads on from its passage, given alone."
# Maximum characters of the lines before and after the passages (`first` and `last` below).
_PHRASE_NOTES_CHARS = 420
_QUESTION_NOTES_CHARS = 200


class StoredSearch:
    """Searches stored texts in worker processes, or in this process if there are none.

    Few searches run at once; projects take turns.
    """

    def __init__(self, artifacts: Artifacts, cursors: Cursors, isolation: Isolation) -> None:
        self._artifacts = artifacts
        self._cursors = cursors
        self._isolation = isolation

    async def run(self, call: Call, request: SearchRequest, cursor: str, limit: ResultLimit) -> ShownOutput:
        """Search the text of a cursor; return what the model is shown. Raises NotFound, Unavailable, ToolTimeout."""
        position = self._cursors.read(call.identity, cursor)
        phrase_from = position.start if request.name == FIND else None  # None: the request is a question
        async with self._isolation.searches.permit(call.project):
            artifact, text = await self._load(call.identity, position.card_id)
            items = stored_items_of(artifact.items, artifact.chars)
            found = await self._search(call, text, items, request.text, phrase_from)
        chars = sum(item.end - item.start for item in items)
        new_cursor = partial(self._new_cursor, call.identity, artifact.card_id)
        result = _SearchResult(new_cursor, artifact, chars, found, limit)
        return result.of_question(cursor) if phrase_from is None else result.of_phrase(cursor)

    async def _load(self, owner: CallIdentity, card_id: str) -> tuple[Artifact, bytearray]:
        """Return the last window of an artifact, for its facts, and the whole text in UTF-8.

        The text is read in windows, because to decode megabytes at once would block the event loop.
        """
        text = bytearray()
        loaded_chars = 0
        while True:
            window = await load_window(self._artifacts, owner, card_id, loaded_chars, _WINDOW_CHARS)
            text += window.text.encode()
            loaded_chars += len(window.text)
            if loaded_chars >= window.chars:
                return window, text

    async def _search(
        self, call: Call, text: bytearray, items: list[StoredItem], wanted: str, phrase_from: int | None
    ) -> Found:
        """Search a text for `wanted`: a phrase, from the character `phrase_from` on first, or a question if None."""
        pool = self._isolation.pool
        if pool is None:
            return search_text(text.decode(), items, wanted, phrase_from)
        task = search_task(text, items, wanted, phrase_from)
        try:
            return found_passages(await pool.run(SEARCH_TEXT, task, project=call.project, wait_s=_MAX_WAIT_S))
        except (TaskKilled, PoolBusy):
            raise ToolTimeout(
                "The search took too long and was given up; read on with only the cursor, or search again later."
            ) from None

    def _new_cursor(self, owner: CallIdentity, card_id: str, start: int, opening: int | None = None) -> str:
        return self._cursors.issue(owner, Position(card_id, start, opening))


async def load_window(artifacts: Artifacts, owner: CallIdentity, card_id: str, start: int, chars: int) -> Artifact:
    """Return at most `chars` characters of a stored text, from `start` on. Raises NotFound if there are none."""
    window = await artifacts.artifact(owner.project_id, owner.agent_id, card_id, start, chars)
    if window is None or not window.text:
        raise unknown_cursor()
    return window


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """What a model is shown of a search, within `limit`.

    `new_cursor` makes a cursor for a place of the text: `new_cursor(start)`, or `new_cursor(start, opening)` within a
    code block or table. `chars` is the length of the searched text.
    """

    new_cursor: Callable[..., str]
    artifact: Artifact
    chars: int
    found: Found
    limit: ResultLimit

    def of_phrase(self, cursor: str) -> ShownOutput:
        """Return the places of a phrase: those after the cursor or, if there are none, those before it."""
        places_before = self.found.before
        places_after = self.found.after
        total = places_before + places_after
        if not total:
            return self._no_match(
                f"Not found in {self._searched}. Try fewer or other words, in the language of the text, or {QUESTION} "
                f"in place of {FIND}",
                cursor,
            )
        parts = self._parts(_PHRASE_NOTES_CHARS)
        first = f"[Found in {counted(total, 'place')} of {self._searched}; {len(parts)} shown. {_READ_ON}"
        if places_before and places_after:
            first += f' {places_before:,} before your cursor: for those give cursor "{self.new_cursor(0)}" and {FIND}.'
        left = (places_after or places_before) - len(parts)
        following = None
        last = ""
        if left:
            following = self.new_cursor(self.found.passages[len(parts)].at)
            last = f'[{counted(left, "more place")}: call again with the same {FIND} and cursor "{following}".]'
        return self._shown(f"{first}]", parts, last, following, total)

    def of_question(self, cursor: str) -> ShownOutput:
        """Return the passages that match a question best."""
        if not self.found.passages:
            return self._no_match(
                f"No word of the question is in {self._searched}. Ask in the words and the language of the text", cursor
            )
        parts = self._parts(_QUESTION_NOTES_CHARS)
        first = f"[{counted(len(parts), 'passage')} of {self._searched}, the best for the question first. {_READ_ON}]"
        return self._shown(first, parts)

    @property
    def _searched(self) -> str:
        return f"the {self.chars:,} characters stored of this result"

    def _no_match(self, why: str, cursor: str) -> ShownOutput:
        """Return a result without passages: `[WHY; or read on with only cursor "…".]`."""
        return self._shown(f'[{why}; or read on with only cursor "{cursor.strip()}".]', [])

    def _parts(self, reserved_chars: int) -> list[Part]:
        """Return as many passages as fit beside `reserved_chars`, at least one; the last may be cut."""
        chars_left = self.limit.chars - INTRO_CHARS - reserved_chars
        tokens_left = self.limit.tokens - (INTRO_CHARS + reserved_chars) // FRAME_CHARS_PER_TOKEN
        parts: list[Part] = []
        for number, passage in enumerate(self.found.passages[:MAX_SHOWN], start=1):
            heading = f'[{number}: {passage.where}; cursor "{self.new_cursor(passage.start, passage.opening)}"]'
            around_chars = len(heading) + len(passage.lines) + FRAME_CHARS
            chars_left -= around_chars
            tokens_left -= around_chars // FRAME_CHARS_PER_TOKEN
            is_full = chars_left < MIN_CHARS or tokens_left < MIN_CHARS // FRAME_CHARS_PER_TOKEN
            if parts and is_full:
                break
            max_chars = max(min(chars_left, fitting_chars(passage.text, tokens_left)), MIN_CHARS)
            text = passage.text[: boundary(passage.text, max_chars)]
            chars_left -= len(text)
            tokens_left -= estimate_tokens(text)
            parts.append(Part(text, heading, passage.lines))
        return parts

    def _shown(
        self, first: str, parts: list[Part], last: str = "", following: str | None = None, total: int | None = None
    ) -> ShownOutput:
        """Return passages between a `first` and a `last` line.

        `following` is the cursor of the next places of a phrase, `total` the number of all its places.
        """
        if self.artifact.items is None:  # an earlier version stored the text, with the marks around untrusted text
            parts = [without_frames(part) for part in parts]
        shown = "\n\n".join(filter(None, (first, framed(parts), last)))
        state = {
            "card_id": self.artifact.card_id,
            "chars": self.artifact.chars,
            "passages": [{"from": passage.start} for passage in self.found.passages[: len(parts)]],
            **({} if total is None else {"places": total}),
        }
        rendered = RenderedResult(shown, following is not None, self.artifact.reference, following)
        return ShownOutput(ToolOutput((Item(caption=shown),), state), rendered)
