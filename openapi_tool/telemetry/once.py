"""Deduplication of repeated log lines."""

from __future__ import annotations

from collections.abc import Hashable

from cachetools import LRUCache

_MOST = 1_024


class Once:
    """LRU set of items that were logged."""

    def __init__(self) -> None:
        self._said: LRUCache[int, None] = LRUCache(_MOST)

    def first(self, *item: Hashable) -> bool:
        """Return whether an item is new, and store its hash."""
        key = hash(item)
        known = key in self._said
        self._said[key] = None
        return not known
