"""Locks by key: two tasks with the same key exclude each other, others do not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class KeyedLock:
    """Locks by key, each of which exists only while it is held. Those that wait for one get it in their order."""

    def __init__(self) -> None:
        # The keys of held locks, and who waits for each. A result of None passes the lock on.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[bool]:
        """Hold the lock of a key; yield whether it had to be awaited."""
        waiting = self._waiting.get(key)
        is_held = waiting is not None
        if waiting is None:
            self._waiting[key] = deque()
        else:
            await self._wait(key, waiting)
        try:
            yield is_held
        finally:
            self._release(key)

    async def _wait(self, key: Hashable, waiting: deque[asyncio.Future[None]]) -> None:
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            got_lock = turn.done() and not turn.cancelled()  # in the same iteration of the loop
            if got_lock:
                self._release(key)
            raise

    def _release(self, key: Hashable) -> None:
        """Pass the lock on to the first that still waits; without one, drop it."""
        waiting = self._waiting[key]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                return
        del self._waiting[key]
