"""One key, or the keys of a pool, at one endpoint, and the calls that wait for a permit of any of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from openapi_tool.limits.fair_queue import FairQueue
from openapi_tool.limits.ledger import Use
from openapi_tool.protocol.errors import ToolError

if TYPE_CHECKING:
    from openapi_tool.limits.key_limiter import KeyLimiter

Granted = tuple["KeyLimiter", Use, bool]
"""Permit of a waiting call: limiter of the key, use, and whether the call is the trial of a blocked key."""


class KeyGroup:
    """Limiters of one key, or of a pool's keys (`pooled`), and their waiting calls."""

    def __init__(self, *, pooled: bool) -> None:
        self.waiting: FairQueue[asyncio.Future[Granted]] = FairQueue()
        self.limiters: list[KeyLimiter] = []
        self.pooled = pooled
        self._virtual_time = 0.0

    def usable(self) -> list[KeyLimiter]:
        """Return the limiters of the keys that may be used: set, and not blocked."""
        return [limiter for limiter in self.limiters if limiter.usable]

    def by_load(self, limiters: list[KeyLimiter]) -> list[KeyLimiter]:
        """Sort limiters by load relative to their limits, lowest first.

        By virtual time: a key that was unusable for a while does not catch up.
        """
        return sorted(limiters, key=lambda limiter: max(limiter.load, self._virtual_time))

    def count_request(self, limiter: KeyLimiter) -> None:
        """Count a request towards the load of a key."""
        limiter.load = max(limiter.load, self._virtual_time) + 1 / limiter.weight
        usable = [limiter.load for limiter in self.usable() if not limiter.paused_s]
        self._virtual_time = max(self._virtual_time, min(usable, default=0.0))

    def wait_s(self, now: float) -> Callable[[float], float]:
        """Return a function from a number of permits to a lower bound of the seconds until the group has granted them.

        At least one of the keys must grant its share of the number, so the shortest of their waits is a lower bound.
        """
        limiters = self.usable()
        total = sum(limiter.weight for limiter in limiters)
        parts = [(limiter.allowance.forecast(now), limiter.weight / total) for limiter in limiters]
        return lambda count: min((wait_s(count * share) for wait_s, share in parts), default=0.0)

    def wake(self) -> None:
        """Wake all limiters."""
        for limiter in self.limiters:
            limiter.wake()

    def fail(self, error: ToolError) -> None:
        """End all waiting calls with an error."""
        for waiter in self.waiting.waiters():
            self.waiting.discard(waiter)
            if not waiter.item.done():
                waiter.item.set_exception(copy.copy(error))
