"""Search in the stored text of a long result, at no upstream cost; each passage gets a cursor to read on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from openapi_tool.concurrency import SMALL, FairSemaphore, Steps, TimeSlicer
from openapi_tool.executor.ports import Artifacts
from openapi_tool.protocol.records import Artifact
from openapi_tool.tools.arguments import FIND, QUESTION, CallOwner
from openapi_tool.tools.problems import counted
from openapi_tool.tools.result import (
    INTRO_CHARS,
    Item,
    Part,
    RenderedResult,
    ToolOutput,
    estimate_tokens,
    fitting_chars,
    framed,
    without_frames,
)
from openapi_tool.tools.scopes import Cursors, Position, unknown_cursor
from openapi_tool.tools.text_search import MAX_SHOWN, Phrase, Question, Search, SearchRequest, Span
from openapi_tool.tools.truncation import (
    FRAME_CHARS,
    FRAME_CHARS_PER_TOKEN,
    MIN_CHARS,
    OPENING_CHARS,
    ResultLimit,
    StoredItem,
    boundary,
    opening_lines,
    opening_of,
    stored_items_of,
    where_in,
)

_WINDOW_CHARS = 512 * 1024  # read from the database at once
_LOOK_BACK_CHARS = 64 * 1024
"""Characters before a passage that are searched for the start of its code block or table."""
_FORCE_SLICING = SMALL + 1  # has `TimeSlicer.run` slice short texts, too: several passages together take long
_MAX_CONCURRENT = 8
"""Searches in a process. Each holds a window of the text, up to 2 MB, and as much in the driver; a question also up to
some 5 MB of passages."""
_READ_ON = "Each cursor reads on from its passage, given alone."
_PHRASE_NOTES_CHARS, _QUESTION_NOTES_CHARS = 420, 200
"""Maximum characters of the lines before and after the passages of a phrase, and of a question."""


class StoredSearch:
    """Searches stored texts, a limited number at once, fairly to projects."""

    def __init__(self, artifacts: Artifacts, cursors: Cursors, slicer: TimeSlicer) -> None:
        self._artifacts = artifacts
        self._cursors = cursors
        self._slicer = slicer
        self._permits = FairSemaphore(_MAX_CONCURRENT)

    async def run(
        self, request: SearchRequest, cursor: str, owner: CallOwner, limit: ResultLimit
    ) -> tuple[ToolOutput, RenderedResult]:
        """Search the text of a cursor; return what the model is shown. Raises NotFound, Unavailable."""
        position = self._cursors.read(owner.project_id, owner.agent_id, cursor)
        phrase = Phrase(request.text, position.start) if request.name == FIND else None
        search: Search = phrase or Question(request.text)
        async with self._permits.permit(owner.project_id):
            text = _Windows(self._artifacts, owner, position.card_id)
            artifact = await text.load(0)
            stored_items = stored_items_of(artifact.items, artifact.chars)
            for item in stored_items:
                await self._scan(search, text, item)
            spans = await self._slicer.run(search.spans(), artifact.chars, owner.project_id)
            passages = [await self._passage(text, stored_items, span) for span in spans]
        chars = sum(item.end - item.start for item in stored_items)
        result = _SearchResult(partial(self._new_cursor, owner, artifact.card_id), artifact, chars, passages, limit)
        return result.of_phrase(phrase, cursor) if phrase else result.of_question(cursor)

    def _new_cursor(self, owner: CallOwner, card_id: str, start: int, opening: int | None = None) -> str:
        return self._cursors.issue(owner.project_id, owner.agent_id, Position(card_id, start, opening))

    async def _passage(self, text: _Windows, stored_items: Sequence[StoredItem], span: Span) -> _Passage:
        number, item = next((number, item) for number, item in enumerate(stored_items, start=1) if span.at < item.end)
        window_at = max(item.start, span.at - _LOOK_BACK_CHARS)
        window = await text.read(window_at, min(item.end, span.at + span.chars))
        steps = _passage_steps(window, window_at, stored_items, number, span)
        return await self._slicer.run(steps, _FORCE_SLICING, text.owner.project_id)

    async def _scan(self, search: Search, text: _Windows, item: StoredItem) -> None:
        at = item.start
        while at < item.end:
            window = await text.read(at, item.end)
            last = at + len(window) >= item.end or len(window) < _WINDOW_CHARS
            steps = search.scan(window, at, last=last)
            at += await self._slicer.run(steps, len(window), text.owner.project_id)


class _Windows:
    """Stored text, read in windows; only one is in memory at a time."""

    def __init__(self, artifacts: Artifacts, owner: CallOwner, card_id: str) -> None:
        self._artifacts = artifacts
        self.owner = owner
        self._card_id = card_id
        self._start = 0
        self._text = ""

    async def read(self, start: int, end: int) -> str:
        """Return the text from `start` to `end`, at most one window of it."""
        if not self._start <= start <= end <= self._start + len(self._text):
            await self.load(start)
        return self._text[start - self._start : end - self._start]

    async def load(self, start: int) -> Artifact:
        """Read the window at `start`; return it, with the length of the text and its items."""
        self._text = ""  # free the old window before the next one arrives
        part = await load_part(self._artifacts, self.owner, self._card_id, start, _WINDOW_CHARS)
        self._start, self._text = start, part.text
        return part


async def load_part(artifacts: Artifacts, owner: CallOwner, card_id: str, start: int, chars: int) -> Artifact:
    """Return at most `chars` characters of a stored text. Raises NotFound if there are none."""
    part = await artifacts.artifact(owner.project_id, owner.agent_id, card_id, start, chars)
    if part is None or not part.text:
        raise unknown_cursor()
    return part


@dataclass(frozen=True, slots=True)
class _Passage:
    """Passage that was found.

    `at` (match), `start` (passage) and `opening` (code block or table in which it begins) are positions in the stored
    text. `lines` are repeated before it: title of its item, if there are several, and first lines of that block.
    """

    at: int
    start: int
    opening: int | None
    text: str
    lines: str
    where: str


def _passage_steps(
    window: str, window_at: int, stored_items: Sequence[StoredItem], number: int, span: Span
) -> Steps[_Passage]:
    """Return a passage of the item with this number; `window` is the text from `window_at` on."""
    item = stored_items[number - 1]
    several = len(stored_items) > 1
    begin = _passage_start(window, span.at - window_at, span.before)
    start = window_at + begin
    max_chars = span.at + span.chars - window_at - begin
    shown = window[begin : begin + max_chars + 1]  # one character more, to show `boundary` that the text continues
    opening = opening_of(window[:begin], window[begin : begin + 1])
    yield
    lines = "" if opening is None else opening_lines(window[opening:][:OPENING_CHARS])
    if several and item.title and start > item.start:
        title, _, _ = item.title.partition("\n")
        lines = f"{title}\n{lines}"
    return _Passage(
        at=span.at,
        start=start,
        opening=None if opening is None else window_at + opening,
        text=shown[: boundary(shown, max_chars)].rstrip(),
        lines=lines,
        where=where_in(item, start, number if several else None, len(stored_items), lines.count("\n")),
    )


def _passage_start(window: str, at: int, before: int) -> int:
    """Return where a passage begins: with the line, sentence or word of the match, the first that is near enough."""
    earliest = max(0, at - before)
    if earliest == 0 and "\n" not in window[:at]:
        return 0
    for mark in ("\n", ". ", " "):
        found = window.rfind(mark, earliest, at)
        if found >= 0:
            return found + len(mark)
    return earliest


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """Text of a search result; `chars` is the length of the searched text."""

    new_cursor: Callable[..., str]
    artifact: Artifact
    chars: int
    passages: Sequence[_Passage]
    limit: ResultLimit

    def of_phrase(self, phrase: Phrase, cursor: str) -> tuple[ToolOutput, RenderedResult]:
        """Return the matches of a phrase: those after the cursor or, if there are none, those before it."""
        total = phrase.before + phrase.after
        if not total:
            return self._no_match(
                f"Not found in {self._searched}. Try fewer or other words, in the language of the text, or {QUESTION} "
                f"in place of {FIND}",
                cursor,
            )
        parts = self._parts(_PHRASE_NOTES_CHARS)
        left = (phrase.after or phrase.before) - len(parts)
        first = f"[Found in {counted(total, 'place')} of {self._searched}; {len(parts)} shown. {_READ_ON}"
        if phrase.before and phrase.after:
            first += f' {phrase.before:,} before your cursor: for those give cursor "{self.new_cursor(0)}" and {FIND}.'
        following = self.new_cursor(self.passages[len(parts)].at) if left else None
        last = f'[{counted(left, "more place")}: call again with the same {FIND} and cursor "{following}".]'
        return self._shown(f"{first}]", parts, last if left else "", following, total)

    def of_question(self, cursor: str) -> tuple[ToolOutput, RenderedResult]:
        """Return the passages that match a question best."""
        if not self.passages:
            return self._no_match(
                f"No word of the question is in {self._searched}. Ask in the words and the language of the text", cursor
            )
        parts = self._parts(_QUESTION_NOTES_CHARS)
        first = f"[{counted(len(parts), 'passage')} of {self._searched}, the best for the question first. {_READ_ON}]"
        return self._shown(first, parts)

    @property
    def _searched(self) -> str:
        return f"the {self.chars:,} characters stored of this result"

    def _no_match(self, why: str, cursor: str) -> tuple[ToolOutput, RenderedResult]:
        return self._shown(f'[{why}; or read on with only cursor "{cursor.strip()}".]', [])

    def _parts(self, reserved_chars: int) -> list[Part]:
        space = self.limit.chars - INTRO_CHARS - reserved_chars
        tokens = self.limit.tokens - (INTRO_CHARS + reserved_chars) // FRAME_CHARS_PER_TOKEN
        parts: list[Part] = []
        for number, passage in enumerate(self.passages[:MAX_SHOWN], start=1):
            heading = f'[{number}: {passage.where}; cursor "{self.new_cursor(passage.start, passage.opening)}"]'
            around = len(heading) + len(passage.lines) + FRAME_CHARS
            space -= around
            tokens -= around // FRAME_CHARS_PER_TOKEN
            if parts and (space < MIN_CHARS or tokens < MIN_CHARS // FRAME_CHARS_PER_TOKEN):
                break
            max_chars = max(min(space, fitting_chars(passage.text, tokens)), MIN_CHARS)
            text = passage.text[: boundary(passage.text, max_chars)]
            space -= len(text)
            tokens -= estimate_tokens(text)
            parts.append(Part(text, heading, passage.lines))
        return parts

    def _shown(
        self, first: str, parts: list[Part], last: str = "", following: str | None = None, total: int | None = None
    ) -> tuple[ToolOutput, RenderedResult]:
        if self.artifact.items is None:  # a text of an earlier version, which contains frames
            parts = [without_frames(part) for part in parts]
        shown = "\n\n".join(filter(None, (first, framed(parts), last)))
        state = {
            "card_id": self.artifact.card_id,
            "chars": self.artifact.chars,
            "passages": [{"from": passage.start} for passage in self.passages[: len(parts)]],
            **({} if total is None else {"places": total}),
        }
        rendered = RenderedResult(shown, following is not None, self.artifact.reference, following)
        return ToolOutput((Item(caption=shown),), state), rendered
