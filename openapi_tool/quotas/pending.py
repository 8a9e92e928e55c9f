"""Changes of this process that a shared record does not contain yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Pending(Generic[Item]):
    """List of changes, each of which stays until a write that contains it has succeeded.

    A write takes some time, and begins again after a conflict. What is added meanwhile is left for the next write.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._number_taken = 0  # of the items, from the first on, that the running write contains

    def add(self, item: Item) -> None:
        """Add a change for the next write."""
        self._items.append(item)

    def replace(self, items: Iterable[Item]) -> None:
        """Let the next write contain these changes only."""
        self._items = list(items)
        self._number_taken = 0

    def take(self) -> list[Item]:
        """Return all changes for a write. After a failed or repeated write they are returned again."""
        self._number_taken = len(self._items)
        return list(self._items)

    def written(self) -> None:
        """Remove what `take` returned last: the write has succeeded."""
        del self._items[: self._number_taken]
        self._number_taken = 0
