"""Limit of the memory that upstream responses use: a semaphore that counts bytes, with a reserve.

Many calls may read large pages at the same time. So a call takes memory for a large response, and waits while too
little is free. It releases the memory once its result is stored. Two objects take part:

- `ByteSemaphore`: the memory of the process, which calls take and give back;
- `ResponseMemory`: what one call holds of it.

Responses of up to 64 kB (`SMALL`) take no memory from the semaphore, so they never wait behind large ones.

**No deadlock.** Two calls that hold memory and need more could wait for each other. So a part of the memory is a
*reserve*, as large as the most that one call may need. One call at a time gets it. That call never waits for memory
again, so it ends, and releases the reserve.

**Fairness.** One project holds at most half of the memory outside of the reserve. So it cannot block other projects
with responses that are slow on purpose.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Self


class ByteSemaphore:
    """Memory of `total_bytes` for the process; `reserve_bytes` of them are for one call that already holds memory.

    Waiting calls are served in their order, with two exceptions. Calls that hold memory come before those that hold
    none, since they release it sooner. And no call waits behind calls of a project that has used up its share.

    `free_bytes` does not count the reserve. The call that has the reserve holds nothing else (`held` is 0).
    """

    def __init__(self, total_bytes: int, reserve_bytes: int = 0) -> None:
        self.free_bytes = total_bytes - reserve_bytes
        self._share = self.free_bytes // 2
        self._reserve_is_free = reserve_bytes > 0
        self._last_reserve_project: str | None = None
        self._waiting: deque[_Waiter] = deque()
        self._held_by_project: Counter[str | None] = Counter()

    @property
    def waiting(self) -> int:
        """Number of waiting responses."""
        return len(self._waiting)

    def for_call(self, project: str | None = None) -> ResponseMemory:
        """Return the memory of a new call; without a `project` no share limits it."""
        return ResponseMemory(self, project)

    async def take(self, memory: ResponseMemory, size: int) -> None:
        """Wait until a call holds `size` bytes more in `memory`. A cancelled wait takes nothing."""
        if self.try_take(memory, size):
            return
        waiter = _Waiter(memory, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()  # a call that holds memory may get the reserve at once
        try:
            await waiter.granted
        except asyncio.CancelledError:
            was_granted = waiter.granted.done() and not waiter.granted.cancelled()
            if was_granted:  # in the same iteration of the event loop in which the wait was cancelled
                self.give(memory, size)
            else:
                with suppress(ValueError):
                    self._waiting.remove(waiter)
                self._serve()  # others may have waited behind it
            raise

    def try_take(self, memory: ResponseMemory, size: int) -> bool:
        """Take `size` bytes more if that needs no wait; return whether it took them."""
        if memory.has_reserve:  # it covers all that the call may need
            return True
        if not self._has_room(memory, size) or self._must_queue(memory):
            return False
        self._move(memory, size)
        return True

    def give(self, memory: ResponseMemory, size: int) -> None:
        """Release `size` bytes, at most all that `memory` holds."""
        self._move(memory, -min(size, memory.held))
        self._serve()

    def give_all(self, memory: ResponseMemory) -> None:
        """Release all memory and the reserve."""
        self._reserve_is_free |= memory.has_reserve
        memory.has_reserve = False
        self.give(memory, memory.held)

    def release_all_but(self, memory: ResponseMemory, size: int) -> None:
        """Release all but `size` bytes.

        A call that has the reserve gives it back, and takes `size` bytes of the other memory in its place. If fewer are
        free, it keeps the whole reserve.
        """
        if memory.has_reserve:
            if size > self.free_bytes:
                return
            memory.has_reserve = False
            self._reserve_is_free = True
            self._move(memory, size)
        self.give(memory, max(0, memory.held - size))

    def _serve(self) -> None:
        """Grant memory to all waiters that can have it now."""
        while self._waiting:
            waiter = self._next_waiter()
            if waiter is None:
                return
            self._grant(waiter)
            self._waiting.remove(waiter)
            waiter.granted.set_result(None)

    def _next_waiter(self) -> _Waiter | None:
        """Return the next waiter that can have its memory now, if any; skip projects that have used up their share.

        The first waiter of another project is waited for: while too little memory is free for it, nobody comes next.
        """
        blocked_projects: set[str | None] = set()
        waiters = [waiter for waiter in self._waiting if not waiter.granted.done()]
        for waiter in sorted(waiters, key=self._rank):
            memory = waiter.memory
            # A call can have the reserve and wait: it got that for another of its responses.
            if memory.has_reserve or (memory.held and self._reserve_is_free):
                return waiter
            if memory.project not in blocked_projects and self._within_share(memory, waiter.size):
                return waiter if waiter.size <= self.free_bytes else None
            blocked_projects.add(memory.project)
        return None

    def _rank(self, waiter: _Waiter) -> _Rank:
        memory = waiter.memory
        if memory.has_reserve:
            return _Rank.HAS_RESERVE
        if not memory.held:
            return _Rank.HOLDS_NONE
        had_reserve_last = memory.project is not None and memory.project == self._last_reserve_project
        return _Rank.HOLDS_MEMORY_AFTER_RESERVE if had_reserve_last else _Rank.HOLDS_MEMORY

    def _grant(self, waiter: _Waiter) -> None:
        """Give a waiter its bytes, or the reserve if so many are not free."""
        memory = waiter.memory
        if memory.has_reserve:
            return
        if self._has_room(memory, waiter.size):
            self._move(memory, waiter.size)
        else:
            self._reserve_is_free = False
            self._last_reserve_project = memory.project
            memory.has_reserve = True
            self._move(memory, -memory.held)

    def _has_room(self, memory: ResponseMemory, size: int) -> bool:
        """Return whether `size` bytes are free, and within the share of the call's project."""
        return size <= self.free_bytes and self._within_share(memory, size)

    def _within_share(self, memory: ResponseMemory, size: int) -> bool:
        """Return whether the project of a call may hold `size` bytes more.

        A project that holds nothing may exceed its share, or it could never load a large page.
        """
        held = self._held_by_project[memory.project]
        return memory.project is None or not held or held + size <= self._share

    def _must_queue(self, memory: ResponseMemory) -> bool:
        """Return whether a waiter comes before a call: one of the same project, or of one within its share."""
        return any(
            waiter.memory.project == memory.project or self._within_share(waiter.memory, waiter.size)
            for waiter in self._waiting
            if not waiter.granted.done()
        )

    def _move(self, memory: ResponseMemory, size: int) -> None:
        """Move `size` free bytes to `memory`; if negative, move them back."""
        self.free_bytes -= size
        memory.held += size
        if memory.project is not None:
            self._held_by_project[memory.project] += size
            if not self._held_by_project[memory.project]:
                del self._held_by_project[memory.project]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A response that waits for `size` bytes more in the memory of its call; `granted` is done once it has them."""

    memory: ResponseMemory
    size: int
    granted: asyncio.Future[None]


class _Rank(IntEnum):
    """What the call of a waiter has. A lower rank comes first; waiters of one rank stay in their order."""

    HAS_RESERVE = 0
    HOLDS_MEMORY = 1
    HOLDS_MEMORY_AFTER_RESERVE = 2  # its project was the last that had the reserve, and could keep it for ever
    HOLDS_NONE = 3


class ResponseMemory:
    """Memory of a call; it implements `engine.call.CallMemory`.

    - `held`: bytes that the call holds. The semaphore changes it.
    - `has_reserve`: whether the call has the reserve in their place. The semaphore changes it.
    - `body_bytes`: bytes of all response bodies of the call so far. Its requests change it.

    All is released when the last `with` block of it ends. A shared request has a block of its own, because it may
    outlive the call that started it.
    """

    def __init__(self, semaphore: ByteSemaphore, project: str | None = None) -> None:
        self._semaphore = semaphore
        self._users = 0
        self.project = project
        self.held = 0
        self.has_reserve = False
        self.body_bytes = 0

    def __enter__(self) -> Self:
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            self._semaphore.give_all(self)

    async def take(self, size: int) -> None:
        """Wait until the call holds `size` bytes more."""
        await self._semaphore.take(self, size)

    def try_take(self, size: int) -> bool:
        """Take `size` bytes more if that needs no wait; return whether it took them."""
        return self._semaphore.try_take(self, size)

    def give(self, size: int) -> None:
        """Release `size` bytes."""
        self._semaphore.give(self, size)

    def release_all_but(self, size: int) -> None:
        """Release all but `size` bytes."""
        self._semaphore.release_all_but(self, size)
