"""Reports of replicas to the shared record of one key and endpoint, and the blocks that they get (ADR 9). No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from openapi_tool.limits.record import (
    ADAPTIVE_S,
    BLOCK_S,
    CONTENDER_S,  # after this time without a report a replica competes for nothing
    MIN_ADAPTIVE,
    REQUESTS,
    TOKENS,
    WINDOW_S,
    Adaptive,
    LimitRecord,
    LimitShare,
    Rates,
)

_ROUNDING = 1e-6
_STEP_S = 10.0  # minimum time between changes of the adaptive limit
_RAISE_DIVISOR = 20  # it rises by 1/20
_MIN_STEP = 2


@dataclass(frozen=True, slots=True)
class Use:
    """Request and its estimated tokens; a correction of the estimate if `requests` is 0."""

    at: float
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReport:
    """Report of a replica: uses since the last one, permits that it keeps, and how many more requests it needs to send.

    A request needs about `tokens_each`. `running` ones are open. `sent` are those of the last 60 s, for a new adaptive
    limit. `refused`: a call got no permit since the last report. Each report has its own `serial`. Since `steady_since`
    it has reported every few seconds.
    """

    uses: tuple[Use, ...] = ()
    keep: Mapping[str, int] = field(default_factory=dict)
    want: int = 0
    running: int = 0
    sent: tuple[Use, ...] = ()
    refused: bool = False
    tokens_each: int = 1
    serial: int = 0
    steady_since: float = math.inf

    def unit(self, resource: str) -> int:
        """Return what a request needs."""
        return 1 if resource == REQUESTS else self.tokens_each


def apply_report(record: LimitRecord, name: str, report: LimitReport, rates: Rates, now: float) -> LimitShare:
    """Count a replica's report and assign it a block; return its share, valid once the record is written."""
    record.drop_expired(now)
    mine = record.replicas.setdefault(name, LimitShare())
    _add_to_adaptive(record, mine, report, now)
    in_force = record.effective(rates, now)
    unmet = 0
    for resource, limit in ((REQUESTS, in_force.requests), (TOKENS, in_force.tokens)):
        missing = _take(record, name, report, resource, limit, now)
        unmet = max(unmet, math.ceil(missing / report.unit(resource)))
    mine.want = max(unmet, _take_concurrent(record, name, report, in_force, now))
    mine.seen, mine.until = round(now, 3), round(now + BLOCK_S, 3)
    mine.serial = report.serial
    if unmet or report.refused:
        _raise_adaptive(record, now)
    return mine


def _take(record: LimitRecord, name: str, report: LimitReport, resource: str, limit: int | None, now: float) -> int:
    """Settle the last block and take the next; return how much of what it needs is missing."""
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
    # Put unused permits back in the bucket. Uses above the block (low estimates, outages) take nothing from it.
    window.take(limit, min(0, keep + used - before), now, unit)
    want = report.want if resource == REQUESTS else max(0, report.want * unit - keep)
    free = limit - record.counted(resource, now) - keep
    taken = 0
    if record.paused_until <= now:
        usable = max(0, min(free, int(window.available(limit, now, unit) + _ROUNDING)))
        taken = min(want, _share(record, name, limit / unit, usable, now, unit))
    if keep + taken < unit:
        taken = 0  # less than a request needs
    window.take(limit, taken, now, unit)
    setattr(mine, resource, keep + taken)
    mine.served += taken // unit
    if want > taken and free - taken < unit:  # the window is used up
        window.end_burst(limit, now, unit)
    return want - taken


def _share(record: LimitRecord, name: str, per_window: float, free: int, now: float, unit: int) -> int:
    """Return a replica's part of what is free; `per_window` is the limit in requests, each of which needs `unit`.

    Each replica that needs more gets an equal part, at least one request. As one may always write first, for example by
    its clock, a replica takes nothing while it is ahead by more than a second of its share, unless a second of the
    limit is free.
    """
    others, mine = record.others(now, name), record.replicas[name]
    if not others:
        return free
    _start_equal(mine, others)
    per_second = per_window / WINDOW_S
    least = min(replica.served for replica in others)
    mine.served = min(mine.served, least + math.ceil(per_window))  # or a forged count would exclude this replica
    ahead = mine.served - least
    if ahead > max(1.0, per_second / (1 + len(others))) and free / unit < max(per_second, 1 + len(others)):
        return 0
    return max(min(unit, free), math.ceil(free / (1 + len(others))))


def _start_equal(mine: LimitShare, others: Sequence[LimitShare]) -> None:
    """Count a replica that begins to need more as served like the others, or it would catch up."""
    if not mine.want:
        mine.served = max(mine.served, min(replica.served for replica in others))


def _take_concurrent(record: LimitRecord, name: str, report: LimitReport, rates: Rates, now: float) -> int:
    """Set how many requests a replica may have open; return how many more it needs.

    Open ones above its share count until they end; it begins none until then.
    """
    mine = record.replicas[name]
    mine.concurrent = mine.may_open = 0
    if rates.concurrent is None:
        return 0
    if rates.requests is rates.tokens is None:  # else `_take` has counted them
        mine.served += sum(use.requests for use in report.uses)
    if others := record.others(now, name):
        _start_equal(mine, others)
    # Dead replicas have no open requests. After an outage all reports are late: wait for those of the others.
    if now - report.steady_since >= CONTENDER_S:
        for replica in record.replicas.values():
            if replica.seen <= now - CONTENDER_S:
                replica.concurrent = 0
    wanted = report.running + report.want
    mine.may_open = may_open(record, name, wanted, rates.concurrent, now)
    mine.concurrent = max(mine.may_open, report.running)
    return wanted - mine.may_open


class Demand(NamedTuple):
    """Requests that a replica would have open, and its permits so far: those with the fewest come first."""

    requests: int
    served: int


def shares(limit: int, demands: Mapping[str, Demand]) -> dict[str, int]:
    """Divide `limit` by max-min fairness: no replica gets more than it needs, and the others get what it leaves."""
    found: dict[str, int] = {}
    left = limit
    ascending = sorted(demands, key=lambda name: demands[name].requests)
    while ascending and demands[ascending[0]].requests <= left // len(ascending):
        name = ascending.pop(0)
        found[name] = demands[name].requests
        left -= found[name]
    equal, remainder = divmod(left, len(ascending)) if ascending else (0, 0)
    for place, name in enumerate(sorted(ascending, key=lambda name: (demands[name].served, name))):
        found[name] = equal + (place < remainder)
    return found


def may_open(record: LimitRecord, name: str, wanted: int, limit: int, now: float) -> int:
    """Return how many of the `wanted` requests a replica may have open."""
    others = {key: replica for key, replica in record.replicas.items() if key != name}
    since, mine = now - CONTENDER_S, record.replicas.get(name) or LimitShare()
    demands = {name: Demand(wanted, mine.served)} | {
        key: Demand(replica.concurrent + (replica.want if replica.seen > since else 0), replica.served)
        for key, replica in others.items()
    }
    held = sum(replica.concurrent for replica in others.values())
    return min(shares(limit, demands)[name], max(0, limit - held))


def lower_adaptive(record: LimitRecord, now: float) -> None:
    """Lower the adaptive limit after a 429, or create it; `apply_report` adds the requests of each replica."""
    record.drop_expired(now)
    if record.adaptive is None:
        record.adaptive = Adaptive(limit=0, since=now, changed=now, until=now + ADAPTIVE_S)
    elif now - record.adaptive.changed >= _STEP_S:  # one step for all 429s of a burst
        record.adaptive.limit = max(MIN_ADAPTIVE, record.adaptive.limit // 2)
        record.adaptive.changed, record.adaptive.lowered = now, True
    record.adaptive.until = now + ADAPTIVE_S


def _add_to_adaptive(record: LimitRecord, mine: LimitShare, report: LimitReport, now: float) -> None:
    """Count what a replica sent before the adaptive limit; add half of it to this limit."""
    adaptive = record.adaptive
    if adaptive is None or mine.adaptive_since == adaptive.since:
        return
    mine.adaptive_since = adaptive.since
    if now - adaptive.since < WINDOW_S:
        for use in report.sent:
            record.requests.add(use.at, use.requests)
        adaptive.limit += sum(use.requests for use in report.sent) // 2


def may_raise_adaptive(record: LimitRecord, now: float) -> bool:
    """Return whether the adaptive limit may be raised."""
    adaptive = record.adaptive
    return adaptive is not None and now - max(adaptive.changed, record.paused_until) >= _STEP_S


def _raise_adaptive(record: LimitRecord, now: float) -> None:
    """Double the adaptive limit until the next 429, like TCP's slow start, then add a twentieth at a time.

    It begins at half of the last minute's requests, which may be far below the real limit.
    """
    adaptive = record.adaptive
    if adaptive is not None and may_raise_adaptive(record, now):
        limit = max(MIN_ADAPTIVE, adaptive.limit)
        adaptive.limit = limit + (max(_MIN_STEP, limit // _RAISE_DIVISOR) if adaptive.lowered else limit)
        adaptive.changed = now
