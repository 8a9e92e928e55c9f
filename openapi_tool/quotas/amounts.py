"""Amounts of requests and tokens, and the attempts that reserve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

Time = Annotated[float, Field(ge=0, le=1e12)]
"""Server time in a record, in seconds since the epoch."""

Number = Annotated[int, Field(ge=-(2**53), le=2**53, strict=True)]
"""Integer in a record, small enough that each reader of JSON reads it exactly, also one that uses floats."""

Use = Annotated[int, Field(ge=0, le=2**53, strict=True)]
"""Number of requests or tokens in the record of an account. A negative one, which could be forged, would lift a
budget."""


class Amount(NamedTuple):
    """Upstream requests and tokens."""

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

    It reserves the amount `need` from the time `at` on, and has ended at `until` for certain (server times).
    `stored` says whether the shared record is known to have contained the attempt. `cost` is what it cost in the end:
    None as long as it runs, NOTHING if it was not sent.
    """

    id: str
    at: float
    need: Amount
    until: float
    project: str = ""
    stored: bool = False
    cost: Amount | None = None
