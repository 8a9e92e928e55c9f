"""Shared record of one key and endpoint: a sliding window of permits, changed by compare-and-set (ADR 9).

A replica takes permits in blocks. From the moment it is written, a block counts against the limit as a whole. At the
replica's next report its used permits count from the times of their requests, and the unused ones are free again. So
every request of the last 60 s is counted at any time, also those of a replica that crashed.

Pure: no I/O; every time is the server's, in seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BeforeValidator, Field

from openapi_tool.limits.concurrency import Demand, shares

VERSION = 2
WINDOW_S = 60.0
MARGIN_S = 0.5
"""Seconds for differences between clocks, and between the latencies of requests to the upstream."""

USE_COUNTS_S = WINDOW_S + MARGIN_S
"""Seconds for which a used permit counts against the limit."""

BUCKET_S = 0.5  # resolution of the window
BLOCK_S = 4.0
"""Seconds within which a block must be used."""

_BURST_SHARE = 1 / 6
"""Fraction of a limit that an idle key may use at once. A window used up in a second would allow no call for 59 s."""

_MIN_BURST = 10
_ROUNDING = 1e-6

_CONTENDER_S = 4.0
"""Seconds for which a replica's unmet demand counts; then a killed one loses its share."""

REPLICA_S = 60.0  # from its last report until a replica is forgotten
MAX_REPLICAS = 1_000
"""Replicas in a record. Beyond that the least recently seen ones without permits are removed: they still get permits,
but their demand does not lower the shares of others."""

MAX_PAUSE_S = 120.0
_MIN_PAUSE_S = 0.5  # also after a Retry-After of 0, or each waiting call would cause a 429
_PAUSE_S = 2.0
"""Pause in seconds after a 429 without Retry-After."""

ADAPTIVE_S = 3600.0
_STEP_S = 10.0  # minimum time between changes of the adaptive limit
_RAISE_DIVISOR = 20  # it rises by 1/20
_MIN_STEP = 2
_MIN_ADAPTIVE = 10
"""Minimum adaptive limit: a 429 of a hardly used key was caused by other users of the key."""

REQUESTS, TOKENS = RESOURCES = "requests", "tokens"

Time = Annotated[float, Field(ge=0, le=1e12)]
Number = Annotated[int, Field(ge=-(2**53), le=2**53)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of one key and endpoint: requests and tokens in any 60 s, concurrent requests; None is unlimited."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None

    @property
    def limited(self) -> bool:
        """Return whether anything is limited."""
        return not self.requests == self.tokens == self.concurrent is None


@dataclass(slots=True)
class Window:
    """Uses of a resource by time bucket, and its token bucket (pace), which is full again at `paced_until`."""

    used: dict[Number, Number] = field(default_factory=dict)
    paced_until: Time = 0.0

    def add(self, at: float, amount: int) -> None:
        """Count a use; a negative amount corrects an estimate."""
        bucket = math.ceil(at / BUCKET_S)
        self.used[bucket] = self.used.get(bucket, 0) + amount

    def forget(self, now: float) -> None:
        """Drop uses that no longer count."""
        self.used = {bucket: amount for bucket, amount in self.used.items() if expires(bucket) > now}

    def credit(self, limit: int, now: float, unit: int = 1) -> float:
        """Return what is in the token bucket; below `unit`, the need of a request, if requests have to wait."""
        return (now - max(self.paced_until, now)) * limit / WINDOW_S + _burst(limit, unit)

    def pace(self, limit: int, amount: int, now: float) -> None:
        """Take an amount from the token bucket; put a negative one back."""
        self.paced_until = max(self.paced_until, now) + amount * WINDOW_S / limit

    def end_burst(self, limit: int, now: float, unit: int) -> None:
        """Leave permits for one second in the token bucket: the window is used up, and what it frees must last."""
        burst = _burst(limit, unit)
        remaining = min(burst, max(float(unit), limit / WINDOW_S))
        self.paced_until = max(self.paced_until, now + (burst - remaining) * WINDOW_S / limit)


def _burst(limit: int, unit: int) -> float:
    return max(float(min(limit, max(_MIN_BURST, unit))), limit * _BURST_SHARE)


def expires(bucket: int) -> float:
    """Return the time from which the uses of a bucket no longer count."""
    return bucket * BUCKET_S + USE_COUNTS_S


@dataclass(slots=True)
class Replica:
    """Share of one replica: a block of `requests` and `tokens`, valid until `until`; `concurrent` requests may be open.

    `want` is its unmet demand, `seen` its last report. `served` counts its permits since it began to want more than it
    has; a replica that is ahead of the others takes none. `serial` is that of its last report, to see whether one with
    an unknown outcome was written. `adaptive_since` is the start of the last adaptive limit that it has reported to. Of
    `concurrent` requests it may have only `may_open` open once some have ended; that is not stored.
    """

    seen: Time = 0.0
    want: Number = 0
    until: Time = 0.0
    requests: Number = 0
    tokens: Number = 0
    concurrent: Number = 0
    served: Number = 0
    serial: Number = 0
    adaptive_since: Time = 0.0
    may_open: Number = 0

    def counts(self, now: float) -> bool:
        """Return whether its block counts against a limit."""
        return self.requests + self.tokens > 0 and self.until + USE_COUNTS_S > now

    def block(self, resource: str) -> int:
        """Return the permits of its block."""
        return self.requests if resource == REQUESTS else self.tokens


@dataclass(slots=True)
class Adaptive:
    """Limit of requests derived from 429s if none is configured; it ends an hour after the last 429."""

    limit: Number
    since: Time
    changed: Time
    until: Time


STORED_FIELDS = Replica.__slots__[:-1]


def _replica_fields(row: object) -> object:
    return dict(zip(STORED_FIELDS, row, strict=True)) if isinstance(row, list) else row


@dataclass(slots=True)
class Record:
    """State of one key and endpoint."""

    version: Annotated[int, Field(ge=VERSION, le=VERSION)] = VERSION
    paused_until: Time = 0.0
    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    replicas: dict[str, Annotated[Replica, BeforeValidator(_replica_fields)]] = field(default_factory=dict)
    adaptive: Adaptive | None = None

    def window(self, resource: str) -> Window:
        """Return the window of a resource."""
        return self.requests if resource == REQUESTS else self.tokens

    def counted(self, resource: str, now: float) -> int:
        """Return what counts against the limit: uses and whole blocks."""
        used = sum(amount for bucket, amount in self.window(resource).used.items() if expires(bucket) > now)
        return used + sum(
            replica.block(resource) for replica in self.replicas.values() if replica.until + USE_COUNTS_S > now
        )

    def effective(self, rates: Rates, now: float) -> Rates:
        """Return the limits in force: the configured ones, or the adaptive one."""
        if rates.requests is None and self.adaptive is not None and self.adaptive.until > now:
            return Rates(max(_MIN_ADAPTIVE, self.adaptive.limit), rates.tokens, rates.concurrent)
        return rates

    def replicas_seen(self, name: str) -> int:
        """Return the number of replicas in the 60 s before the newest report, the one of this name included.

        Not in the last 60 s: while the store refuses writes, replicas still run that can report nothing.
        """
        newest = max((replica.seen for replica in self.replicas.values()), default=0.0)
        return len({name, *(key for key, replica in self.replicas.items() if replica.seen > newest - REPLICA_S)})

    def contenders(self, now: float, name: str) -> int:
        """Return the number of replicas that want permits, this one included."""
        return 1 + len(self.others(now, name))

    def others(self, now: float, name: str) -> list[Replica]:
        """Return the other replicas that want permits."""
        since = now - _CONTENDER_S
        return [
            replica
            for key, replica in self.replicas.items()
            if key != name and replica.want > 0 and replica.seen > since
        ]

    def forget(self, now: float) -> None:
        """Drop what no longer counts, and shorten a pause that is longer than a 429 can cause."""
        self.paused_until = min(self.paused_until, now + MAX_PAUSE_S)
        for resource in RESOURCES:
            self.window(resource).forget(now)
        active = {
            name: replica
            for name, replica in self.replicas.items()
            if replica.seen > now - REPLICA_S or replica.counts(now)
        }
        if (surplus := len(active) - MAX_REPLICAS) > 0:
            idle = sorted((replica.seen, name) for name, replica in active.items() if not replica.counts(now))
            for _, name in idle[:surplus]:
                del active[name]
        for replica in active.values():
            if replica.seen <= now - REPLICA_S:
                replica.concurrent = 0
        self.replicas = active
        if self.adaptive is not None and self.adaptive.until <= now:
            self.adaptive = None


@dataclass(frozen=True, slots=True)
class Use:
    """Request sent at `at` with its estimated tokens; if `requests` is 0, a correction of the estimate."""

    at: float
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a replica: uses since its last report, permits that it keeps, and further ones that it wants.

    `tokens_each` is the estimate of a request. `running` requests are open; it wants to open `want_running` more.
    `sent` are its requests of the last 60 s, for the start of an adaptive limit. No two reports have one `serial`.
    """

    uses: tuple[Use, ...] = ()
    keep: Mapping[str, int] = field(default_factory=dict)
    want: Mapping[str, int] = field(default_factory=dict)
    running: int = 0
    want_running: int = 0
    sent: tuple[Use, ...] = ()
    tokens_each: int = 1
    serial: int = 0

    def unit(self, resource: str) -> int:
        """Return the amount that a request needs."""
        return 1 if resource == REQUESTS else self.tokens_each


def apply_report(record: Record, name: str, report: Report, rates: Rates, now: float) -> Replica:
    """Count a replica's report and assign it a block; return its share, which is valid once the record is written."""
    record.forget(now)
    mine = record.replicas.setdefault(name, Replica())
    _add_to_adaptive(record, mine, report, now)
    in_force = record.effective(rates, now)
    unmet = 0
    for resource, limit in ((REQUESTS, in_force.requests), (TOKENS, in_force.tokens)):
        missing = _take(record, name, report, resource, limit, now)
        unmet = max(unmet, math.ceil(missing / report.unit(resource)))
    mine.want = max(unmet, _take_concurrent(record, name, report, in_force, now))
    mine.seen, mine.until = round(now, 3), round(now + BLOCK_S, 3)
    mine.serial = report.serial
    _raise_adaptive(record, unmet, now)
    return mine


def _take(record: Record, name: str, report: Report, resource: str, limit: int | None, now: float) -> int:
    """Settle the last block of a resource and take the next; return the number of wanted permits that are missing."""
    mine, window, unit = record.replicas[name], record.window(resource), report.unit(resource)
    used = 0
    for use in report.uses:
        if amount := getattr(use, resource):
            window.add(use.at, amount)
            used += amount
    before, keep = mine.block(resource), report.keep.get(resource, 0)
    setattr(mine, resource, 0)
    if limit is None:
        return 0
    window.pace(limit, min(0, keep + used - before), now)  # put unused ones back, but no corrections
    want, free = report.want.get(resource, 0), limit - record.counted(resource, now) - keep
    taken = 0
    if record.paused_until <= now:
        usable = max(0, min(free, int(window.credit(limit, now, unit) + _ROUNDING)))
        taken = min(want, _share(record, name, limit / unit, usable, now, unit))
    if keep + taken < unit:
        taken = 0  # less than a request needs
    window.pace(limit, taken, now)
    setattr(mine, resource, keep + taken)
    mine.served += taken // unit
    if want > taken and free - taken < unit:
        window.end_burst(limit, now, unit)
    return want - taken


def _share(record: Record, name: str, per_window: float, free: int, now: float, unit: int) -> int:
    """Return a replica's part of what is free; `per_window` is the limit in requests, each of which needs `unit`.

    Each replica that wants more gets an equal part, at least one request. That alone would favour a replica that always
    writes first, for example because its clock is ahead. So a replica that is ahead of the others by more than a
    second's worth of its share takes nothing, unless more than a second's worth is free.
    """
    others, mine = record.others(now, name), record.replicas[name]
    if not others:
        return free
    _start_equal(mine, others)
    per_second = per_window / WINDOW_S
    ahead = mine.served - min(replica.served for replica in others)
    if ahead > max(1.0, per_second / (1 + len(others))) and free / unit < max(per_second, 1 + len(others)):
        return 0
    return max(min(unit, free), math.ceil(free / (1 + len(others))))


def _start_equal(mine: Replica, others: Sequence[Replica]) -> None:
    """Let a replica that begins to want more count as served as the others, so that it does not catch up."""
    if not mine.want:
        mine.served = max(mine.served, min(replica.served for replica in others))


def _take_concurrent(record: Record, name: str, report: Report, rates: Rates, now: float) -> int:
    """Set how many requests a replica may have open; return how many more it wants.

    Open ones above its share count until they end, and it begins no further one until then.
    """
    mine, limit = record.replicas[name], rates.concurrent
    mine.concurrent = mine.may_open = 0
    if limit is None:
        return 0
    if rates.requests is rates.tokens is None:
        mine.served += sum(use.requests for use in report.uses)
    if others := record.others(now, name):
        _start_equal(mine, others)
    wanted = report.running + report.want_running
    demands = {
        key: Demand(replica.concurrent + (replica.want if replica in others else 0), replica.served)
        for key, replica in record.replicas.items()
    } | {name: Demand(wanted, mine.served)}
    held = sum(replica.concurrent for replica in record.replicas.values())
    mine.may_open = min(shares(limit, demands)[name], max(0, limit - held))
    mine.concurrent = max(mine.may_open, report.running)
    return wanted - mine.may_open


def pause(record: Record, retry_after_s: float | None, now: float) -> None:
    """Pause all requests after a 429, for at most 120 s."""
    wait_s = min(max(_PAUSE_S if retry_after_s is None else retry_after_s, _MIN_PAUSE_S), MAX_PAUSE_S)
    record.paused_until = max(record.paused_until, now + wait_s)


def lower_adaptive(record: Record, now: float) -> None:
    """Lower the adaptive limit after a 429, or create it; the requests of each replica are added by `apply_report`."""
    record.forget(now)
    if record.adaptive is None:
        record.adaptive = Adaptive(0, now, now, now + ADAPTIVE_S)
    elif now - record.adaptive.changed >= _STEP_S:  # one step for all 429s of a burst
        record.adaptive.limit = max(_MIN_ADAPTIVE, record.adaptive.limit // 2)
        record.adaptive.changed = now
    record.adaptive.until = now + ADAPTIVE_S


def _add_to_adaptive(record: Record, mine: Replica, report: Report, now: float) -> None:
    """Count the requests that a replica sent before the adaptive limit; it becomes half of those of all replicas."""
    adaptive = record.adaptive
    if adaptive is None or mine.adaptive_since == adaptive.since:
        return
    mine.adaptive_since = adaptive.since
    if now - adaptive.since < WINDOW_S:
        for use in report.sent:
            record.requests.add(use.at, use.requests)
        adaptive.limit += sum(use.requests for use in report.sent) // 2


def _raise_adaptive(record: Record, unmet: int, now: float) -> None:
    adaptive = record.adaptive
    if adaptive is not None and unmet and now - max(adaptive.changed, record.paused_until) >= _STEP_S:
        adaptive.limit = max(_MIN_ADAPTIVE, adaptive.limit) + max(_MIN_STEP, adaptive.limit // _RAISE_DIVISOR)
        adaptive.changed = now
