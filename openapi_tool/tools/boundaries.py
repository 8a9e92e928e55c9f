"""Where a text that is too long is cut, so that its last paragraph, line, sentence or word stays whole."""

from __future__ import annotations

_BOUNDARIES = ("\n\n", "\n", ". ", " ")
_MIN_FILL = 0.7  # fraction of the limit: a boundary before that would waste too much space


def boundary(text: str, limit: int) -> int:
    """Return the number of characters, at most `limit`, after which to cut a text.

    Cut after a paragraph, else a line, sentence or word, if one ends in the last 30 % of `limit`; else at `limit`.
    """
    if len(text) <= limit:
        return len(text)
    for mark in _BOUNDARIES:
        at = text.rfind(mark, int(limit * _MIN_FILL), limit)
        if at >= 0:
            return at + len(mark)
    return limit
