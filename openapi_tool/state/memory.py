"""Records in the memory of one process, for tests and measurements."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from openapi_tool.state.port import OnChange, Stored


class MemoryRecords:
    """Records in memory; several users of one object share them."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}
        self._revisions = count(1)
        self._watching: list[OnChange] = []

    async def read(self, key: str) -> Stored:
        """See `Records`."""
        return self._stored.get(key, Stored())

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """See `Records`."""
        if self._stored.get(key, Stored()).revision != revision:
            return None
        self._stored[key] = written = Stored(value, next(self._revisions))
        for on_change in list(self._watching):
            on_change(key, written)
        return written.revision

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """See `Records`."""
        self._watching.append(on_change)
        try:
            yield
        finally:
            self._watching.remove(on_change)
