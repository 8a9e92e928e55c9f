"""Whole text of a truncated result, encoded as the card in which it is stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from openapi_tool.protocol.cards import StoredText, new_id
from openapi_tool.protocol.jsontext import dumps
from openapi_tool.tools.output import PARAGRAPH_GAP, Item, texts
from openapi_tool.tools.stored_items import StoredItem

_PIECE_CHARS = 128 * 1024
"""Characters that are encoded at once. That takes a fraction of a millisecond, for which the thread that encodes a long
text holds the interpreter's lock, and so stops the event loop."""


def stored_text(items: Sequence[Item], stored_items: Sequence[StoredItem]) -> StoredText:
    """Return the whole text of the items, with the position of each in it."""
    content = bytearray(b'{"__type__":"TextContent","text":"')
    digest = hashlib.sha256()
    chars = 0
    for piece in _pieces(items):
        content += dumps(piece)[1:-1]  # without its quotes
        digest.update(piece.encode())
        chars += len(piece)
    content += b'"}'
    return StoredText(new_id(), content, chars, digest.hexdigest(), tuple(stored_items))


def _pieces(items: Sequence[Item]) -> Iterator[str]:
    """Yield the texts of the items and the gaps between them, in pieces."""
    for number, text in enumerate(texts(items)):
        if number:
            yield PARAGRAPH_GAP
        yield from (text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS))
