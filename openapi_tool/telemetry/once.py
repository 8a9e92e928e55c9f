"""What is logged once, however many calls meet it."""

from __future__ import annotations

from collections.abc import Hashable

from cachetools import LRUCache

_MOST = 1_024


class Once:
    """Remember what was said; the oldest is forgotten when there is too much of it."""

    def __init__(self) -> None:
        self._said: LRUCache[int, None] = LRUCache(_MOST)

    def first(self, *thing: Hashable) -> bool:
        """Return whether a thing is new, and remember it by its hash."""
        key = hash(thing)
        known = key in self._said
        self._said[key] = None
        return not known
