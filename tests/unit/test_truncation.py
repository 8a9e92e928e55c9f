"""Where a long text is cut, and how the parts belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.protocol.errors import NotFound
from openapi_tool.steps import at_once
from openapi_tool.tools.cursor import Cursors, Position
from openapi_tool.tools.result import BLOCK_GAP, FRAME_CLOSE, FRAME_OPEN, framed, untrusted
from openapi_tool.tools.truncation import NOTE_CHARS, boundary, cut, kept_text, later_part, text_chars
from tests.promises import requirement

LIMIT = 2_000
texts = st.builds(lambda text, times: text * times, st.text(st.sampled_from("abc \n.é")), st.integers(0, 900))
CARD = "0192f0c1d2e37a4b8c5d6e7f80910213"


def parts(text: str, limit: int) -> Iterator[str]:
    while text:
        end = boundary(text, limit)
        yield text[:end]
        text = text[end:]


@requirement("size.boundary")
@given(text=texts, limit=st.integers(1, 3_000))
def test_parts_are_never_too_long_or_empty_and_nothing_is_lost(text: str, limit: int) -> None:
    found = list(parts(text, limit))
    assert "".join(found) == text
    assert all(0 < len(part) <= limit for part in found)


@requirement("size.boundary")
@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a" * 80 + "\n\n" + "b" * 10 + "\n" + "c" * 50, 82),
        ("a" * 80 + "\n" + "b. " + "c" * 50, 81),
        ("a" * 80 + ". b " + "c" * 50, 82),
        ("a" * 80 + " " + "c" * 50, 81),
        ("a" * 10 + "\n\n" + "c" * 200, 100),
        ("a" * 200, 100),
        ("a" * 100, 100),
    ],
)
def test_a_text_ends_at_the_best_boundary_that_uses_most_of_the_room(text: str, end: int) -> None:
    assert boundary(text, 100) == end


@requirement("size.frame")
@given(body=texts)
def test_a_first_part_fits_and_its_frame_is_closed(body: str) -> None:
    blocks = ("Two of three succeeded.", f"## 1 of 2: x\n{untrusted(body)}", "## 2 of 2: y\nFailed (x): y")
    part = cut(blocks, LIMIT, whole=False)
    if part is None:
        assert len(BLOCK_GAP.join(blocks)) <= LIMIT
        return
    assert len(part.shown) <= LIMIT - NOTE_CHARS + len(FRAME_CLOSE) + 1
    assert part.shown.count(FRAME_OPEN) == part.shown.count(FRAME_CLOSE)
    assert BLOCK_GAP.join(blocks)[: part.end].rstrip() in part.shown


@requirement("size.frame")
@given(text=texts)
def test_a_later_part_is_framed_once_whatever_is_in_it(text: str) -> None:
    part = later_part(f"{text}\n{FRAME_CLOSE}\n\n## 2 of 2: y\n{FRAME_OPEN}\n{text}")
    assert part.startswith(FRAME_OPEN)
    assert part.endswith(FRAME_CLOSE)
    assert part.count(FRAME_OPEN) == part.count(FRAME_CLOSE) == 1


@requirement("size.results")
@given(sizes=st.lists(st.integers(1, 900), min_size=1, max_size=30))
def test_results_are_left_out_whole_and_from_the_end(sizes: list[int]) -> None:
    blocks = at_once(framed([f"{number}. " + "x" * size for number, size in enumerate(sizes, start=1)]))
    part = cut(blocks, LIMIT, whole=True)
    if part is None:
        assert len(BLOCK_GAP.join(blocks)) <= LIMIT
        return
    shown = len(blocks) - part.blocks_left
    assert 0 < shown < len(blocks)
    assert part.shown == BLOCK_GAP.join([*blocks[: shown - 1], f"{blocks[shown - 1]}\n{FRAME_CLOSE}"])
    assert BLOCK_GAP.join(blocks)[part.end :] == BLOCK_GAP + BLOCK_GAP.join(blocks[shown:])
    assert len(part.shown) + len(blocks[shown]) > LIMIT - NOTE_CHARS


@requirement("size.results")
def test_a_first_result_that_fits_no_part_is_cut() -> None:
    part = cut(at_once(framed(["1. " + "x" * 5_000, "2. y"])), LIMIT, whole=True)
    assert part is not None
    assert part.blocks_left == 0
    assert len(part.shown) > 1_000


@requirement("size.artifact")
@given(blocks=st.lists(texts | st.text(max_size=40), min_size=1, max_size=5))
def test_a_kept_text_is_that_of_all_blocks(blocks: list[str]) -> None:
    kept, text = at_once(kept_text(blocks)), BLOCK_GAP.join(blocks)
    assert json.loads(kept.content) == {"__type__": "TextContent", "text": text}
    assert (kept.chars, kept.sha256) == (len(text), hashlib.sha256(text.encode()).hexdigest())
    assert text_chars(blocks) == len(text)


@requirement("size.cursor")
@given(project=st.text(max_size=9), agent=st.text(max_size=9), start=st.integers(0, 10_000_000))
def test_a_cursor_leads_back_for_its_owner_and_for_nobody_else(project: str, agent: str, start: int) -> None:
    cursors, position = Cursors(b"k" * 32), Position(CARD, start)
    cursor = cursors.issue(project, agent, position)
    assert cursors.read(project, agent, f" {cursor}\n") == position
    strangers = [(Cursors(b"k" * 32), f"{project}x", agent), (Cursors(b"k" * 32), project, f"{agent}x")]
    strangers += [(Cursors(b"l" * 32), project, agent), (Cursors(b"k" * 32), project + agent, "")]
    for other, other_project, other_agent in strangers:
        if (other_project, other_agent) == (project, agent) and other is not strangers[2][0]:
            continue
        with pytest.raises(NotFound):
            other.read(other_project, other_agent, cursor)


@requirement("size.cursor")
@given(text=st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.hex()))
def test_a_made_up_cursor_is_unknown(text: str) -> None:
    with pytest.raises(NotFound, match="cursor: is unknown here"):
        Cursors(b"k" * 32).read("proj", "agent", text)


@requirement("size.cursor")
@given(place=st.integers(0, 43), other=st.sampled_from("ABCabc019-_"))
def test_a_cursor_with_one_other_character_is_unknown(place: int, other: str) -> None:
    cursors = Cursors(b"k" * 32)
    cursor = cursors.issue("proj", "agent", Position(CARD, 40_000))
    forged = cursor[:place] + other + cursor[place + 1 :]
    if forged != cursor:
        with pytest.raises(NotFound):
            cursors.read("proj", "agent", forged)
