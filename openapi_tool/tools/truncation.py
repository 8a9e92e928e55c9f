"""Where a text that is too long for a model is cut, and where it goes on (tool-design section 3).

Lengths and positions are in characters. Nothing is lost between two parts: one begins where the
other ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from openapi_tool.protocol.cards import KeptText
from openapi_tool.protocol.jsontext import dumps
from openapi_tool.steps import Steps
from openapi_tool.tools.result import BLOCK_GAP, FRAME_CLOSE, FRAME_OPEN, untrusted

NOTE_CHARS = 500
"""Room that is kept for frames and for the line that says what is missing."""

_BOUNDARIES = ("\n\n", "\n", ". ", " ")
_WORTH_USING = 0.7
_PIECE_CHARS = 128 * 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """The first part of a text, where it ends, and how many whole blocks come after it (0: cut inside one)."""

    shown: str
    end: int
    blocks_left: int


def cut(blocks: Sequence[str], limit: int, *, whole: bool) -> Cut | None:
    """The first part of the blocks' text that is at most `limit` long; None where all of it is.

    With `whole`, blocks are left out from the end rather than cut, unless not even the first fits.
    """
    if text_chars(blocks) <= limit:
        return None
    count = _fitting(blocks, limit - NOTE_CHARS) if whole else 0
    if count:
        text = BLOCK_GAP.join(blocks[:count])
        return Cut(_closed(text), len(text), len(blocks) - count)
    start = _start(blocks, limit)
    end = boundary(start, limit - NOTE_CHARS)
    return Cut(_closed(start[:end]), end, 0)


def text_chars(blocks: Sequence[str]) -> int:
    """Length of the blocks' text."""
    return sum(map(len, blocks)) + len(BLOCK_GAP) * max(0, len(blocks) - 1)


def kept_text(blocks: Sequence[str]) -> Steps[KeptText]:
    """The blocks' text, all of it, as it is kept."""
    content, digest = bytearray(b'{"__type__":"TextContent","text":"'), hashlib.sha256()
    for piece in _pieces(blocks):
        content += dumps(piece)[1:-1]
        digest.update(piece.encode())
        yield
    content += b'"}'
    return KeptText(content, text_chars(blocks), digest.hexdigest())


def _pieces(blocks: Sequence[str]) -> Iterator[str]:
    for number, block in enumerate(blocks):
        if number:
            yield BLOCK_GAP
        yield from (block[start : start + _PIECE_CHARS] for start in range(0, len(block), _PIECE_CHARS))


def _fitting(blocks: Sequence[str], limit: int) -> int:
    ends = accumulate(len(block) + len(BLOCK_GAP) for block in blocks)
    return sum(end - len(BLOCK_GAP) <= limit for end in ends)


def _start(blocks: Sequence[str], limit: int) -> str:
    """The first `limit` characters of the blocks' text, without making all of it."""
    count = _fitting(blocks, limit)
    return BLOCK_GAP.join(block[:limit] for block in blocks[: count + 1])[:limit]


def boundary(text: str, limit: int) -> int:
    """Where a first part of at most `limit` characters ends: after a paragraph, else a line, sentence or word.

    A boundary that would leave much of the room unused does not count.
    """
    if len(text) <= limit:
        return len(text)
    for mark in _BOUNDARIES:
        at = text.rfind(mark, int(limit * _WORTH_USING), limit)
        if at >= 0:
            return at + len(mark)
    return limit


def _closed(shown: str) -> str:
    """A first part with the frame of web content closed where it was open."""
    shown = shown.rstrip()
    is_open = shown.rfind(FRAME_OPEN) > shown.rfind(FRAME_CLOSE)
    return f"{shown}\n{FRAME_CLOSE}" if is_open else shown


def later_part(text: str) -> str:
    """A part that is not the first: all of it in one frame."""
    return untrusted(text.replace(FRAME_OPEN, "").replace(FRAME_CLOSE, "").strip())
