"""Shared record of one account (ADR 10): what a session, agent or project has used of its budget for a day or month.

`Account` of each replica reads, changes and writes it. No I/O; every time is the server's, in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt, Time, Use
from openapi_tool.quotas.limit_record import MAX_CALL_S, MAX_REPLICAS

REPLICA_S = 300.0  # from its last report until a replica is removed
MAX_OPEN = 4_000  # attempts; so the record stays below the 256 KiB that its bucket accepts
WARN_PERCENT = 80  # used, at which a warning is logged

Name = Annotated[str, Field(max_length=100)]


class AccountLimit(NamedTuple):
    """Budget in requests and tokens; None is no limit."""

    requests: int | None = None
    tokens: int | None = None

    def covers(self, amount: Amount) -> bool:
        """Return whether an amount exceeds no limit."""
        return all(limit is None or taken <= limit for limit, taken in zip(self, amount, strict=True))

    def reached(self, amount: Amount, percent: int) -> bool:
        """Return whether an amount has reached a percentage of the limit of any resource."""
        return any(reaches(limit, taken, percent) for limit, taken in zip(self, amount, strict=True))


def reaches(limit: int | None, taken: int, percent: int) -> bool:
    """Return whether so much is taken, and not 0, that it is a percentage of a limit or more."""
    return limit is not None and taken > 0 and taken * 100 >= limit * percent


class OpenAttempt(NamedTuple):
    """Attempt whose cost is not known yet: what it reserves, and `until` when it has ended for certain."""

    requests: Use
    tokens: Use
    until: Time

    @property
    def need(self) -> Amount:
        """What is reserved for it."""
        return Amount(self.requests, self.tokens)


class AccountRecord(BaseModel):
    """Uses of an account.

    `used` is the cost of attempts that have ended. `lost` is the expected cost of attempts that nobody settled in time,
    as their process died. `open` has the attempts that run, by their ids. `replicas` has the time at which each replica
    last wrote the record. `warned` says whether a replica has logged that little is left. `about` describes the account
    to people who read the bucket.

    `used` has no default: otherwise a damaged record without it would be read as that of an unused account.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[2]
    used: Amount
    lost: Amount = NOTHING
    open: dict[Name, OpenAttempt] = Field(default_factory=dict)
    replicas: dict[Name, Time] = Field(default_factory=dict)
    warned: bool = False
    about: dict[str, str] = Field(default_factory=dict)

    @property
    def charged(self) -> Amount:
        """What no settlement will reduce: known costs, and expected ones of attempts that nobody settled."""
        return self.used.plus(self.lost)

    @property
    def reserved(self) -> Amount:
        """Expected cost of the attempts that run."""
        attempts = self.open.values()
        return Amount(sum(one.requests for one in attempts), sum(one.tokens for one in attempts))

    @property
    def room(self) -> int:
        """How many more attempts the record can hold."""
        return max(0, MAX_OPEN - len(self.open))

    def reserve(self, attempt: Attempt) -> None:
        """Reserve what an attempt is expected to cost."""
        self.open[attempt.id] = OpenAttempt(*attempt.need, round(attempt.until, 1))

    def settle(self, name: str, cost: Amount) -> None:
        """Replace what the attempt with the id `name` reserved by its cost."""
        del self.open[name]
        self.add(cost)

    def add(self, cost: Amount) -> None:
        """Charge a cost."""
        self.used = Amount(max(0, self.used.requests + cost.requests), max(0, self.used.tokens + cost.tokens))

    def expire(self, now: float) -> bool:
        """Charge attempts that nobody has settled in time; return whether there were any.

        No replica reserves for longer than `MAX_CALL_S`: an attempt with a later end is forged, and charged at once.
        """
        lost = [name for name, one in self.open.items() if not now < one.until < now + MAX_CALL_S]
        for name in lost:
            self.lost = self.lost.plus(self.open.pop(name).need)
        return bool(lost)

    def held_until(self, limit: AccountLimit, need: Amount) -> float:
        """Return when it is certain whether the budget covers `need`, if nobody settles an attempt before.

        Attempts that nobody settles are charged at their ends, one after another. Once what is charged leaves too
        little for `need`, no later settlement helps. Without such a moment, the result is the end of the last attempt.
        """
        charged = self.charged
        until = 0.0
        for one in sorted(self.open.values(), key=lambda one: one.until):
            charged = charged.plus(one.need)
            until = one.until
            if not limit.covers(charged.plus(need)):
                break
        return until

    def report(self, replica: str, now: float) -> None:
        """Record that a replica uses the account, and forget replicas that have not for `REPLICA_S`."""
        self.replicas[replica] = round(now, 1)
        newest = sorted(self.replicas.items(), key=lambda item: item[1])[-MAX_REPLICAS:]
        self.replicas = {name: min(at, now) for name, at in newest if at > now - REPLICA_S}

    def warns(self, limit: AccountLimit) -> bool:
        """Return whether to log now that little is left: once for each account."""
        warns = not self.warned and limit.reached(self.charged, WARN_PERCENT)
        self.warned |= warns
        return warns


def unused(about: Mapping[str, str]) -> AccountRecord:
    """Return the record of an unused account."""
    return AccountRecord(version=2, used=NOTHING, about=dict(about))


def from_version_1(stored: bytes) -> bytes | None:
    """Return a record of version 1 in the present form, all that was reserved as used; None for anything else."""
    try:
        earlier = _Version1.model_validate_json(stored)
    except ValidationError:
        return None
    used = earlier.used
    for share in earlier.shares.values():
        used = used.plus(share.reserved)
    record = AccountRecord(version=2, used=used, warned=earlier.warned, about=earlier.about)
    return record.model_dump_json().encode()


class _Share1(BaseModel):
    """Part of a budget that a replica has reserved for its requests."""

    reserved: Amount


class _Version1(BaseModel):
    """Record of version 1, in which replicas reserved shares of the budget, and not each attempt an amount."""

    version: Literal[1]
    used: Amount
    shares: dict[str, _Share1]
    warned: bool
    about: dict[str, str] = Field(default_factory=dict)


def parse(stored: bytes | None) -> AccountRecord | None:
    """Return a stored record; None for anything else, also for another version."""
    try:
        return AccountRecord.model_validate_json(stored or b"")
    except ValidationError:
        return None
