"""Shared state in the memory of one process: for tests, and for a process that shares nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
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


class MemoryTexts:
    """Texts in memory that expire `ttl_s` seconds after they were stored."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._texts: dict[str, tuple[float, bytes]] = {}  # expiry and text, oldest first

    async def put(self, name: str, text: bytes) -> None:
        """See `Texts`."""
        self._drop_expired()
        self._texts.pop(name, None)
        self._texts[name] = self._clock() + self._ttl_s, text

    async def get(self, name: str) -> bytes | None:
        """See `Texts`."""
        self._drop_expired()
        return self._texts[name][1] if name in self._texts else None

    async def delete(self, name: str) -> None:
        """See `Texts`."""
        self._texts.pop(name, None)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._texts and next(iter(self._texts.values()))[0] <= now:
            del self._texts[next(iter(self._texts))]
