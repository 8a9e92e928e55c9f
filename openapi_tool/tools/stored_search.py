"""Search in the whole text of a stored result: what is found, as passages to show.

`search_text` does the search. It may take long, so it mostly runs in a worker process, as the task SEARCH_TEXT; this
module therefore imports pure code only. Lengths and positions are in characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, cast

from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.protocol.payload import Parts, Payload, pack, pack_parts
from openapi_tool.tools.blocks import OPENING_CHARS, block_at_end, opening_lines
from openapi_tool.tools.boundaries import boundary
from openapi_tool.tools.phrase_search import Phrase
from openapi_tool.tools.question_search import Question
from openapi_tool.tools.stems import SAMPLE_CHARS
from openapi_tool.tools.stored_items import StoredItem, where_in
from openapi_tool.tools.text_search import Span

_LOOK_BACK_CHARS = 64 * 1024
"""Characters before a passage that are searched for the start of its code block or table."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Passage that was found, and what to show with it.

    - `match_start`, `start`: where in the stored text the match and the passage begin.
    - `block_start`: where the code block or table begins that contains `start`, None outside of one.
    - `repeated`: lines to show before the text: the title of its item, and the opening lines of that block.
    - `where`: the place in words, such as `item 2 of 3, from character 1,001 of 5,000`.
    """

    match_start: int
    start: int
    block_start: int | None
    text: str
    repeated: str
    where: str


@dataclass(frozen=True, slots=True)
class Found:
    """Passages, best first, and for a phrase the number of its places before and after the start of the search."""

    passages: tuple[Passage, ...]
    before: int = 0
    after: int = 0


def search_text(text: str, items: Sequence[StoredItem], wanted: str, phrase_from: int | None) -> Found:
    """Search a text for `wanted`.

    With `phrase_from` it is a phrase, whose places from that position on come first. With None it is a question, and
    the best passages for it are found.
    """
    search = Question(wanted, text[:SAMPLE_CHARS]) if phrase_from is None else Phrase(wanted, phrase_from)
    for item in items:
        search.scan(text, item.start, min(item.end, len(text)))
    passages = tuple(_passage(text, items, span) for span in search.spans())
    return Found(passages, search.before, search.after) if isinstance(search, Phrase) else Found(passages)


def _passage(text: str, items: Sequence[StoredItem], span: Span) -> Passage:
    number, item = _item_at(items, span.at)
    window_at = max(item.start, span.at - _LOOK_BACK_CHARS)
    window = text[window_at : min(item.end, span.at + span.chars)]
    start_in_window = _passage_start(window, span.at - window_at, span.before)
    before, from_start = window[:start_in_window], window[start_in_window:]
    start = window_at + start_in_window
    block_start = block_at_end(before, window_at, from_start[:1])
    repeated = ""
    if block_start is not None:
        repeated = opening_lines(window[block_start - window_at :][:OPENING_CHARS])
    if len(items) > 1 and item.title and start > item.start:
        title, _, _ = item.title.partition("\n")
        repeated = f"{title}\n{repeated}"
    return Passage(
        match_start=span.at,
        start=start,
        block_start=block_start,
        text=_passage_text(from_start, span.at + span.chars - start),
        repeated=repeated,
        where=where_in(item, start, number, len(items), repeated),
    )


def _item_at(items: Sequence[StoredItem], position: int) -> tuple[int, StoredItem]:
    """Return number and item of a position in the text."""
    return next((number, item) for number, item in enumerate(items, start=1) if position < item.end)


def _passage_start(window: str, at: int, max_before: int) -> int:
    """Return where the passage of the match at `at` begins, at most `max_before` characters earlier.

    That is where the match's line begins, else its sentence, else a word.
    """
    earliest = max(0, at - max_before)
    if earliest == 0 and "\n" not in window[:at]:
        return 0
    for mark in ("\n", ". ", " "):
        found = window.rfind(mark, earliest, at)
        if found >= 0:
            return found + len(mark)
    return earliest


def _passage_text(from_start: str, max_chars: int) -> str:
    shown = from_start[: max_chars + 1]  # one character more, which tells `boundary` that the text goes on
    return shown[: boundary(shown, max_chars)].rstrip()


# The same as a task of a worker process.

SEARCH_TEXT = "search_text"


def search_task(text: bytearray, items: Sequence[StoredItem], wanted: str, phrase_from: int | None) -> Parts:
    """Return the argument of the task SEARCH_TEXT; the text is UTF-8."""
    return pack_parts({"items": list(map(list, items)), "wanted": wanted, "phrase_from": phrase_from}, [text])


def run_search_task(task: Payload) -> bytes:
    """Run the task SEARCH_TEXT, in the worker process."""
    search = cast("dict[str, Any]", task.value)
    (text,) = task.texts()
    items = [StoredItem(*fields) for fields in search["items"]]
    found = search_text(text, items, search["wanted"], search["phrase_from"])
    return pack({"passages": list(map(astuple, found.passages)), "before": found.before, "after": found.after})


def found_passages(answer: Payload) -> Found:
    """Return what is found in the answer of the task SEARCH_TEXT."""
    found: dict[str, JsonValue] = answer.value
    passages = cast("list[list[Any]]", found["passages"])
    return Found(
        tuple(Passage(*fields) for fields in passages), cast("int", found["before"]), cast("int", found["after"])
    )
