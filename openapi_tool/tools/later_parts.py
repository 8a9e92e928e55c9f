"""Later parts of a truncated result, which a model asks for with a cursor.

The first part (`truncation.py`) showed the beginning of each item. Later parts show the rest of the first item, then
that of the second, and so on. Each part says where it begins, and repeats the lines without which it would be unclear:
title and address of its item, and the opening lines of a *block*, a code block or table (`blocks.py`).

Positions are in characters of the stored text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from openapi_tool.tools.blocks import OPENING_CHARS, Block, block_at_end, opening_lines
from openapi_tool.tools.boundaries import boundary
from openapi_tool.tools.frames import CAPTION_CHARS, CUT_CHARS, MARK_CHARS, Part
from openapi_tool.tools.result_limit import MIN_TEXT_CHARS, NOTE_CHARS, ResultLimit, Space
from openapi_tool.tools.stored_items import Place, StoredItem, where_in
from openapi_tool.tools.tokens import fitting_chars


class LaterPart(NamedTuple):
    """What one call shows of a stored text: parts of items up to `end`.

    `next` is the place where the next call goes on, None after the last part.
    """

    parts: tuple[Part, ...]
    end: int
    next: Place | None


def later_part(
    stored_items: Sequence[StoredItem], place: Place, window: str, opening: str, limit: ResultLimit
) -> LaterPart:
    """Return what follows `place`, within `limit`.

    `window` is the stored text from `place` on, as far as it was read. `opening` holds the opening lines of the block
    that contains `place`; empty outside of one.
    """
    parts: list[Part] = []
    space = limit.space(NOTE_CHARS + CUT_CHARS)
    end = place.start
    before = None
    for rest in _rests(stored_items, place, window, opening):
        item = rest.item
        text = window[rest.start - place.start : item.end - place.start]
        caption = ""
        if not rest.follows(before):
            where = where_in(item, rest.start, rest.number, len(stored_items), rest.repeated)
            caption = f"[Continued: {where}.]"
        space.take_frame(_frame_chars(caption, item.after))
        space.take_text(rest.repeated)
        if not text or (parts and space.is_full):  # without text: the window ends before this item
            return LaterPart(tuple(parts), end, rest.place)
        shown = text[: _fitting(text, space)]
        space.take_text(shown)
        end = rest.start + len(shown)
        parts.append(Part(shown, caption, rest.repeated, left_chars=item.end - end, after=item.after))
        if end < item.end:
            following = text[len(shown) : len(shown) + 1]
            block_start = block_at_end(shown, rest.start, following, rest.block)
            return LaterPart(tuple(parts), end, Place(end, block_start))
        before = rest
    return LaterPart(tuple(parts), end, None)


class _Rest(NamedTuple):
    """What is left to show of an item: from `start` on, which is within `block`, if any."""

    number: int
    item: StoredItem
    start: int
    block: Block | None

    @property
    def place(self) -> Place:
        return Place(self.start, self.block.start if self.block else None)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the item was shown."""
        return self.start == self.item.start

    @property
    def repeated(self) -> str:
        """The lines that a part begins with, although an earlier part has shown them."""
        opening = self.block.opening if self.block else ""
        if self.is_whole or not self.item.title:
            return opening
        return f"{self.item.title}\n{opening}"

    def follows(self, before: _Rest | None) -> bool:
        """Return whether this is a whole item right behind another one of its label, which already says where it is."""
        if before is None or not self.is_whole:
            return False
        return before.number == self.number - 1 and before.item.label == self.item.label


def _rests(stored_items: Sequence[StoredItem], place: Place, window: str, opening: str) -> Iterator[_Rest]:
    """Yield what is left to show of each item: of the first one from `place` on, of others what no part has shown."""
    is_first = True
    for number, item in enumerate(stored_items, start=1):
        start = place.start if item.start <= place.start else item.shown
        if start >= item.end:
            continue
        block_start = item.block_start
        if is_first:
            block_start = place.block_start
        elif block_start is not None:
            opening = opening_lines(window[block_start - place.start :][:OPENING_CHARS])
        block = None if block_start is None else Block(block_start, opening)
        yield _Rest(number, item, start, block)
        is_first = False


def _frame_chars(caption: str, after: str) -> int:
    own_chars = len(caption) + len(after)
    return own_chars + MARK_CHARS + (CAPTION_CHARS if own_chars else 0)


def _fitting(text: str, space: Space) -> int:
    """Return where to cut a text so that it fits into the space; never before MIN_TEXT_CHARS."""
    max_chars = max(space.chars, 0)
    return boundary(text, max(fitting_chars(text[:max_chars], space.tokens), MIN_TEXT_CHARS))
