"""Search in the stored text of a long result, at no upstream cost; each passage gets a cursor to read on from.

A search is for a *phrase* (argument `find`), which is found literally, or for a *question* (argument `question`), whose
words are looked for. `tools/stored_search.py` finds the passages; this module loads the text and words the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.engine.call import Call
from openapi_tool.engine.ports import Artifacts
from openapi_tool.isolation.pool import PoolBusy, TaskKilled
from openapi_tool.isolation.service import Isolation
from openapi_tool.protocol.errors import ToolTimeout
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import Artifact
from openapi_tool.tools.arguments import FIND, QUESTION
from openapi_tool.tools.boundaries import boundary
from openapi_tool.tools.cursors import Cursors, Position, unknown_cursor
from openapi_tool.tools.frames import INTRO_CHARS, Part, framed, without_old_frames
from openapi_tool.tools.output import Item, ToolOutput
from openapi_tool.tools.result import RenderedResult, ShownOutput
from openapi_tool.tools.result_limit import FRAME_CHARS, MIN_TEXT_CHARS, ResultLimit
from openapi_tool.tools.stored_items import StoredItem, stored_items_of
from openapi_tool.tools.stored_search import SEARCH_TEXT, Found, found_passages, search_task, search_text
from openapi_tool.tools.text_search import MAX_SHOWN, SearchRequest
from openapi_tool.tools.tokens import fitting_chars
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
        searched_chars = sum(item.end - item.start for item in items)
        result = _SearchResult(self._cursors, call.identity, artifact, searched_chars, found, limit)
        if phrase_from is None:
            return result.of_question(cursor)
        return result.of_phrase(cursor)

    async def _load(self, owner: CallIdentity, card_id: str) -> tuple[Artifact, bytearray]:
        """Return the whole text of an artifact in UTF-8, and its last window, which tells size and items of the whole.

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


async def load_window(artifacts: Artifacts, owner: CallIdentity, card_id: str, start: int, chars: int) -> Artifact:
    """Return at most `chars` characters of a stored text, from `start` on. Raises NotFound if there are none."""
    window = await artifacts.artifact(owner.project_id, owner.agent_id, card_id, start, chars)
    if window is None or not window.text:
        raise unknown_cursor()
    return window


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """What a model is shown of a search in the text `artifact` of `owner`, within `limit`.

    `searched_chars` is the length of the searched text: all web content, without what this service adds to it.
    """

    cursors: Cursors
    owner: CallIdentity
    artifact: Artifact
    searched_chars: int
    found: Found
    limit: ResultLimit

    def of_phrase(self, cursor: str) -> ShownOutput:
        """Return the places of a phrase: those after the cursor or, if there are none, those before it."""
        before = self.found.before
        after = self.found.after
        if not before and not after:
            return self._no_match(
                f"Not found in {self._searched}. Try fewer or other words, in the language of the text, or {QUESTION} "
                f"in place of {FIND}",
                cursor,
            )
        parts = self._parts(_PHRASE_NOTES_CHARS)
        first = f"[Found in {counted(before + after, 'place')} of {self._searched}; {len(parts)} shown. {_READ_ON}"
        if before and after:
            first += f' {before:,} before your cursor: for those give cursor "{self._new_cursor(0)}" and {FIND}.'
        not_shown = (after or before) - len(parts)
        next_places = None
        last = ""
        if not_shown:
            next_places = self._new_cursor(self.found.passages[len(parts)].match_start)
            last = f'[{counted(not_shown, "more place")}: call again with the same {FIND} and cursor "{next_places}".]'
        return self._shown(f"{first}]", parts, last, next_places, before + after)

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
        return f"the {self.searched_chars:,} characters stored of this result"

    def _no_match(self, why: str, cursor: str) -> ShownOutput:
        """Return a result without passages: `[WHY; or read on with only cursor "…".]`."""
        return self._shown(f'[{why}; or read on with only cursor "{cursor.strip()}".]', [])

    def _parts(self, reserved_chars: int) -> list[Part]:
        """Return as many passages as fit beside `reserved_chars`, at least one; the last may be cut."""
        space = self.limit.space(INTRO_CHARS + reserved_chars)
        parts: list[Part] = []
        for number, passage in enumerate(self.found.passages[:MAX_SHOWN], start=1):
            cursor = self._new_cursor(passage.start, passage.block_start)
            heading = f'[{number}: {passage.where}; cursor "{cursor}"]'
            space.take_frame(len(heading) + len(passage.repeated) + FRAME_CHARS)
            if parts and space.is_full:
                break
            max_chars = min(space.chars, fitting_chars(passage.text, space.tokens))
            text = passage.text[: boundary(passage.text, max(max_chars, MIN_TEXT_CHARS))]
            space.take_text(text)
            parts.append(Part(text, heading, passage.repeated))
        return parts

    def _new_cursor(self, start: int, block_start: int | None = None) -> str:
        return self.cursors.issue(self.owner, Position(self.artifact.card_id, start, block_start))

    def _shown(
        self, first: str, parts: list[Part], last: str = "", next_places: str | None = None, places: int | None = None
    ) -> ShownOutput:
        """Return passages between a `first` and a `last` line.

        Only a search for a phrase gives `next_places`, the cursor of the next ones, and `places`, the number of all.
        """
        if self.artifact.items is None:  # an earlier version stored the text, with frames and without items
            parts = [without_old_frames(part) for part in parts]
        lines = [first, framed(parts), last]
        shown = "\n\n".join(line for line in lines if line)
        state: dict[str, object] = {
            "card_id": self.artifact.card_id,
            "chars": self.artifact.chars,
            "passages": [{"from": passage.start} for passage in self.found.passages[: len(parts)]],
        }
        if places is not None:
            state["places"] = places
        rendered = RenderedResult(
            shown,
            truncated=next_places is not None,
            artifact_ref=self.artifact.reference,
            next_cursor=next_places,
        )
        return ShownOutput(ToolOutput((Item(caption=shown),), state), rendered)
