"""Room in memory for the answers of all running calls together."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self


class ByteBudget:
    """So many bytes for the whole process; who finds no room waits for it, first come, first served."""

    def __init__(self, total_bytes: int) -> None:
        self._free = total_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free_bytes(self) -> int:
        """What nobody holds now."""
        return self._free

    def room(self) -> Room:
        """Room for one call, empty at first; a context manager that gives back what is held in the end."""
        return Room(self)

    async def _take(self, size: int) -> None:
        if not self._waiting and size <= self._free:
            self._free -= size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(size)
            else:
                self._waiting.remove((size, turn))
                self._give(0)
            raise

    def _give(self, size: int) -> None:
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            self._free -= size
            turn.set_result(None)


class Room:
    """What one call holds of the budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    @property
    def size(self) -> int:
        """Bytes that are held now."""
        return self._held

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.keep(0)

    async def take(self, size: int) -> None:
        """Hold `size` bytes instead of what is held now; waits until there are so many."""
        self.keep(0)
        await self._budget._take(size)  # noqa: SLF001 - a room is a part of its budget
        self._held = size

    def keep(self, size: int) -> None:
        """Hold only `size` of the bytes that are held, give the others back."""
        self._budget._give(self._held - size)  # noqa: SLF001 - a room is a part of its budget
        self._held = size
