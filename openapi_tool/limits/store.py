"""Store of the records that all replicas share (`bus/limit_store.py` implements it)."""

from __future__ import annotations

from typing import Protocol

RACES = 8
"""Attempts of a compare-and-set until it is given up."""


class Store(Protocol):
    """Shared records by name; every method raises Unavailable."""

    async def read(self, name: str) -> tuple[int, bytes | None]:
        """Return revision and value of a record; 0 and None if there is none."""

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        """Replace a record if it still has this revision, tell other replicas; return the new one, None if not."""
