"""Records in the memory of one process, for tests and measurements."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from openapi_tool.state.port import OnChange, Stored


class MemoryRecords:
    """Records (`Records`) in memory; several users of one object share them."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}
        self._revisions = count(1)
        self._watching: list[OnChange] = []

    async def read(self, key: str) -> Stored:
        """Return a record; `Stored()` if it was never written."""
        return self._stored.get(key, Stored())

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision, 0 if there is none; return the new revision, or None."""
        if self._stored.get(key, Stored()).revision != revision:
            return None
        written = Stored(value, next(self._revisions))
        self._stored[key] = written
        for on_change in list(self._watching):
            on_change(key, written)
        return written.revision

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """Call `on_change` for changed records while the context is open."""
        self._watching.append(on_change)
        try:
            yield
        finally:
            self._watching.remove(on_change)
