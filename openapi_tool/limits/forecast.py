"""Forecast of free permits, to refuse a call early if it certainly gets none before its deadline."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from openapi_tool.limits.ledger import COUNTED_S, REQUESTS, TOKENS, WINDOW_S, Rates, Record, expires


class Forecast:
    """Times at which further permits become free for all replicas together, if no other replica takes any."""

    def __init__(self, record: Record, rates: Rates, tokens_per_request: int, now: float) -> None:
        in_force = record.effective(rates, now)
        self._pause_s = max(0.0, record.paused_until - now)
        self._parts = [
            _ResourceForecast(record, resource, limit, each, now)
            for resource, limit, each in (
                (REQUESTS, in_force.requests, 1),
                (TOKENS, in_force.tokens, tokens_per_request),
            )
            if limit is not None
        ]

    def wait_s(self, count: float) -> float:
        """Return the seconds until `count` further permits have become free."""
        return max([self._pause_s, *(part.wait_s(count) for part in self._parts)])


class _ResourceForecast:
    """Forecast of one resource. Assumes that blocks come back unused when they expire, which is the earliest case."""

    def __init__(self, record: Record, resource: str, limit: int, each: int, now: float) -> None:
        window = record.window(resource)
        free = [(expires(bucket), amount) for bucket, amount in window.used.items()]
        free += [(replica.until, replica.block(resource)) for replica in record.replicas.values()]
        free = sorted((at, amount) for at, amount in free if at > now)
        self._limit, self._each = limit, each
        self._times = [at - now for at, _ in free]
        self._sums = list(accumulate(amount for _, amount in free))
        self._free = limit - (self._sums[-1] if self._sums else 0)
        self._credit = window.credit(limit, now)

    def wait_s(self, count: float) -> float:
        wanted = count * self._each
        paced_s = (wanted - self._credit) * WINDOW_S / self._limit
        cycles, rest = divmod(wanted, self._limit) if wanted > self._limit else (0, wanted)
        missing = rest - self._free
        at = bisect_left(self._sums, missing) if missing > 0 else -1
        freed_s = 0.0 if at < 0 else self._times[min(at, len(self._times) - 1)] if self._times else COUNTED_S
        return max(0.0, paced_s, freed_s + cycles * COUNTED_S)
