"""Deduplication of repeated log lines."""

from __future__ import annotations

from collections.abc import Hashable

from cachetools import LRUCache

_MAX_KEYS = 1_024


class Once:
    """LRU set of items that were logged."""

    def __init__(self) -> None:
        self._logged: LRUCache[int, None] = LRUCache(_MAX_KEYS)

    def first(self, *item: Hashable) -> bool:
        """Return whether an item is new, and store its hash."""
        key = hash(item)
        known = key in self._logged
        self._logged[key] = None
        return not known
