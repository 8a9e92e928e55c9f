"""Shared record of one account (ADR 10): the used part of its budget for a day or month, and the replicas' shares.

No I/O; every time is the server's, in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from typing import Annotated, Literal, NamedTuple

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from openapi_tool.limits.permits import Number, Time

LEASE_S = 60.0  # after its last report, until a replica counts as dead and loses its share
RETURN_S = 2.0  # for which a request waits for idle blocks of other replicas
_KEEP_EMPTY_S = 600.0  # for which an empty share is stored, so that none of its uses is added twice
_BLOCKS_PERCENT = 90  # used, above which each request reserves for itself, not from an idle block
_WARN_PERCENT = 80  # used, at which a warning is logged

UNLIMITED = 2**62
Resource = Annotated[Number, Field(strict=True)]
"""Amount of a resource in a record; the sums of all replicas stay far below `UNLIMITED`."""

_new = tuple.__new__  # saves a Python frame


class Amount(NamedTuple):
    """Upstream requests and tokens."""

    requests: Resource
    tokens: Resource

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return _new(Amount, (self.requests + other.requests, self.tokens + other.tokens))

    def plus_both(self, one: Amount, other: Amount) -> Amount:
        """Return the sum of three."""
        return _new(Amount, (self[0] + one[0] + other[0], self[1] + one[1] + other[1]))

    def minus(self, other: Amount) -> Amount:
        """Return the difference."""
        return _new(Amount, (self.requests - other.requests, self.tokens - other.tokens))

    def times(self, factor: float) -> Amount:
        """Return the amount multiplied and rounded down."""
        return Amount(int(self.requests * factor), int(self.tokens * factor))

    def minimum(self, other: Amount) -> Amount:
        """Return the smaller number of each resource."""
        return Amount(min(self.requests, other.requests), min(self.tokens, other.tokens))

    def positive(self) -> Amount:
        """Replace negative numbers by 0."""
        return Amount(max(0, self.requests), max(0, self.tokens))

    def covers(self, other: Amount) -> bool:
        """Return whether no number is less than in `other`."""
        return self.requests >= other.requests and self.tokens >= other.tokens


NOTHING = Amount(0, 0)


class AccountLimit(NamedTuple):
    """Budget in requests and tokens; None is no limit."""

    requests: int | None = None
    tokens: int | None = None

    def remaining(self, taken: Amount) -> Amount:
        """Return what is left; negative where more is taken."""
        return Amount(
            UNLIMITED if self.requests is None else self.requests - taken.requests,
            UNLIMITED if self.tokens is None else self.tokens - taken.tokens,
        )

    def percentage(self, percent: int) -> AccountLimit:
        """Return a percentage, rounded down."""
        return AccountLimit(*(None if limit is None else limit * percent // 100 for limit in self))

    def limited_part(self, amount: Amount) -> Amount:
        """Return an amount with 0 for resources without a limit."""
        requests, tokens = self
        if requests is not None and tokens is not None:
            return amount
        return Amount(0 if requests is None else amount.requests, 0 if tokens is None else amount.tokens)

    def reached(self, amount: Amount, percent: int) -> bool:
        """Return whether an amount has reached a percentage of any resource."""
        requests, tokens = self
        return (requests is not None and 0 < amount.requests * 100 >= requests * percent) or (
            tokens is not None and 0 < amount.tokens * 100 >= tokens * percent
        )


@dataclass(slots=True)
class AccountShare:
    """Share of one replica until `until`: `reserved` for its running requests, and an idle block for further ones.

    `total` are its reported uses since its start. Until `short_until` one of its requests waits for blocks of others.
    """

    reserved: Amount
    idle: Amount
    until: Time
    total: Amount
    short_until: Time

    @property
    def holds(self) -> bool:
        """Return whether anything is held."""
        return (self.reserved, self.idle) != (NOTHING, NOTHING)


@dataclass(slots=True)
class AccountRecord:
    """Uses of an account, and shares by replica; `warned`: the warning was logged.

    No field has a default: a stored record without one would be that of an unused account.
    """

    version: Literal[1]
    used: Amount
    shares: dict[str, AccountShare]
    warned: bool

    def live(self, now: float, excluding: str = "") -> list[AccountShare]:
        """Return the valid shares, without that of `excluding`."""
        return [share for name, share in self.shares.items() if share.until > now and name != excluding]

    def held(self, now: float, excluding: str = "") -> Amount:
        """Return the sum of the shares in `live`."""
        total = NOTHING
        for share in self.live(now, excluding):
            total = total.plus_both(share.reserved, share.idle)
        return total


@dataclass(frozen=True, slots=True)
class AccountReport:
    """Uses of a replica since its start (`total`) and since its last report (`spent`).

    `reserved`, `needs`: estimates of running and of waiting requests; `ahead`: the idle block that it requests.
    """

    total: Amount = NOTHING
    spent: Amount = NOTHING
    reserved: Amount = NOTHING
    needs: tuple[Amount, ...] = ()
    ahead: Amount = NOTHING


@dataclass(frozen=True, slots=True)
class AccountGrant:
    """Which of the `needs` of a report are reserved, the idle block, and whether to log the warning."""

    granted: tuple[bool, ...]
    idle: Amount
    warns: bool


def unused() -> AccountRecord:
    """Return the record of an unused account."""
    return AccountRecord(1, NOTHING, {}, warned=False)


def dead_replicas(record: AccountRecord, name: str, now: float) -> list[str]:
    """Return the replicas other than `name` whose shares have expired with something held."""
    return [other for other, share in record.shares.items() if share.until <= now and share.holds and other != name]


def apply_report(
    record: AccountRecord,
    name: str,
    report: AccountReport,
    limit: AccountLimit,
    now: float,
    journals: Mapping[str, Amount],
) -> AccountGrant:
    """Apply a replica's report to a record, and the uses of dead replicas from their `journals`.

    No idle block is granted while a request waits for other replicas' blocks.
    """
    _free_dead_shares(record, now, journals)
    # A share is dropped only while it is empty, so `used` contains all that its replica has reported.
    share = record.shares.setdefault(name, AccountShare(NOTHING, NOTHING, 0.0, report.total.minus(report.spent), 0.0))
    _add_missing(record, share, report.total)
    taken = record.used.plus(record.held(now, excluding=name)).plus(report.reserved)
    granted = []
    share.reserved = report.reserved
    for need in report.needs:
        fits = limit.remaining(taken).covers(need)
        granted.append(fits)
        if fits:
            taken, share.reserved = taken.plus(need), share.reserved.plus(need)
    share.short_until = 0.0 if all(granted) else now + RETURN_S
    is_request_waiting = any(each.short_until > now for each in record.shares.values())
    share.idle = NOTHING if is_request_waiting else _block(record, name, report.ahead, limit, taken, now)
    share.until = now + LEASE_S if share.holds else now  # one that holds nothing does not reduce others' blocks
    warns = not record.warned and limit.reached(record.used, _WARN_PERCENT)
    record.warned |= warns
    return AccountGrant(tuple(granted), share.idle, warns)


def _block(record: AccountRecord, name: str, ahead: Amount, limit: AccountLimit, taken: Amount, now: float) -> Amount:
    # At most half of an equal share of what is left below 90 % (ADR 10).
    free = limit.limited_part(limit.percentage(_BLOCKS_PERCENT).remaining(taken))
    if not free.covers(limit.limited_part(Amount(1, 1))):
        return NOTHING
    return limit.limited_part(ahead).minimum(free.times(1 / (2 * (1 + len(record.live(now, excluding=name))))))


def _free_dead_shares(record: AccountRecord, now: float, journals: Mapping[str, Amount]) -> None:
    for name, share in list(record.shares.items()):
        if share.until <= now and name in journals:
            _add_missing(record, share, journals[name])
            share.reserved = share.idle = NOTHING
        if share.until + _KEEP_EMPTY_S <= now and not share.holds:
            del record.shares[name]


def _add_missing(record: AccountRecord, share: AccountShare, total: Amount) -> None:
    missing = total.minus(share.total).positive()
    record.used, share.total = record.used.plus(missing), share.total.plus(missing)


_RECORD = TypeAdapter(AccountRecord)


def encode(record: AccountRecord, labels: Mapping[str, str]) -> bytes:
    """Return the stored form; `labels` describe the account to people who read the bucket."""
    fields = {name: getattr(record, name) for name in AccountRecord.__slots__}
    return orjson.dumps({"about": labels, **fields}, default=list)  # amounts


def parse(stored: bytes | None) -> AccountRecord | None:
    """Return a stored record; None for anything else, also for another version."""
    try:
        record = _RECORD.validate_json(stored or b"")
    except ValidationError:
        return None
    return record if record.used.covers(NOTHING) else None


def decode(stored: bytes | None) -> AccountRecord:
    """Return a stored record; an empty one for anything else."""
    return parse(stored) or unused()


class Period(NamedTuple):
    """Day (`2026-11-22`), month (`2026-11`) or no period, with its bounds in seconds since the epoch.

    `renews` is its end in ISO 8601.
    """

    name: str = ""
    start: float = 0.0
    end: float = float("inf")
    renews: str = ""


ALWAYS = Period()


class Periods:
    """Current day and month of the operator's time zone."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._day = self._month = Period(end=0.0)

    def day(self, now: float) -> Period:
        """Return the day at `now`."""
        if not self._day.start <= now < self._day.end:
            today = datetime.fromtimestamp(now, self._zone).date()
            self._day = self._between(today.isoformat(), today, today + timedelta(days=1))
        return self._day

    def month(self, now: float) -> Period:
        """Return the month at `now`."""
        if not self._month.start <= now < self._month.end:
            first = datetime.fromtimestamp(now, self._zone).date().replace(day=1)
            following = (first + timedelta(days=31)).replace(day=1)
            self._month = self._between(first.strftime("%Y-%m"), first, following)
        return self._month

    def _between(self, name: str, first: date, following: date) -> Period:
        start, end = (datetime(day.year, day.month, day.day, tzinfo=self._zone) for day in (first, following))
        return Period(name, start.timestamp(), end.timestamp(), end.isoformat())
