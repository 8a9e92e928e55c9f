"""Shared record of one account (ADR 10): what a session, agent or project has used of its budget for a day or month.

No I/O; every time is the server's, in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt, Time, Use
from openapi_tool.quotas.limit_record import MAX_CALL_S, MAX_REPLICAS

REPLICA_S = 300.0  # from its last report until a replica is removed
MAX_OPEN = 4_000  # attempts; a record may have 256 KiB
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
        """Return whether an amount has reached a percentage of any resource."""
        return any(
            limit is not None and 0 < taken * 100 >= limit * percent for limit, taken in zip(self, amount, strict=True)
        )


class OpenAttempt(NamedTuple):
    """Attempt whose cost is not known yet."""

    requests: Use
    tokens: Use
    until: Time

    @property
    def need(self) -> Amount:
        """What is reserved for it."""
        return Amount(self.requests, self.tokens)


class AccountRecord(BaseModel):
    """Uses of an account. `lost` are those of attempts that nobody settled, as their process died: estimates.

    `replicas` are the times of their last reports. `warned`: the warning was logged. `about` describes the account to
    people who read the bucket. `used` has no default: a stored record without it would be that of an unused account.
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
        """What is used for certain, or for all that is known."""
        return self.used.plus(self.lost)

    @property
    def reserved(self) -> Amount:
        """Estimates of the attempts that run."""
        return Amount(sum(one.requests for one in self.open.values()), sum(one.tokens for one in self.open.values()))

    @property
    def room(self) -> int:
        """How many more attempts the record can hold."""
        return max(0, MAX_OPEN - len(self.open))

    def reserve(self, attempt: Attempt) -> None:
        """Reserve what an attempt is expected to cost."""
        self.open[attempt.id] = OpenAttempt(*attempt.need, round(attempt.until, 1))

    def settle(self, name: str, cost: Amount) -> None:
        """Replace what an attempt reserved by its cost."""
        del self.open[name]
        self.add(cost)

    def add(self, cost: Amount) -> None:
        """Add a cost."""
        self.used = Amount(max(0, self.used.requests + cost.requests), max(0, self.used.tokens + cost.tokens))

    def expire(self, now: float) -> bool:
        """Charge attempts that nobody has settled in time; return whether there were any."""
        lost = [name for name, one in self.open.items() if not now < one.until < now + MAX_CALL_S]
        for name in lost:
            self.lost = self.lost.plus(self.open.pop(name).need)
        return bool(lost)

    def held_until(self, limit: AccountLimit, need: Amount) -> float:
        """Return when too little is left for `need` for good if nobody settles an attempt before."""
        charged = self.charged
        until = 0.0
        for one in sorted(self.open.values(), key=lambda one: one.until):
            charged = charged.plus(one.need)
            until = one.until
            if not limit.covers(charged.plus(need)):
                break
        return until

    def report(self, replica: str, now: float) -> None:
        """Record that a replica uses the account."""
        self.replicas[replica] = round(now, 1)
        newest = sorted(self.replicas.items(), key=lambda item: item[1])[-MAX_REPLICAS:]
        self.replicas = {name: min(at, now) for name, at in newest if at > now - REPLICA_S}

    def warns(self, limit: AccountLimit) -> bool:
        """Return whether to log that little is left, once."""
        warns = not self.warned and limit.reached(self.charged, WARN_PERCENT)
        self.warned |= warns
        return warns


def unused(about: Mapping[str, str]) -> AccountRecord:
    """Return the record of an unused account."""
    return AccountRecord(version=2, used=NOTHING, about=dict(about))


def from_version_1(stored: bytes) -> bytes | None:
    """Return the record of an earlier version with what was used and reserved, None for anything else."""
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
    reserved: Amount


class _Version1(BaseModel):
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
