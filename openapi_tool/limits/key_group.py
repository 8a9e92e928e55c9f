"""One key, or the keys of a pool, at one endpoint, and the calls that wait for a permit of any of them."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pydantic import SecretStr

from openapi_tool.limits.fair_queue import FairQueue, Waiter
from openapi_tool.limits.key_record import STATES
from openapi_tool.limits.ledger import Use
from openapi_tool.limits.permits import Need
from openapi_tool.protocol.errors import ToolError

if TYPE_CHECKING:
    from openapi_tool.limits.key_limiter import KeyLimiter

TOO_MANY_REQUESTS = 429
_CHECK_INTERVALS = 19  # durations of a search for timeouts until the next one
_KEY_STATUSES = (401, 402, TOO_MANY_REQUESTS)  # of the key, not of the request only

Granted = tuple["KeyLimiter", Use, bool]
"""Permit of a waiting call: limiter of the key, use, and whether the call is the trial of a blocked key."""


class KeyGroup:
    """Limiters of one key, or of a pool's keys (`pooled`), and their waiting calls; `weights` are those of projects."""

    def __init__(self, weights: Mapping[str, float], *, pooled: bool) -> None:
        self.waiting: FairQueue[asyncio.Future[Granted]] = FairQueue(weights)
        self.limiters: list[KeyLimiter] = []
        self.pooled = pooled
        self._virtual_time = 0.0
        self._next_check_at = 0.0  # on the monotonic clock

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
        parts = [
            (limiter.allowance.forecast(now, limiter.min_request_s), limiter.weight / total) for limiter in limiters
        ]
        return lambda count: min((wait_s(count * share) for wait_s, share in parts), default=0.0)

    def certain_timeouts(self, now: float) -> list[tuple[Waiter[asyncio.Future[Granted]], float]]:
        """Return the calls that certainly get no permit in time, and the seconds until they would (see FairQueue).

        Many calls may wait, so the search takes at most a twentieth of the time; before that it returns none.
        """
        began = time.monotonic()
        if began < self._next_check_at:
            return []
        found = self.waiting.certain_timeouts(self.wait_s(now), now)
        ended = time.monotonic()
        self._next_check_at = ended + (ended - began) * _CHECK_INTERVALS
        return found

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


class KeyPermit:
    """Permit of one request with a key; `trial` if it tries a blocked one (see `Permit`)."""

    __slots__ = ("__weakref__", "_ended", "_limiter", "_need", "_trial", "_use", "key")

    def __init__(self, limiter: KeyLimiter, use: Use | None, need: Need, key: SecretStr, *, trial: bool) -> None:
        self._limiter, self._use, self._need, self._trial, self._ended = limiter, use, need, trial, False
        self.key = key

    def connected(self) -> None:
        """Count the request from now on, if it waited for its connection."""
        if self._use is not None and not self._ended:
            self._use = self._limiter.allowance.sent_late(self._use, self._limiter.keys.now())

    def done(self, tokens: int) -> None:
        """Settle a request that cost this many tokens."""
        self._end(tokens)
        if self._trial:
            self._limiter.keys.record_success(self._limiter.variable)

    def failed(self, error: ToolError) -> None:
        """Settle a failed request; a refusal of its key pauses or blocks the key."""
        self._end(error.tokens)
        if error.http_status in _KEY_STATUSES:
            self._limiter.record_upstream_refusal(error, self._need, self.key)
        if self._trial and error.upstream_status not in STATES:
            self._limiter.keys.end_trial(self._limiter.variable)

    def cancelled(self) -> None:
        """Settle a request without a response."""
        self._end(None)
        if self._trial:
            self._limiter.keys.end_trial(self._limiter.variable)

    def _end(self, tokens: int | None) -> None:
        if not self._ended:
            self._ended = True
            self._limiter.end_request(self._use, tokens)
