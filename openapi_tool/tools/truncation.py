"""Truncation and pagination of results (tool-design section 3).

Lengths and positions are in characters. A part begins where the one before ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from openapi_tool.protocol.records import StoredFields
from openapi_tool.tools.frames import CAPTION_CHARS, CUT_CHARS, INTRO_CHARS, MARK_CHARS, Part
from openapi_tool.tools.output import BLOCK_GAP, Item, texts
from openapi_tool.tools.tokens import estimate_tokens, fitting_chars
from openapi_tool.tools.wording import short

NOTE_CHARS = 500
"""Reserved for the introduction of frames and the note about what is missing."""

_BOUNDARIES = ("\n\n", "\n", ". ", " ")
_MIN_FILL = 0.7  # fraction of the limit: do not cut at a boundary before that
MIN_CHARS = 150
"""Minimum space for an item, enough for title and address; else it is left out."""
_MIN_PAGE_CHARS = 600
"""The same for a page of a batch, of which less is hardly worth its frames: later ones follow whole with the cursor."""
FRAME_CHARS = MARK_CHARS + CAPTION_CHARS + CUT_CHARS
"""Maximum of frame lines around a part."""
FRAME_CHARS_PER_TOKEN = 3
"""Estimate for frame lines and notes."""
_MIN_ASCII_CHARS_PER_TOKEN = 2  # unless a text is all punctuation
_MIN_HEAD_CHARS = 500  # an item is left out if there is no space for this much of its head
_MAX_TITLE_CHARS = 120
_MAX_LINE_CHARS = 200
OPENING_CHARS = 3 * _MAX_LINE_CHARS
"""Enough at an opening for the lines that are repeated."""
_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)([^`\n]*+)$", re.MULTILINE)
_TABLE_RULE_CHARS = frozenset("|-: ")
_BEFORE_TEXT = -1
"""Instead of a position: the code block or table begins before the text that is searched."""


class StoredItem(NamedTuple):
    """Item in a stored text, from `start` to `end`. The first result showed it up to `shown`.

    `opening` is the start of the code block or table that contains `shown`, None outside of one. `title` holds the
    lines that identify the item.
    """

    start: int
    shown: int
    end: int
    opening: int | None = None
    title: str = ""
    label: str = ""
    after: str = ""


class Truncated(NamedTuple):
    """Parts that are shown, items of the stored text, and the number of characters left out."""

    parts: tuple[Part, ...]
    stored_items: tuple[StoredItem, ...]
    left: int

    @property
    def next(self) -> Place:
        """Place where the next part begins."""
        return next(Place(item.shown, item.opening) for item in self.stored_items if item.shown < item.end)


@dataclass(frozen=True, slots=True)
class ResultLimit:
    """Maximum of what a model is shown at once; tokens by estimate."""

    chars: int
    tokens: int

    def minus(self, chars: int) -> ResultLimit:
        """Return what a note of `chars` characters leaves."""
        return ResultLimit(self.chars - chars, self.tokens - chars // 4)  # 4 characters per token


def uncut_parts(items: Sequence[Item], limit: ResultLimit) -> tuple[Part, ...] | None:
    """Return the items uncut, each as one part; None if they exceed `limit`."""
    chars = INTRO_CHARS + sum(item.chars + MARK_CHARS for item in items)
    chars += sum(len(own) + CAPTION_CHARS for item in items for own in (item.caption, item.after) if own)
    if chars > limit.chars or not _fits_tokens(items, chars, limit.tokens):
        return None
    return tuple(Part(item.text, item.caption, after=item.after) for item in items)


def _fits_tokens(items: Sequence[Item], chars: int, max_tokens: int) -> bool:
    if chars <= _MIN_ASCII_CHARS_PER_TOKEN * max_tokens and all(text.isascii() for text in texts(items)):
        return True  # estimating the tokens would take CPU
    frame_chars = chars - sum(map(len, texts(items)))
    return frame_chars // FRAME_CHARS_PER_TOKEN + sum(map(estimate_tokens, texts(items))) <= max_tokens


def truncate(items: Sequence[Item], limit: ResultLimit) -> Truncated:
    """Cut items so that together, with frames and note, they are within `limit`.

    First all heads get max-min fair shares of the space, then all bodies. If there is no space for every head, the last
    items are left out.
    """
    left_out = _left_out(items, limit)
    frame_chars = sum(_frame_chars(item) for index, item in enumerate(items) if index not in left_out)
    space = max(2, limit.chars - NOTE_CHARS - frame_chars)  # captions get half of it, so at least 1
    space_tokens = max(2, limit.tokens - (NOTE_CHARS + frame_chars) // FRAME_CHARS_PER_TOKEN)
    kept_captions = ["" if index in left_out else item.caption for index, item in enumerate(items)]
    captions = _fit_captions(kept_captions, space, space_tokens)
    count = min(left_out, default=len(items))
    shares = _item_shares(items[:count], space - sum(map(len, captions))) + [0] * (len(items) - count)
    shares = _within_tokens(items, shares, space_tokens - sum(map(estimate_tokens, captions)))
    ends = [_end(item, share) for item, share in zip(items, shares, strict=True)]
    parts: list[Part] = []
    stored_items: list[StoredItem] = []
    at = 0  # position in the stored text, as `stored_text` joins it
    for item, caption, end in zip(items, captions, ends, strict=True):
        if item.caption:
            at += len(item.caption) + len(BLOCK_GAP)
        text = item.part(end)
        body_at = item.chars - len(item.body)
        # Search the body only: no line of a head opens a code block or table.
        opening = opening_of(text[body_at:], item.part(end + 1)[end:]) if end < item.chars else None
        parts.append(Part(text, caption, left=item.chars - end, after=item.after))
        if item.chars:
            opening = None if opening is None else at + body_at + opening
            stored_items.append(
                StoredItem(at, at + end, at + item.chars, opening, _title(item), item.label, item.after)
            )
            at += item.chars + len(BLOCK_GAP)
        if item.after:
            at += len(item.after) + len(BLOCK_GAP)
    return Truncated(tuple(parts), tuple(stored_items), sum(part.left for part in parts))


def _frame_chars(item: Item) -> int:
    chars = 0
    if item.caption:
        chars += CAPTION_CHARS
    if item.after:
        chars += len(item.after) + CAPTION_CHARS
    if item.chars:
        chars += MARK_CHARS + CUT_CHARS
    return chars


def _left_out(items: Sequence[Item], limit: ResultLimit) -> frozenset[int]:
    """Return the indexes of the items that are left out: what must be shown of earlier ones takes all space."""
    chars = limit.chars - NOTE_CHARS
    tokens = limit.tokens - NOTE_CHARS // FRAME_CHARS_PER_TOKEN
    are_pages = all(item.caption for item in items)
    first = next((index for index, item in enumerate(items) if item.chars), 0)
    for index, item in enumerate(items):
        head_chars = min(len(item.head), _MIN_HEAD_CHARS) or MIN_CHARS
        head = item.part(_MIN_PAGE_CHARS if are_pages else head_chars)
        chars -= _frame_chars(item) + max(len(head), min(item.chars, MIN_CHARS))
        tokens -= -(-_frame_chars(item) // FRAME_CHARS_PER_TOKEN) + estimate_tokens(head)
        # The first text and captions alone stay: they are shortened.
        if index > first and (chars < 0 or tokens < 0):
            return frozenset(later for later in range(index, len(items)) if items[later].chars)
    return frozenset()


def _fit_captions(captions: Sequence[str], space: int, tokens: int) -> list[str]:
    """Return the captions, shortened to at most half of `space` and `tokens` together."""
    max_chars = max_min_shares(list(map(len, captions)), space // 2)
    max_tokens = max_min_shares(list(map(estimate_tokens, captions)), tokens // 2)
    return [
        short(text, max(1, min(chars, fitting_chars(text, tokens))))
        for text, chars, tokens in zip(captions, max_chars, max_tokens, strict=True)
    ]


def _title(item: Item) -> str:
    title, address, *_ = [*item.head.split("\n", 2), "", ""]
    if len(address) > _MAX_LINE_CHARS:
        address = ""
    return f"{title[:_MAX_TITLE_CHARS]}\n{address}".rstrip("\n")


def _item_shares(items: Sequence[Item], space: int) -> list[int]:
    heads = max_min_shares([len(item.head) for item in items], space)
    bodies = max_min_shares([item.chars - len(item.head) for item in items], space - sum(heads))
    return [head + body for head, body in zip(heads, bodies, strict=True)]


def _within_tokens(items: Sequence[Item], shares: Sequence[int], space: int) -> list[int]:
    """Return the shares in characters, reduced if together they have more tokens than `space`."""
    parts = [item.part(chars) for item, chars in zip(items, shares, strict=True)]
    sizes = [estimate_tokens(part) for part in parts]
    if sum(sizes) <= space:
        return list(shares)
    heads = [part[: len(item.head)] for item, part in zip(items, parts, strict=True)]
    head_sizes = list(map(estimate_tokens, heads))
    for_heads = max_min_shares(head_sizes, max(0, space))
    bodies = [max(0, size - head) for size, head in zip(sizes, head_sizes, strict=True)]
    for_bodies = max_min_shares(bodies, max(0, space - sum(for_heads)))
    ends = [fitting_chars(part, head + body) for part, head, body in zip(parts, for_heads, for_bodies, strict=True)]
    # The estimates of parts do not add up exactly to that of the whole: never cut a head that fits.
    whole = [len(head) if share >= size else 0 for head, share, size in zip(heads, for_heads, head_sizes, strict=True)]
    return list(map(max, ends, whole))


def max_min_shares(sizes: Sequence[int], space: int) -> list[int]:
    """Return max-min fair shares of `space`: small sizes in full, equal shares for the others."""
    shares = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    for done, index in enumerate(smallest_first):
        shares[index] = min(sizes[index], space // (len(sizes) - done))
        space -= shares[index]
    return shares


def _end(item: Item, limit: int) -> int:
    """Return where to cut an item: at a boundary, but not within a head that fits."""
    if limit >= item.chars:
        return item.chars
    end = boundary(item.part(limit + 1), limit)
    head_end = len(item.head)
    return max(end, head_end) if limit >= head_end else end


def boundary(text: str, limit: int) -> int:
    """Return where to cut a text: after a paragraph, else a line, sentence or word, else at `limit`.

    A boundary counts only in the last 30 % of `limit`.
    """
    if len(text) <= limit:
        return len(text)
    for mark in _BOUNDARIES:
        at = text.rfind(mark, int(limit * _MIN_FILL), limit)
        if at >= 0:
            return at + len(mark)
    return limit


def opening_of(text: str, following: str, inherited: str = "") -> int | None:
    """Return the start of the code block or table in which a text ends, None outside of one.

    `following` begins with the character after the text. `inherited` holds the first lines of the one in which the text
    begins, if any; return _BEFORE_TEXT if the text also ends in that.
    """
    opened = _FENCE.match(inherited)
    fence = (_BEFORE_TEXT, opened[1]) if opened else None
    for line in _FENCE.finditer(text):
        if fence is None:
            fence = (line.start(), line[1])
        elif line[1].startswith(fence[1]) and not line[2].strip():
            fence = None
    return fence[0] if fence else _table(text, following, inherited)


def _table(text: str, following: str, inherited: str) -> int | None:
    if text.endswith("\n") and not following.startswith("|"):
        return None
    begin = None
    line_end = len(text.removesuffix("\n"))
    while line_end >= 0 and text.startswith("|", line := text.rfind("\n", 0, line_end) + 1):
        begin = line
        line_end = line - 1
    if begin == 0 and inherited.startswith("|"):
        return _BEFORE_TEXT
    return begin if begin is not None and opening_lines(text[begin : begin + OPENING_CHARS]) else None


def opening_lines(text: str) -> str:
    """Return the lines of a code block or table to repeat in later parts: its fence, or header and rule."""
    first, second, *_ = [*text.split("\n", 2), "", ""]
    if len(first) > _MAX_LINE_CHARS or len(second) > _MAX_LINE_CHARS:
        return ""
    if _FENCE.fullmatch(first):
        return f"{first}\n"
    is_table = first.startswith("|") and "-" in second and _TABLE_RULE_CHARS.issuperset(second)
    return f"{first}\n{second}\n" if is_table else ""


def stored_items_of(stored: Sequence[StoredFields] | None, chars: int) -> list[StoredItem]:
    """Return the items of a stored text of `chars` characters; an old text is one item."""
    return [StoredItem(*place) for place in stored] if stored else [StoredItem(0, 0, chars)]


class Place(NamedTuple):
    """Start of a part in a stored text, and of the code block or table that contains it."""

    start: int
    opening: int | None = None


class LaterPart(NamedTuple):
    """Parts shown in a later part, its end, and the place of the next one, None after the last."""

    parts: tuple[Part, ...]
    end: int
    next: Place | None


def later_part(
    stored_items: Sequence[StoredItem], place: Place, window: str, opening: str, limit: ResultLimit
) -> LaterPart:
    """Return what follows `place`, within `limit`.

    `window` is the stored text from `place` on, as far as it was read; `opening` the lines at `place.opening`.
    """
    parts: list[Part] = []
    space = limit.chars - NOTE_CHARS - CUT_CHARS
    tokens = limit.tokens - (NOTE_CHARS + CUT_CHARS) // FRAME_CHARS_PER_TOKEN
    at = place.start
    count = len(stored_items)
    label, last = None, 0  # label and number of the item before
    for number, item in enumerate(stored_items, start=1):
        # Each further item continues where the first result cut it.
        begin = place.start if item.start <= place.start else max(item.shown, place.start)
        if begin >= item.end:
            continue
        opening_at = item.opening if parts else place.opening
        if parts:
            opening = "" if opening_at is None else opening_lines(window[opening_at - place.start :][:OPENING_CHARS])
        text = window[begin - place.start : item.end - place.start]
        lines = opening if begin == item.start or not item.title else f"{item.title}\n{opening}"
        # A whole item right behind another one of its label needs no line that says where it is.
        is_next = begin == item.start and item.label == label and last == number - 1
        label, last = item.label, number
        position = where_in(item, begin, number if count > 1 else None, count, lines.count("\n"))
        caption = "" if is_next else f"[Continued: {position}.]"
        notes = len(caption) + len(item.after)
        frame = MARK_CHARS + (CAPTION_CHARS if notes else 0)
        space -= notes + len(lines) + frame
        tokens -= (notes + frame) // FRAME_CHARS_PER_TOKEN + estimate_tokens(lines)
        is_full = space < MIN_CHARS or tokens < MIN_CHARS // FRAME_CHARS_PER_TOKEN
        if not text or (parts and is_full):
            return LaterPart(tuple(parts), at, Place(begin, opening_at))
        fitting = min(space, fitting_chars(text[: max(space, 0)], tokens))
        size = boundary(text, max(fitting, MIN_CHARS))
        at = begin + size
        space -= size
        tokens -= estimate_tokens(text[:size])
        parts.append(Part(text[:size], caption, lines, item.end - at, item.after))
        if at < item.end:
            found = opening_of(text[:size], text[size : size + 1], opening)
            if found == _BEFORE_TEXT:  # the part ends in the code block or table in which it began
                next_opening = opening_at
            elif found is None:
                next_opening = None
            else:
                next_opening = begin + found
            return LaterPart(tuple(parts), at, Place(at, next_opening))
    return LaterPart(tuple(parts), at, None)


def where_in(item: StoredItem, begin: int, number: int | None, count: int, repeated: int) -> str:
    """Describe where a part begins; `number` is None for a single item."""
    name = item.label or ("" if number is None else f"item {number} of {count}")
    prefix = f"{name}, " if name else ""
    lines = ""
    if repeated:
        lines = "; its first line is repeated" if repeated == 1 else f"; its first {repeated} lines are repeated"
    return f"{prefix}from character {begin - item.start + 1:,} of {item.end - item.start:,}{lines}"
