"""What a model is shown of a result first: all of it, or a first part (tool-design section 3).

A result has *items*: search results, or pages. Each has a *head* (title and address) and a *body*, and may have a
*caption*, a line of this service above it (`output.Item`). `uncut_parts` returns all of them if they are within the
limit. Else `truncate` cuts them, and divides the space fairly, so that one long item does not hide the others. The
model gets the rest by a cursor (`later_parts.py`). Lengths and positions are in characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from openapi_tool.tools.blocks import block_at_end
from openapi_tool.tools.boundaries import boundary
from openapi_tool.tools.fair_shares import max_min_shares
from openapi_tool.tools.frames import CAPTION_CHARS, CUT_CHARS, INTRO_CHARS, MARK_CHARS, Part
from openapi_tool.tools.output import PARAGRAPH_GAP, Item, texts
from openapi_tool.tools.result_limit import FRAME_CHARS_PER_TOKEN, MIN_TEXT_CHARS, NOTE_CHARS, ResultLimit, Space
from openapi_tool.tools.stored_items import Place, StoredItem
from openapi_tool.tools.tokens import estimate_tokens, fitting_chars
from openapi_tool.tools.wording import short

# Minimum space for an item; with less it is left out of the first part.
_MIN_PAGE_CHARS = 600  # of a batch; less is hardly worth its frames
_MIN_HEAD_CHARS = 500  # of a head that is longer than this
_MIN_ASCII_CHARS_PER_TOKEN = 2  # unless a text is all punctuation
_MAX_TITLE_CHARS = 120
_MAX_ADDRESS_CHARS = 200


def uncut_parts(items: Sequence[Item], limit: ResultLimit) -> tuple[Part, ...] | None:
    """Return the items uncut, each as one part; None if with frames they exceed `limit`."""
    chars = INTRO_CHARS
    for item in items:
        chars += item.chars + MARK_CHARS
        if item.caption:
            chars += len(item.caption) + CAPTION_CHARS
        if item.after:
            chars += len(item.after) + CAPTION_CHARS
    if chars > limit.chars or not _fits_tokens(items, chars, limit.tokens):
        return None
    return tuple(Part(item.text, item.caption, after=item.after) for item in items)


def _fits_tokens(items: Sequence[Item], chars: int, max_tokens: int) -> bool:
    """Return whether the items have at most `max_tokens`; with frames they have `chars` characters."""
    if chars <= _MIN_ASCII_CHARS_PER_TOKEN * max_tokens and all(text.isascii() for text in texts(items)):
        return True  # estimating the tokens would take CPU
    frame_chars = chars - sum(map(len, texts(items)))
    return frame_chars // FRAME_CHARS_PER_TOKEN + sum(map(estimate_tokens, texts(items))) <= max_tokens


class Truncated(NamedTuple):
    """First part of a result: the parts of its items that are shown, and all items of the stored text."""

    parts: tuple[Part, ...]
    stored_items: tuple[StoredItem, ...]

    @property
    def left_chars(self) -> int:
        """Number of characters that are not shown."""
        return sum(part.left_chars for part in self.parts)

    @property
    def next(self) -> Place:
        """Place where the next part begins."""
        first_cut = next(item for item in self.stored_items if item.shown < item.end)
        return Place(first_cut.shown, first_cut.block_start)


def truncate(items: Sequence[Item], limit: ResultLimit) -> Truncated:
    """Cut items so that together, with frames and note, they are within `limit`.

    First all heads get max-min fair shares of the space, then all bodies. If there is no space for every head, the last
    items are left out.
    """
    first_left_out = _first_left_out(items, limit)
    # An item without web content is a remark of this service, which is never left out.
    are_shown = [index < first_left_out or not item.chars for index, item in enumerate(items)]
    frame_chars = sum(_frame_chars(item) for item, is_shown in zip(items, are_shown, strict=True) if is_shown)
    space = limit.space(NOTE_CHARS + frame_chars)
    space = Space(max(2, space.chars), max(2, space.tokens))  # so that captions, which get half of it, have at least 1

    captions = [item.caption if is_shown else "" for item, is_shown in zip(items, are_shown, strict=True)]
    captions = _fit_captions(captions, space)
    for caption in captions:
        space.take_text(caption)

    sizes = _fair_sizes(items[:first_left_out], space)
    sizes += [0] * (len(items) - first_left_out)
    parts = [_part(item, caption, _end(item, size)) for item, caption, size in zip(items, captions, sizes, strict=True)]
    return Truncated(tuple(parts), tuple(_stored_items(items, parts)))


def _frame_chars(item: Item) -> int:
    """Return the characters of all that is around the web content of an item, except its caption."""
    chars = 0
    if item.caption:
        chars += CAPTION_CHARS
    if item.after:
        chars += len(item.after) + CAPTION_CHARS
    if item.chars:
        chars += MARK_CHARS + CUT_CHARS
    return chars


def _first_left_out(items: Sequence[Item], limit: ResultLimit) -> int:
    """Return the index of the first item for which there is no minimum space; the number of items if there is none."""
    space = limit.space(NOTE_CHARS)
    are_pages = all(item.caption for item in items)  # as those of a batch
    has_text = False  # whether an item before the current one has web content
    for index, item in enumerate(items):
        if are_pages:
            min_chars = _MIN_PAGE_CHARS
        elif item.head:
            min_chars = min(len(item.head), _MIN_HEAD_CHARS)
        else:
            min_chars = MIN_TEXT_CHARS
        beginning = item.part(min_chars)
        frame_chars = _frame_chars(item)
        space.chars -= frame_chars + max(len(beginning), min(item.chars, MIN_TEXT_CHARS))
        space.tokens -= -(-frame_chars // FRAME_CHARS_PER_TOKEN) + estimate_tokens(beginning)  # rounded up
        is_too_much = space.chars < 0 or space.tokens < 0
        if is_too_much and has_text:  # the first item with web content is never left out: it is cut
            return index
        has_text = has_text or item.chars > 0
    return len(items)


def _fit_captions(captions: Sequence[str], space: Space) -> list[str]:
    """Return the captions, shortened to at most half of `space` together."""
    max_chars = max_min_shares(list(map(len, captions)), space.chars // 2)
    max_tokens = max_min_shares(list(map(estimate_tokens, captions)), space.tokens // 2)
    return [
        short(text, max(1, min(chars, fitting_chars(text, tokens))))
        for text, chars, tokens in zip(captions, max_chars, max_tokens, strict=True)
    ]


def _fair_sizes(items: Sequence[Item], space: Space) -> list[int]:
    """Return how many characters are shown of each item: first by fair shares of the characters, then of the tokens."""
    for_heads = max_min_shares([len(item.head) for item in items], space.chars)
    for_bodies = max_min_shares([item.chars - len(item.head) for item in items], space.chars - sum(for_heads))
    sizes = [head + body for head, body in zip(for_heads, for_bodies, strict=True)]
    return _within_tokens(items, sizes, space.tokens)


def _within_tokens(items: Sequence[Item], sizes: list[int], max_tokens: int) -> list[int]:
    """Return the sizes in characters, reduced if together they have more than `max_tokens`."""
    beginnings = [item.part(size) for item, size in zip(items, sizes, strict=True)]
    tokens = [estimate_tokens(beginning) for beginning in beginnings]
    if sum(tokens) <= max_tokens:
        return sizes
    heads = [beginning[: len(item.head)] for item, beginning in zip(items, beginnings, strict=True)]
    head_tokens = [estimate_tokens(head) for head in heads]
    body_tokens = [max(0, whole - head) for whole, head in zip(tokens, head_tokens, strict=True)]
    for_heads = max_min_shares(head_tokens, max_tokens)
    for_bodies = max_min_shares(body_tokens, max_tokens - sum(for_heads))
    reduced: list[int] = []
    for index, beginning in enumerate(beginnings):
        size = fitting_chars(beginning, for_heads[index] + for_bodies[index])
        if for_heads[index] >= head_tokens[index]:
            # The estimates of head and body do not add up exactly to that of both: never cut a head that fits.
            size = max(size, len(heads[index]))
        reduced.append(size)
    return reduced


def _end(item: Item, max_chars: int) -> int:
    """Return where to cut an item: at a boundary, but not within a head that fits."""
    if max_chars >= item.chars:
        return item.chars
    end = boundary(item.part(max_chars + 1), max_chars)
    head_end = len(item.head)
    return max(end, head_end) if max_chars >= head_end else end


def _part(item: Item, caption: str, end: int) -> Part:
    return Part(item.part(end), caption, left_chars=item.chars - end, after=item.after)


def _stored_items(items: Sequence[Item], parts: Sequence[Part]) -> Iterator[StoredItem]:
    """Yield the positions of the items in the stored text, in which `stored_text` joins all texts by gaps."""
    position = 0
    for item, part in zip(items, parts, strict=True):
        if item.caption:
            position += len(item.caption) + len(PARAGRAPH_GAP)
        if item.chars:
            yield _stored_item(item, position, part.text)
            position += item.chars + len(PARAGRAPH_GAP)
        if item.after:
            position += len(item.after) + len(PARAGRAPH_GAP)


def _stored_item(item: Item, start: int, shown: str) -> StoredItem:
    block_start = None
    shown_chars = len(shown)
    if shown_chars < item.chars:
        # Only the body may have blocks: no line of a head is meant as Markdown.
        body_at = item.chars - len(item.body)
        following = item.part(shown_chars + 1)[shown_chars:]
        block_start = block_at_end(shown[body_at:], start + body_at, following)
    return StoredItem(start, start + shown_chars, start + item.chars, block_start, _title(item), item.label, item.after)


def _title(item: Item) -> str:
    """Return the first two lines of an item's head: its title and its address."""
    title, address, *_ = [*item.head.split("\n", 2), "", ""]
    if len(address) > _MAX_ADDRESS_CHARS:
        address = ""  # a part of an address leads nowhere
    return f"{title[:_MAX_TITLE_CHARS]}\n{address}".rstrip("\n")
