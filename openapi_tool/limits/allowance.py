"""One replica's part of a limit: permits at hand, unreported uses, share while the store is unavailable. No I/O."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from openapi_tool.limits import ledger
from openapi_tool.limits.ledger import LimitReport, Use
from openapi_tool.limits.record import (
    CONTENDER_S,
    INTERVAL_S,
    MAX_PAUSE_S,
    REQUESTS,
    TOKENS,
    USE_COUNTS_S,
    WINDOW_S,
    LimitRecord,
    LimitShare,
    Rates,
    decode,
    expires,
)

_AHEAD_S = 3.2  # seconds of demand for which permits are taken
REFILL_AT_ONCE_BELOW, REFILL_BELOW = 0.4, 0.75
"""Fractions of `LimitAllowance.ahead`: with fewer permits at hand more are taken at once, or after a pause."""

REFILL_PAUSE_S = 1.0, 2.0  # range of the random pause: replicas that write at the same time conflict

_USUAL_TOKENS = 10_000  # of a request
_NEWEST_WEIGHT = 0.2  # of the newest request in the moving average of tokens
_MAX_GROWTH = 4  # largest multiple of the average that counts: a page of millions of tokens must stop nothing
_RELEASE_INTERVAL_S = 1.0  # between reports that leave unused concurrency to replicas that need more
_MIN_CHANGE_S = 0.1  # between changes of concurrent requests
OPEN_REPORT_S = 1.5  # between reports while limited requests are open; without one for CONTENDER_S they count as ended
REPORT_INTERVAL_S = 20.0  # between reports of a replica that sends nothing, or the record drops it after 60 s
_MIN_PAUSE_S = 0.5  # also after a Retry-After of 0, or each waiting call would cause a 429
_PAUSE_S = 2.0  # after a 429 without Retry-After
_RATE_S = 5.0  # time constant of the moving average of demand
_MAX_SENT = 120  # seconds with requests, one entry each


@dataclass(frozen=True, slots=True)
class LimitUpdate:
    """Record to be written, and this replica's share in it; `uses`: the number of its reported uses."""

    record: LimitRecord
    mine: LimitShare
    uses: int


class LimitAllowance:
    """Permits of replica `name` for one key and endpoint with configured limits `rates`.

    A request costs at least `min_tokens`. `at_hand` is the rest of the block, `demand` the requests per second (moving
    average), `max_concurrent` the number of requests that may be open. While the store is unavailable,
    `fallback_replicas` replicas share the limit, else it is 0.
    """

    def __init__(self, name: str, rates: Rates, min_tokens: int = 1) -> None:
        self.name = name
        self._min_tokens = min_tokens
        self.rates = rates
        self.record = LimitRecord()
        self.revision = 0
        self.running = 0
        self.refused = False  # a call since the last report, for lack of permits
        self.fallback_replicas = 0
        self.at_hand = {REQUESTS: 0, TOKENS: 0}
        self.demand = 0.0
        self._demand_at = 0.0
        self._block_expires_at = 0.0
        self._serial = 0
        self._uses: list[Use] = []
        self._fallback_uses: deque[Use] = deque()
        self._sent: deque[list[float]] = deque(maxlen=_MAX_SENT)  # [second, requests]
        self._adaptive_since = 0.0
        self.max_concurrent = self._counted_concurrent = 0  # the second is `LimitShare.concurrent`
        self._reported_at = self._steady_since = -math.inf
        self._own_pause_until = 0.0
        self.tokens_per_request = 0 if rates.tokens is None else min(max(min_tokens, _USUAL_TOKENS), rates.tokens)

    @property
    def limited(self) -> bool:
        """Return whether anything is limited."""
        return self.rates.limited or self.record.adaptive is not None or self._own_pause_until > 0

    def in_force(self, now: float) -> Rates:
        """Return the limits in force: configured, or adaptive after a 429."""
        return self.record.effective(self.rates, now)

    def paused_s(self, now: float) -> float:
        """Return the seconds until a pause after a 429 ends."""
        return min(max(0.0, self.record.paused_until - now, self._own_pause_until - now), MAX_PAUSE_S)

    def pause(self, retry_after_s: float | None, now: float) -> float:
        """Pause after a 429, also if the record cannot be written; return when the pause ends."""
        pause_s = max(_PAUSE_S if retry_after_s is None else retry_after_s, _MIN_PAUSE_S)
        self._own_pause_until = max(self._own_pause_until, now + min(pause_s, MAX_PAUSE_S))
        return self._own_pause_until

    def use_fallback(self) -> None:
        """Divide the limit by the last known number of replicas."""
        self.fallback_replicas = self.fallback_replicas or self.record.replicas_seen(self.name)

    def record_sent(self, now: float) -> None:
        """Count a request for an adaptive limit."""
        if self._sent and now - self._sent[-1][0] < 1.0:
            self._sent[-1][1] += 1
        else:
            self._sent.append([now, 1])

    def take(self, now: float) -> Use | None:
        """Use a permit if there is one."""
        rates = self.in_force(now)
        if self.paused_s(now) or not self._has_permit(rates, now):
            return None
        self._own_pause_until = 0.0
        self.record_sent(now)
        self.demand = self.demand * math.exp(-max(0.0, now - self._demand_at) / _RATE_S) + 1 / _RATE_S
        self._demand_at = now
        use = Use(now, 1, self.tokens_per_request)
        if rates.requests is not None:
            self.at_hand[REQUESTS] -= 1
        if rates.tokens is not None:
            self.at_hand[TOKENS] -= use.tokens
        self.running += 1
        self._count(use)
        return use

    def _count(self, *uses: Use) -> None:
        self._uses += uses
        if self.fallback_replicas:
            self._fallback_uses += uses

    def settle(self, use: Use, tokens: int | None) -> None:
        """End a request; `tokens` is its cost, None if unknown."""
        self.running -= 1
        limit = self.rates.tokens
        if tokens is None or limit is None:
            return
        if tokens:
            mean = self.tokens_per_request
            counted = min(tokens, _MAX_GROWTH * max(mean, _USUAL_TOKENS))
            mean = max(self._min_tokens, round(mean + _NEWEST_WEIGHT * (counted - mean)))
            self.tokens_per_request = min(mean, limit)  # a larger one would stop all requests, and never fall again
        if tokens != use.tokens:
            self._count(Use(use.at, 0, tokens - use.tokens))

    def requests_above_estimate(self, use: Use, tokens: int) -> float:
        """Return the cost in requests as estimated by `use`, minus one; negative if it cost less.

        0 for a failure at no cost: with refunds, a project whose requests fail would always be first. The resource of
        whose limit the request takes the larger part counts. Tokens above the limit stop one minute only: ignore them.
        """
        limit = self.rates.tokens
        if limit is None or not tokens:
            return 0.0
        least = 1 / self.rates.requests if self.rates.requests else 0.0
        return max(least, min(tokens, limit) / limit) / max(least, use.tokens / limit) - 1

    def sent_late(self, use: Use, now: float) -> Use:
        """Move a use to `now` if its request was sent INTERVAL_S or more after the permit."""
        if now - use.at < INTERVAL_S:
            return use
        sent = Use(now, use.requests, use.tokens)
        self._count(Use(use.at, -use.requests, -use.tokens), sent)
        return sent

    def _has_permit(self, rates: Rates, now: float) -> bool:
        if self.fallback_replicas:
            self.at_hand = self._fallback_share(rates, now)
            self.max_concurrent = (rates.concurrent or 0) // self.fallback_replicas or 1
        elif now >= self._block_expires_at:
            self.at_hand = {REQUESTS: 0, TOKENS: 0}
        return (
            (rates.requests is None or self.at_hand[REQUESTS] >= 1)
            and (rates.tokens is None or self.at_hand[TOKENS] >= self.tokens_per_request)
            and (rates.concurrent is None or self.running < self.max_concurrent)
        )

    def _fallback_share(self, rates: Rates, now: float) -> dict[str, int]:
        while self._fallback_uses and self._fallback_uses[0].at + USE_COUNTS_S <= now:
            self._fallback_uses.popleft()
        share: dict[str, int] = {}
        for resource, limit in ((REQUESTS, rates.requests), (TOKENS, rates.tokens)):
            own = sum(getattr(use, resource) for use in self._fallback_uses)
            free = (limit or 0) - self.record.counted(resource, now)
            share[resource] = max(0, free // self.fallback_replicas - own)
        return share

    def ahead(self, now: float) -> int:
        """Return how many permits to hold, for the demand of `_AHEAD_S` seconds."""
        rate = self.demand * math.exp(-max(0.0, now - self._demand_at) / _RATE_S)
        return int(rate * _AHEAD_S)

    def is_low(self, now: float, fraction: float) -> bool:
        """Return whether fewer permits than this fraction of `ahead` are at hand."""
        rates, enough = self.in_force(now), self.ahead(now) * fraction
        if not self.demand:
            return False
        if rates.requests is not None:  # decides alone: if only tokens run out, waiting calls start a refill
            return self.at_hand[REQUESTS] < enough or now >= self._block_expires_at
        return rates.tokens is not None and (
            self.at_hand[TOKENS] < enough * self.tokens_per_request or now >= self._block_expires_at
        )

    def has_surplus(self, now: float) -> bool:
        """Return whether the record still counts ended requests above this replica's share, while others need more."""
        surplus = self._counted_concurrent > max(self.running, self.max_concurrent)
        return surplus and self.rates.concurrent is not None and bool(self.record.others(now, self.name))

    def is_due(self, waiting: int, since_s: float, now: float) -> bool:
        """Return whether to report in any case, `since_s` seconds after the last report."""
        holds_unused = now >= self._block_expires_at and any(self.at_hand.values())
        if self.fallback_replicas or holds_unused or since_s >= REPORT_INTERVAL_S:
            return True
        can_raise_limit = self.refused and ledger.may_raise_adaptive(self.record, now)
        return can_raise_limit or self._is_concurrency_due(waiting, since_s, now)

    def _is_concurrency_due(self, waiting: int, since_s: float, now: float) -> bool:
        limit = self.rates.concurrent
        if limit is None:
            return False
        if self.has_surplus(now) or (self.running and since_s >= OPEN_REPORT_S):
            return True
        if self.running < self.max_concurrent:
            return since_s >= _RELEASE_INTERVAL_S and bool(self.record.others(now, self.name))
        if not waiting or since_s < _MIN_CHANGE_S:
            return False
        return ledger.may_open(self.record, self.name, self.running + waiting, limit, now) > self.max_concurrent

    def plan(self, stored: bytes | None, waiting: int, now: float, *, leave: bool = False) -> LimitUpdate:
        """Apply this replica's report to a stored record; with `leave` (shutdown) keep no block."""
        record = decode(stored)
        keep = dict(self.at_hand) if now < self._block_expires_at and not leave else {}
        want = 0 if leave else max(waiting, self.ahead(now) - keep.get(REQUESTS, 0), 0)
        # A new adaptive limit also counts what this replica sent before.
        is_new_limit = record.adaptive is not None and record.adaptive.since != self._adaptive_since
        sent = tuple(Use(at, int(count), 0) for at, count in self._sent if is_new_limit and at + USE_COUNTS_S > now)
        self._serial += 1
        if now - self._reported_at >= CONTENDER_S:  # as after an outage: see `ledger._take_concurrent`
            self._steady_since = now
        report = LimitReport(
            uses=tuple(self._uses), keep=keep, want=want, running=self.running, sent=sent, refused=self.refused,
            tokens_each=max(1, self.tokens_per_request), serial=self._serial, steady_since=self._steady_since,
        )  # fmt: skip
        mine = ledger.apply_report(record, self.name, report, self.rates, now)
        return LimitUpdate(record, mine, len(self._uses))

    def is_written(self, planned: LimitUpdate, stored: bytes | None) -> bool:
        """Return whether a stored record contains a change whose write had an unknown outcome."""
        mine = decode(stored).replicas.get(self.name)
        return mine is not None and mine.serial == planned.mine.serial

    def confirm(self, planned: LimitUpdate, revision: int) -> None:
        """Adopt a written change, less what was used since it was planned."""
        later = self._uses[planned.uses :]
        self._uses = later
        mine = planned.mine
        self._reported_at = mine.seen
        self.refused = False
        self._adopt(planned.record, revision)
        self.at_hand = {REQUESTS: mine.requests, TOKENS: mine.tokens}
        for use in later:
            self.at_hand[REQUESTS] -= use.requests
            self.at_hand[TOKENS] -= use.tokens if use.requests else 0  # a correction does not change the block
        self._block_expires_at = mine.until
        self.max_concurrent, self._counted_concurrent = mine.may_open, mine.concurrent
        self.fallback_replicas = 0
        self._fallback_uses.clear()
        self._adaptive_since = self.record.adaptive.since if self.record.adaptive else 0.0

    def adopt(self, record: LimitRecord, revision: int, now: float) -> None:
        """Adopt a record unless a newer one is known."""
        record.correct(now)  # forged times
        self._adopt(record, revision)

    def _adopt(self, record: LimitRecord, revision: int) -> None:
        if revision >= self.revision:
            self.record, self.revision = record, revision

    def forecast(self, now: float, request_s: float) -> Callable[[float], float]:
        """Return a function from a number of permits to the seconds until this replica has them.

        A request takes at least `request_s` seconds.
        """
        free_in_s = self.forecast_free(now)
        if replicas := self.fallback_replicas:
            return lambda count: max(free_in_s(count * replicas), self._open_in_s(count, replicas, request_s))
        # Shares are equal: until this replica has `count`, each other one gets as many, or all it needs.
        demands = [other.want for other in self.record.others(now, self.name)]
        return lambda count: max(
            free_in_s(count + sum(min(count, demand) for demand in demands)),
            self._open_in_s(count, 1 + len(demands), request_s),
        )

    def _open_in_s(self, count: float, replicas: int, request_s: float) -> float:
        """Return the seconds until `count` more requests may be open, a lower bound."""
        limit = self.rates.concurrent
        if limit is None:
            return 0.0
        open_at_once = max(self.max_concurrent, limit // replicas, 1)
        # Those without a free place start in rounds; the first may start now, as the running ones may end now.
        return max(0.0, math.ceil(count) - 1 - open_at_once + self.running) // open_at_once * request_s

    def sent_in_window(self, now: float) -> int:
        """Return the number of requests of the last 60 s."""
        return int(sum(count for at, count in self._sent if at + WINDOW_S > now))

    def forecast_free(self, now: float) -> Callable[[float], float]:
        """Return a function from a number of permits to the seconds until they are free, if no replica takes any."""
        rates, pause_s = self.in_force(now), self.paused_s(now)
        waits = [
            _Forecast(self.record, resource, limit, each, now).wait_s
            for resource, limit, each in (
                (REQUESTS, rates.requests, 1),
                (TOKENS, rates.tokens, max(1, self.tokens_per_request)),
            )
            if limit is not None
        ]
        return lambda count: max([pause_s, *(wait_s(count) for wait_s in waits)])


class _Forecast:
    """Permits of a resource become free as uses and blocks expire, at most at the limit's rate."""

    def __init__(self, record: LimitRecord, resource: str, limit: int, each: int, now: float) -> None:
        window = record.window(resource)
        free = [(expires(interval), amount) for interval, amount in window.used.items()]
        free += [(replica.until, replica.block(resource)) for replica in record.replicas.values()]
        free = sorted((at, amount) for at, amount in free if at > now)
        self._limit, self._each = limit, each
        self._times = [at - now for at, _ in free] or [USE_COUNTS_S]
        self._sums = list(accumulate(amount for _, amount in free))
        self._free = limit - (self._sums[-1] if self._sums else 0)
        self._available = window.available(limit, now, each)

    def wait_s(self, count: float) -> float:
        wanted = count * self._each
        paced_s = (wanted - self._available) * WINDOW_S / self._limit
        # Beyond the limit, whole windows have to pass.
        windows, rest = divmod(wanted, self._limit) if wanted > self._limit else (0, wanted)
        missing = rest - self._free
        freed_s = self._times[min(bisect_left(self._sums, missing), len(self._times) - 1)] if missing > 0 else 0.0
        return max(0.0, paced_s, freed_s + windows * USE_COUNTS_S)
