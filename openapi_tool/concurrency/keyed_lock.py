"""Locks by key."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class KeyedLock:
    """FIFO locks by key; each exists only while it is held."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[bool]:
        """Hold the lock of a key; yield whether it had to be awaited."""
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = deque()
        else:
            await self._turn(key, waiting)
        try:
            yield waiting is not None
        finally:
            self._release(key)

    async def _turn(self, key: Hashable, waiting: deque[asyncio.Future[None]]) -> None:
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it holds the lock already
                self._release(key)
            raise

    def _release(self, key: Hashable) -> None:
        waiting = self._waiting[key]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[key]
