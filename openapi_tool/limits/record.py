"""Shared record of one key and endpoint: a sliding window of permits that replicas take in blocks (ADR 9).

A block counts as used until its replica reports its use, so that a crash cannot exceed the limit.

Any client that may write the bucket may store anything: `parse` checks types, `correct` times in the future, so that a
forged record has no effect for longer than a real one. No I/O; every time is the server's, in seconds since the epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal

import orjson
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from openapi_tool.limits.permits import Number, Time

WINDOW_S = 60.0
MARGIN_S = 0.5  # for differences between clocks, and between latencies of the upstream
USE_COUNTS_S = WINDOW_S + MARGIN_S  # for which a used permit counts against the limit
INTERVAL_S = 0.5  # by which uses are counted; intervals are numbered from the epoch on
BLOCK_S = 4.0  # within which a block must be used
CONTENDER_S = 4.0  # for which a replica's unmet demand counts; then a killed one loses its share
REPLICA_S = 60.0  # from its last report until a replica is removed from the record
MAX_REPLICAS = 1_000
"""Beyond that, those without permits that reported least recently are removed: they still get permits, but do not lower
the shares of others."""

MAX_PAUSE_S = 120.0
ADAPTIVE_S = 3600.0
MIN_ADAPTIVE, MAX_ADAPTIVE = 10, 1_000_000
"""Without the lower bound, a 429 that other users of the key caused would stop a service that hardly uses it."""

REQUESTS, TOKENS = "requests", "tokens"

_BURST_SHARE = 1 / 6  # of a limit, that an idle key may use at once: all of it would allow no call for 59 s
_MIN_BURST = 10
_CLOCK_S = 10.0
"""Seconds by which a replica's time may be ahead before its uses are dropped as forged. Larger than MARGIN_S, as
dropped uses do not count."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits: requests and tokens in any 60 s, concurrent requests; None is unlimited."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None

    @property
    def limited(self) -> bool:
        """Return whether anything is limited."""
        return self.requests is not None or self.tokens is not None or self.concurrent is not None


@dataclass(slots=True)
class Window:
    """Uses of a resource by interval, and its token bucket, which is full again at `paced_until`."""

    used: dict[Number, Number] = field(default_factory=dict)
    paced_until: Time = 0.0

    def add(self, at: float, amount: int) -> None:
        """Count a use; a negative amount is a correction."""
        interval = math.ceil(at / INTERVAL_S)
        self.used[interval] = self.used.get(interval, 0) + amount

    def drop_expired(self, now: float) -> None:
        """Drop uses that no longer count, and those of the future."""
        latest = now + _CLOCK_S + USE_COUNTS_S
        self.used = {interval: amount for interval, amount in self.used.items() if now < expires(interval) < latest}

    def available(self, limit: int, now: float, unit: int = 1) -> float:
        """Return the content of the token bucket; requests wait while it is below `unit`, the need of one."""
        return (now - self._paced(limit, now, unit)) * limit / WINDOW_S + _burst(limit, unit)

    def take(self, limit: int, amount: int, now: float, unit: int = 1) -> None:
        """Take an amount from the token bucket; a negative one is put back."""
        self.paced_until = self._paced(limit, now, unit) + amount * WINDOW_S / limit

    def end_burst(self, limit: int, now: float, unit: int) -> None:
        """Leave one second's permits in the bucket, to spread over time what the used-up window frees."""
        burst = _burst(limit, unit)
        remaining = min(burst, max(float(unit), limit / WINDOW_S))
        self.paced_until = max(self.paced_until, now + (burst - remaining) * WINDOW_S / limit)

    def _paced(self, limit: int, now: float, unit: int) -> float:
        """Return `paced_until`, at most the refill time: a later one is forged, or of a lower limit."""
        return min(max(self.paced_until, now), now + _burst(limit, unit) * WINDOW_S / limit)


def _burst(limit: int, unit: int) -> float:
    return max(float(min(limit, max(_MIN_BURST, unit))), limit * _BURST_SHARE)


def expires(interval: int) -> float:
    """Return when the uses of an interval no longer count."""
    return interval * INTERVAL_S + USE_COUNTS_S


@dataclass(slots=True)
class LimitShare:
    """Share of one replica: a block of `requests` and `tokens`, valid until `until`, and a number of open requests.

    `want` is its unmet demand, `served` the number of its permits. `seen` is the time of its last report, `serial` its
    number, which shows whether a write of unknown outcome was stored. `adaptive_since` is the start of the last
    adaptive limit to which its earlier requests were added. `may_open` is how many requests it may have open; not
    stored. `concurrent` counts against the limit: `may_open`, or the number of open requests if larger.
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
        """Return whether its block counts against the limit."""
        return self.requests + self.tokens > 0 and self.until + USE_COUNTS_S > now

    def block(self, resource: str) -> int:
        """Return the permits of the block."""
        return self.requests if resource == REQUESTS else self.tokens


@dataclass(slots=True)
class Adaptive:
    """Limit of requests derived from 429s if none is configured, until an hour after the last 429.

    `lowered`: there was a 429 that came 10 s or more after the first or after a raise.
    """

    limit: Number
    since: Time
    changed: Time
    until: Time
    lowered: bool = False


_STORED_FIELDS = LimitShare.__slots__[:-1]  # all but `may_open`


def _replica_fields(row: object) -> object:
    return dict(zip(_STORED_FIELDS, row, strict=True)) if isinstance(row, list) else row


@dataclass(slots=True)
class LimitRecord:
    """State of one key and endpoint."""

    version: Literal[2] = 2
    paused_until: Time = 0.0
    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    replicas: dict[str, Annotated[LimitShare, BeforeValidator(_replica_fields)]] = field(default_factory=dict)
    adaptive: Adaptive | None = None

    def window(self, resource: str) -> Window:
        """Return the window of a resource."""
        return self.requests if resource == REQUESTS else self.tokens

    def counted(self, resource: str, now: float) -> int:
        """Return what counts against the limit: uses, whole blocks."""
        used = sum(amount for interval, amount in self.window(resource).used.items() if expires(interval) > now)
        return used + sum(
            replica.block(resource) for replica in self.replicas.values() if replica.until + USE_COUNTS_S > now
        )

    def effective(self, rates: Rates, now: float) -> Rates:
        """Return the limits in force: configured or adaptive."""
        if rates.requests is None and self.adaptive is not None and self.adaptive.until > now:
            return Rates(max(MIN_ADAPTIVE, self.adaptive.limit), rates.tokens, rates.concurrent)
        return rates

    def replicas_seen(self, name: str) -> int:
        """Return the number of replicas in the 60 s before the newest report.

        Not in the last 60 s: in an outage of the store, replicas run on but cannot report.
        """
        newest = max((replica.seen for replica in self.replicas.values()), default=0.0)
        return len({name, *(key for key, replica in self.replicas.items() if replica.seen > newest - REPLICA_S)})

    def others(self, now: float, name: str) -> list[LimitShare]:
        """Return the other replicas that need permits."""
        since = now - CONTENDER_S
        return [
            replica
            for key, replica in self.replicas.items()
            if key != name and replica.want > 0 and replica.seen > since
        ]

    def correct(self, now: float) -> None:
        """Correct what no replica can have written, and drop uses that no longer count."""
        self.paused_until = min(self.paused_until, now + MAX_PAUSE_S)
        self.requests.drop_expired(now)
        self.tokens.drop_expired(now)
        for replica in self.replicas.values():
            replica.seen = min(replica.seen, now + MARGIN_S)
            replica.until = min(replica.until, now + BLOCK_S + MARGIN_S)
        if (adaptive := self.adaptive) is not None:
            adaptive.limit = min(adaptive.limit, MAX_ADAPTIVE)
            adaptive.since, adaptive.changed = min(adaptive.since, now), min(adaptive.changed, now)
            adaptive.until = min(adaptive.until, now + ADAPTIVE_S)

    def drop_expired(self, now: float) -> None:
        """Correct the record and drop what no longer counts."""
        self.correct(now)
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
            if replica.seen <= now - REPLICA_S:  # only its block still counts
                replica.concurrent = 0
        self.replicas = active
        if self.adaptive is not None and self.adaptive.until <= now:
            self.adaptive = None


_REPLICA = attrgetter(*_STORED_FIELDS)
_RECORD = TypeAdapter(LimitRecord)


def encode(record: LimitRecord) -> bytes:
    """Return the stored form; replicas are lists, as a record may have 1,000."""
    value = {name: getattr(record, name) for name in LimitRecord.__slots__}
    value["replicas"] = {name: _REPLICA(replica) for name, replica in record.replicas.items()}
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def parse(stored: bytes | None) -> LimitRecord | None:
    """Return a stored record; None for anything else or another version."""
    try:
        return _RECORD.validate_json(stored or b"")
    except ValidationError:
        return None


def decode(stored: bytes | None) -> LimitRecord:
    """Return a stored record; an empty one for anything else."""
    return parse(stored) or LimitRecord()
