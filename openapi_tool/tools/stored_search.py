"""Search in the whole text of a stored result: what is found, as passages to show. Imports pure code only.

Lengths and positions are in characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, cast

from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.protocol.payload import Parts, Payload, pack, pack_parts
from openapi_tool.tools.stems import SAMPLE_CHARS
from openapi_tool.tools.text_search import Phrase, Question, Span
from openapi_tool.tools.truncation import OPENING_CHARS, StoredItem, boundary, opening_lines, opening_of, where_in

_LOOK_BACK_CHARS = 64 * 1024
"""Characters before a passage that are searched for the start of its code block or table."""


@dataclass(frozen=True, slots=True)
class Passage:
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


@dataclass(frozen=True, slots=True)
class Found:
    """Passages, best first, and for a phrase the number of its places before and after the start of the search."""

    passages: tuple[Passage, ...]
    before: int = 0
    after: int = 0


def search_text(text: str, items: Sequence[StoredItem], wanted: str, phrase_from: int | None) -> Found:
    """Search for a phrase, places from `phrase_from` on first, or with None for the best passages for a question."""
    search = Question(wanted, text[:SAMPLE_CHARS]) if phrase_from is None else Phrase(wanted, phrase_from)
    for item in items:
        search.scan(text, item.start, min(item.end, len(text)))
    passages = tuple(_passage(text, items, span) for span in search.spans())
    return Found(passages, search.before, search.after) if isinstance(search, Phrase) else Found(passages)


def _passage(text: str, items: Sequence[StoredItem], span: Span) -> Passage:
    number, item = next((number, item) for number, item in enumerate(items, start=1) if span.at < item.end)
    window_at = max(item.start, span.at - _LOOK_BACK_CHARS)
    window = text[window_at : min(item.end, span.at + span.chars)]
    several = len(items) > 1
    begin = _passage_start(window, span.at - window_at, span.before)
    start = window_at + begin
    max_chars = span.at + span.chars - window_at - begin
    shown = window[begin : begin + max_chars + 1]  # one character more, to show `boundary` that the text continues
    opening = opening_of(window[:begin], window[begin : begin + 1])
    lines = "" if opening is None else opening_lines(window[opening:][:OPENING_CHARS])
    if several and item.title and start > item.start:
        title, _, _ = item.title.partition("\n")
        lines = f"{title}\n{lines}"
    return Passage(
        at=span.at,
        start=start,
        opening=None if opening is None else window_at + opening,
        text=shown[: boundary(shown, max_chars)].rstrip(),
        lines=lines,
        where=where_in(item, start, number if several else None, len(items), lines.count("\n")),
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


# The same in a worker process.

SEARCH_TEXT = "search_text"


def search_task(text: bytearray, items: Sequence[StoredItem], wanted: str, phrase_from: int | None) -> Parts:
    """Return the argument of the task SEARCH_TEXT; the text is UTF-8."""
    return pack_parts({"items": list(map(list, items)), "wanted": wanted, "phrase_from": phrase_from}, [text])


def run_search_task(task: Payload) -> bytes:
    """Run SEARCH_TEXT."""
    given = cast("dict[str, Any]", task.value)
    (text,) = task.texts()
    found = search_text(text, [StoredItem(*item) for item in given["items"]], given["wanted"], given["phrase_from"])
    return pack({"passages": list(map(astuple, found.passages)), "before": found.before, "after": found.after})


def found_passages(answer: Payload) -> Found:
    """Return what is found in an answer of SEARCH_TEXT."""
    given: dict[str, JsonValue] = answer.value
    passages = cast("list[list[Any]]", given["passages"])
    return Found(
        tuple(Passage(*passage) for passage in passages), cast("int", given["before"]), cast("int", given["after"])
    )
