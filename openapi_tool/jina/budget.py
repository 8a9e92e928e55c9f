"""Memory for the answers of all running calls together: a FIFO byte semaphore with a reserve.

Answers of up to 64 kB take none of it, so they never wait behind large ones. A grant is what one call holds, from its
first large answer until its result is committed; a room is the part of it for one answer. A call that holds memory and
needs more could wait for another that does the same. So the reserve, as much as any one call may need, goes to one such
call at a time: it never waits again, ends, and hands the reserve on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from openapi_tool.jina.answer_json import MOST_VALUES

_ASCII, _WIDE, _WIDEST = 6, 8, 14
"""What a byte of a body takes until its result is committed: text as it came, rendered, as JSON, and in the driver.

Python keeps a text in one, two or four bytes a character, as its widest needs: one emoji makes 40 MB of a page of
10 MB. Measured by scripts/answer_costs.py, and rounded up.
"""
_FOUR_BYTES = tuple(bytes([first]) for first in range(0xF0, 0xF5))  # how such a character begins in UTF-8
_ESCAPED_PAIRS = (rb"\ud", rb"\uD")
_BYTES_PER_VALUE = 250
"""What a value takes beside its text: its object, and its place in a list or a dictionary."""


def memory_of(body: bytes | bytearray, values: int = 0) -> int:
    """Bytes of memory that an answer of so many values needs, its body included, until its result is committed."""
    return len(body) * _bytes_per_byte(body) + values * _BYTES_PER_VALUE


def _bytes_per_byte(body: bytes | bytearray) -> int:
    if body.isascii() and rb"\u" not in body:
        return _ASCII
    return _WIDEST if any(mark in body for mark in (*_FOUR_BYTES, *_ESCAPED_PAIRS)) else _WIDE


def most_memory(max_response_bytes: int) -> int:
    """Bytes of memory that the answers of one call need at the most."""
    return max_response_bytes * _WIDEST + MOST_VALUES * _BYTES_PER_VALUE


@dataclass(slots=True, eq=False)
class _Waiter:
    grant: Grant
    size: int
    turn: asyncio.Future[None]


class ByteBudget:
    """`total_bytes` for the process, of which `reserve_bytes` are kept for one call that holds some already.

    First come, first served; but a call that holds memory comes before all that hold none, since it gives back sooner.
    """

    def __init__(self, total_bytes: int, reserve_bytes: int = 0) -> None:
        self._free = total_bytes - reserve_bytes
        self._reserve_is_free = reserve_bytes > 0
        self._waiting: deque[_Waiter] = deque()

    @property
    def free_bytes(self) -> int:
        """What nobody holds now, without the reserve."""
        return self._free

    def grant(self) -> Grant:
        """Nothing at first; a context manager that gives back what is held in the end."""
        return Grant(self)

    async def take(self, grant: Grant, size: int) -> None:
        """Wait until the grant holds `size` bytes more. A cancelled wait takes nothing."""
        if self.try_take(grant, size):
            return
        waiter = _Waiter(grant, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.give(grant, size)  # it was given in the iteration of the loop in which the wait was cancelled
            else:
                with suppress(ValueError):
                    self._waiting.remove(waiter)
                self._serve()
            raise

    def try_take(self, grant: Grant, size: int) -> bool:
        """Let the grant hold `size` bytes more if that needs no wait."""
        if grant.has_reserve:
            return True
        if self._waiting or size > self._free:
            return False
        self._free -= size
        grant.held += size
        return True

    def give(self, grant: Grant, size: int) -> None:
        """Take `size` bytes back from a grant, up to what it holds."""
        size = min(size, grant.held)
        grant.held -= size
        self._free += size
        self._serve()

    def give_all(self, grant: Grant) -> None:
        """Take everything back."""
        self._reserve_is_free |= grant.has_reserve
        grant.has_reserve = False
        self.give(grant, grant.held)

    def keep(self, grant: Grant, size: int) -> None:
        """Take back all but `size` bytes of what a grant holds; the reserve, as soon as so much is free without it."""
        if grant.has_reserve:
            if size > self._free:
                return
            grant.has_reserve, self._reserve_is_free = False, True
            self._free -= size
            grant.held = size
        self.give(grant, max(0, grant.held - size))

    def _serve(self) -> None:
        while waiter := self._next():
            if waiter.grant.has_reserve:
                pass
            elif waiter.size <= self._free:
                self._free -= waiter.size
                waiter.grant.held += waiter.size
            elif self._reserve_is_free and waiter.grant.held:
                self._hand_over_reserve(waiter.grant)
            else:
                return
            self._waiting.remove(waiter)
            waiter.turn.set_result(None)

    def _hand_over_reserve(self, grant: Grant) -> None:
        """The reserve covers all that the call may need, so what it held is free again."""
        self._reserve_is_free = False
        grant.has_reserve = True
        self._free += grant.held
        grant.held = 0

    def _next(self) -> _Waiter | None:
        """Who is served next: the first that holds something, else the first. Cancelled waits are no more."""
        while self._waiting and self._waiting[0].turn.done():
            self._waiting.popleft()
        alive = (waiter for waiter in self._waiting if not waiter.turn.done())
        first = next(alive, None)
        if first is None or first.grant.holds:
            return first
        return next((waiter for waiter in alive if waiter.grant.holds), first)


class Grant:
    """What one call holds of the budget, and how many bytes its answers have.

    Held until each `with` block is left: a request that other calls wait for may outlive the call that began it.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._users = 0
        self.held = 0
        self.has_reserve = False
        self.body_bytes = 0

    @property
    def holds(self) -> bool:
        """Whether another call may wait for what this one has."""
        return self.has_reserve or self.held > 0

    def __enter__(self) -> Self:
        self._users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            self._budget.give_all(self)

    def room(self) -> Room:
        """A part of the grant for one more answer."""
        return Room(self, self._budget)

    def keep(self, size: int) -> None:
        """Hold at most `size` bytes from now on: what is left of the answers once they are rendered."""
        self._budget.keep(self, size)


class Room:
    """The part of a grant that is for one answer."""

    def __init__(self, grant: Grant, budget: ByteBudget) -> None:
        self._grant = grant
        self._budget = budget
        self._held = 0
        self.body_bytes = 0

    async def hold(self, size: int) -> None:
        """Hold `size` bytes; waits where that is more than before."""
        if size > self._held:
            await self._budget.take(self._grant, size - self._held)
        elif size < self._held:
            self._budget.give(self._grant, self._held - size)
        self._held = size

    def try_hold(self, size: int) -> bool:
        """Hold `size` bytes if that needs no wait."""
        if size > self._held and not self._budget.try_take(self._grant, size - self._held):
            return False
        self._held = max(size, self._held)
        return True

    def count(self, size: int) -> int:
        """Count bytes of the answer that were read; the bytes of all answers of the call."""
        self.body_bytes += size
        self._grant.body_bytes += size
        return self._grant.body_bytes

    def clear(self) -> None:
        """Begin anew: nothing held, nothing counted."""
        self._grant.body_bytes -= self.body_bytes
        self.body_bytes = 0
        if self._held:
            self._budget.give(self._grant, self._held)
            self._held = 0
