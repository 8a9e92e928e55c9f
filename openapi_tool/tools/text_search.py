"""Search in a stored text: what is asked for, and what is found (tool-design section 3).

A search is for a *phrase*, which is found literally (`phrase_search.py`), or for a *question*, whose best passages are
found (`question_search.py`). Lengths and positions are in characters.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_SHOWN = 8
"""Passages in a result."""


class SearchRequest(NamedTuple):
    """Search in a stored text for a phrase or question; `name` is `find` or `question`."""

    name: str
    text: str


class Span(NamedTuple):
    """What to show of a match at `at`: at most `chars` characters from there on, and `before` characters before it."""

    at: int
    chars: int
    before: int = 0
