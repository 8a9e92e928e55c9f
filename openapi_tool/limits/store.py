"""Store of the records that all replicas share (`bus/shared_records.py` implements it)."""

from __future__ import annotations

from typing import Protocol

MAX_WRITE_ATTEMPTS = 8  # of a compare-and-set


class Store(Protocol):
    """Shared records by name; every method raises Unavailable."""

    async def read(self, name: str) -> tuple[int, bytes | None]:
        """Return revision and value of a record; 0 and None if there is none."""

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision, and notify the other replicas.

        Return the new revision, None if another replica was faster.
        """
