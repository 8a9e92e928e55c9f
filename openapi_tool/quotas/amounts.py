"""Amounts of requests and tokens, and the attempts that reserve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

Time = Annotated[float, Field(ge=0, le=1e12)]
"""Server time in a record, in seconds since the epoch."""

Number = Annotated[int, Field(ge=-(2**53), le=2**53, strict=True)]
Use = Annotated[int, Field(ge=0, le=2**53, strict=True)]


class Amount(NamedTuple):
    """Upstream requests and tokens; those of a record are not negative: forged ones would lift a budget."""

    requests: Use
    tokens: Use

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(self.requests + other.requests, self.tokens + other.tokens)

    def minus(self, other: Amount) -> Amount:
        """Return the difference."""
        return Amount(self.requests - other.requests, self.tokens - other.tokens)


NOTHING = Amount(0, 0)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to send one request of a call; `id` is unique among all replicas.

    It reserves `need`, from `at` on. `until` is the latest time at which it may still run; both are server times.
    `stored`: the shared record is known to contain it. `cost`: what it cost in the end; NOTHING if it was not sent.
    """

    id: str
    at: float
    need: Amount
    until: float
    project: str = ""
    stored: bool = False
    cost: Amount | None = None
