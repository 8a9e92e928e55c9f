"""Limit of the memory that upstream responses use: a FIFO byte semaphore with a reserve.

A `ResponseMemory` is the memory of a call from its first large response until its commit, a `RequestContext` holds the
part for one response. Responses of up to 64 kB take no memory from the semaphore, so they never wait behind large ones.

Deadlock: two calls that hold memory and need more could wait for each other. So the reserve, as much as any call may
need, goes to one such call at a time. That call never waits for memory again, so it ends and releases the reserve.

Fairness: one project holds at most half of the memory outside the reserve, so that deliberately slow responses cannot
block other projects.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from openapi_tool.engine.call import Call
from openapi_tool.protocol.attempts import MAX_ATTEMPTS, UpstreamAttempt
from openapi_tool.tools.inline_bounds import SMALL

_ASCII_FACTOR, _TWO_BYTE_FACTOR, _FOUR_BYTE_FACTOR = 6, 8, 14
"""Bytes of memory per byte of a body until the result is committed: parsed, rendered, as JSON, in the driver.

Python stores a string with one, two or four bytes per character, depending on its widest: one emoji makes 40 MB of a
page of 10 MB. Measured by scripts/answer_costs.py, and rounded up.
"""
_FOUR_BYTE_MARKS = (*(bytes([first]) for first in range(0xF0, 0xF5)), rb"\ud", rb"\uD")
"""How such characters begin: in UTF-8, and as an escape, which is then half of a surrogate pair."""


def memory_of(body: bytes | bytearray) -> int:
    """Return the bytes that a response needs until its result is committed."""
    if body.isascii() and rb"\u" not in body:
        factor = _ASCII_FACTOR
    else:
        factor = _FOUR_BYTE_FACTOR if any(mark in body for mark in _FOUR_BYTE_MARKS) else _TWO_BYTE_FACTOR
    return len(body) * factor


def memory_to_hold(body: bytes | bytearray) -> int:
    """Return the bytes to hold for a response: none for a small one, as to count it would cost more than it takes."""
    return memory_of(body) if len(body) > SMALL else 0


def max_call_memory(max_response_bytes: int) -> int:
    """Return the maximum of one call's responses."""
    return max_response_bytes * _FOUR_BYTE_FACTOR


@dataclass(slots=True, eq=False)
class _Waiter:
    memory: ResponseMemory
    size: int
    granted: asyncio.Future[None]


class ByteSemaphore:
    """Memory of `total_bytes` for the process; `reserve_bytes` of them are for one call that already holds memory.

    FIFO with two exceptions: calls that hold memory come before those that hold none, since they release it sooner; and
    no call waits behind calls of a project that has used up its share. While a call has the reserve, its `held` is 0.
    `free_bytes` does not count the reserve.
    """

    def __init__(self, total_bytes: int, reserve_bytes: int = 0) -> None:
        self.free_bytes = total_bytes - reserve_bytes
        self._share = self.free_bytes // 2
        self._reserve_is_free = reserve_bytes > 0
        self._last_reserve_project: str | None = None
        self._waiting: deque[_Waiter] = deque()
        self._held_by: Counter[str | None] = Counter()

    @property
    def waiting(self) -> int:
        """Number of waiting responses."""
        return len(self._waiting)

    def for_call(self, project: str | None = None) -> ResponseMemory:
        """Return the memory of a call; `project` None has no share limit."""
        return ResponseMemory(self, project)

    async def take(self, memory: ResponseMemory, size: int) -> None:
        """Wait until `memory` holds `size` bytes more. A cancelled wait takes nothing."""
        if self.try_take(memory, size):
            return
        waiter = _Waiter(memory, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()  # a call that holds memory may get the reserve at once
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.give(memory, size)  # granted in the same loop iteration in which the wait was cancelled
            else:
                with suppress(ValueError):
                    self._waiting.remove(waiter)
                self._serve()
            raise

    def try_take(self, memory: ResponseMemory, size: int) -> bool:
        """Take `size` bytes more if that needs no wait; return whether it did."""
        if memory.has_reserve:
            return True
        if size > self.free_bytes or not self._within_share(memory, size) or self._must_queue(memory):
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
        """Release all but `size` bytes. The reserve is kept, whole, if fewer than `size` bytes are free beside it."""
        if memory.has_reserve:
            if size > self.free_bytes:
                return
            memory.has_reserve = False
            self._reserve_is_free = True
            self._move(memory, size)
        self.give(memory, max(0, memory.held - size))

    def _serve(self) -> None:
        while self._waiting and (waiter := self._next_waiter()):
            memory = waiter.memory
            if not memory.has_reserve:
                if waiter.size <= self.free_bytes and self._within_share(memory, waiter.size):
                    self._move(memory, waiter.size)
                else:
                    self._reserve_is_free = False
                    self._last_reserve_project = memory.project
                    memory.has_reserve = True
                    self._move(memory, -memory.held)  # the reserve covers all that the call may need
            self._waiting.remove(waiter)
            waiter.granted.set_result(None)

    def _next_waiter(self) -> _Waiter | None:
        """Skip projects at their share; return None if the next waiter must wait for free memory."""
        blocked_projects: set[str | None] = set()
        for waiter in sorted((one for one in self._waiting if not one.granted.done()), key=self._rank):
            memory = waiter.memory
            if memory.has_reserve or (memory.held and self._reserve_is_free):
                return waiter
            if memory.project not in blocked_projects and self._within_share(memory, waiter.size):
                return waiter if waiter.size <= self.free_bytes else None
            blocked_projects.add(memory.project)
        return None

    def _rank(self, waiter: _Waiter) -> int:
        """Return the place in the queue, the lowest first; waiters of one rank stay in their order.

        0: has the reserve. 1: holds memory. 2: holds memory, but its project was the last to have the reserve, and
        could keep it for ever. 3: holds none.
        """
        memory = waiter.memory
        if memory.has_reserve:
            return 0
        if not memory.held:
            return 3
        return 2 if memory.project is not None and memory.project == self._last_reserve_project else 1

    def _within_share(self, memory: ResponseMemory, size: int) -> bool:
        # A project that holds nothing may exceed its share, or it could never load a large page.
        held = self._held_by[memory.project]
        return memory.project is None or not held or held + size <= self._share

    def _must_queue(self, memory: ResponseMemory) -> bool:
        return any(
            waiter.memory.project == memory.project or self._within_share(waiter.memory, waiter.size)
            for waiter in self._waiting
            if not waiter.granted.done()
        )

    def _move(self, memory: ResponseMemory, size: int) -> None:
        """Move `size` bytes, which may be negative, to `memory`."""
        self.free_bytes -= size
        memory.held += size
        if memory.project is not None:
            self._held_by[memory.project] += size
            if not self._held_by[memory.project]:
                del self._held_by[memory.project]


class ResponseMemory:
    """Memory of a call (see `CallMemory` in `engine/call.py`).

    It is released when the last `with` block ends: a shared request may outlive the call that started it.
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

    def release_all_but(self, size: int) -> None:
        """Release all but `size` bytes."""
        self._semaphore.release_all_but(self, size)

    def for_request(self, call: Call) -> RequestContext:
        """Return a context for one more upstream request of the call."""
        return RequestContext(call, self, self._semaphore)


class RequestContext:
    """One upstream request of `call`, retries included: memory of its response, and its status once it arrives."""

    def __init__(self, call: Call, memory: ResponseMemory, semaphore: ByteSemaphore) -> None:
        self.call = call
        self._memory = memory
        self._semaphore = semaphore
        self._held = 0
        self.body_bytes = 0
        self.http_status: int | None = None

    def record_attempt(self, attempt: UpstreamAttempt) -> None:
        """Record a request that is sent now."""
        self.http_status = None
        if len(self.call.attempts) < MAX_ATTEMPTS:
            self.call.attempts.append(attempt)

    def record_permit_wait(self, begin: float, end: float) -> None:
        """Record a wait for a permit of the rate limit."""
        if len(self.call.permit_waits) < MAX_ATTEMPTS:
            self.call.permit_waits.append((begin, end))

    async def hold(self, size: int) -> None:
        """Hold `size` bytes; wait if that is more than before."""
        if size > self._held:
            await self._semaphore.take(self._memory, size - self._held)
        elif size < self._held:
            self._semaphore.give(self._memory, self._held - size)
        self._held = size

    def try_hold(self, size: int) -> bool:
        """Hold at least `size` bytes if that needs no wait; return whether it does."""
        if size > self._held and not self._semaphore.try_take(self._memory, size - self._held):
            return False
        self._held = max(size, self._held)
        return True

    def add_body_bytes(self, size: int) -> None:
        """Count body bytes of this response."""
        self.body_bytes += size
        self._memory.body_bytes += size

    @property
    def call_body_bytes(self) -> int:
        """Body bytes of all responses of the call."""
        return self._memory.body_bytes

    def clear(self) -> None:
        """Release the memory and reset the body bytes, before a retry."""
        self._memory.body_bytes -= self.body_bytes
        self.body_bytes = 0
        if self._held:
            self._semaphore.give(self._memory, self._held)
            self._held = 0
