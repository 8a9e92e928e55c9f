"""What was used of one limit in the last 60 s, and the pace at which the rest may be used. No I/O."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, Field

from openapi_tool.quotas.amounts import Number, Time

WINDOW_S = 60.0  # of the limits: they apply to any 60 s
MARGIN_S = 0.5  # for differences between clocks, and between latencies of the upstream
COUNTS_S = WINDOW_S + MARGIN_S  # for which a use counts
INTERVAL_S = 0.5  # uses are counted in intervals of this length, numbered from the epoch on
_CLOCK_S = 10.0  # by which a replica's clock may be ahead; a use that is later than that is forged, and dropped
_BURST_SHARE = 1 / 6  # of the limit may be used at once by a key that was idle
_MIN_BURST = 10  # units that may be used at once if that is more, and not more than half of the limit
_ROUNDING = 1e-6  # credit that may be missing, as sums of floats are not exact
_PACED_S = 0.005  # for which a calculated credit is good enough: calls of one moment need no other


def interval(at: float) -> int:
    """Return the number of the interval that contains a time: the interval 3 is from 1.0 (not included) to 1.5."""
    return math.ceil(at / INTERVAL_S)


def expires(number: int) -> float:
    """Return when the uses of an interval no longer count."""
    return number * INTERVAL_S + COUNTS_S


class Window(BaseModel):
    """Uses of one resource (requests or tokens) by interval, and the *credit* of its pace at the time `paced`.

    A *unit* is what one request is expected to use: 1 request, or some number of tokens. A unit may be used while the
    credit is not negative, and each use takes its amount from the credit. A key that was idle has the credit for a
    burst. Afterwards the credit grows at the highest constant rate at which the limit is never used up: so the burst is
    paid back over the whole next minute. At a rate that did not depend on the burst, the limit would be used up after
    some seconds, and all calls would wait until the burst no longer counts.
    """

    used: dict[Number, Number] = Field(default_factory=dict)
    credit: Annotated[float, Field(ge=-1e15, le=1e15)] = 1e15  # `pace` lowers it to what the burst allows
    paced: Time = 0.0

    def drop_expired(self, now: float) -> None:
        """Drop uses that no longer count, and those of the future."""
        latest = now + _CLOCK_S + COUNTS_S
        self.used = {number: amount for number, amount in self.used.items() if now < expires(number) < latest}
        self.paced = min(self.paced, now)

    def total(self, now: float) -> int:
        """Return what was used in the last `COUNTS_S` seconds."""
        oldest = (now - COUNTS_S) / INTERVAL_S  # number of the interval; the ones after it count
        return sum([amount for number, amount in self.used.items() if number > oldest])

    def since(self, at: float) -> int:
        """Return what was used after the interval of a time."""
        return sum(amount for number, amount in self.used.items() if number > interval(at))

    def add(self, at: float, amount: int, *, paced: bool = True) -> None:
        """Count a use; a negative amount is a correction. Only if `paced`, it takes credit or gives it back."""
        number = interval(at)
        self.used[number] = self.used.get(number, 0) + amount
        if paced:
            self.credit -= amount

    def pace(self, limit: int, unit: int, now: float) -> None:
        """Bring the credit up to now, unless it was a moment ago."""
        if 0 <= now - self.paced < _PACED_S:
            return
        min_burst = min(_MIN_BURST * unit, limit / 2)
        burst = max(min_burst, limit * _BURST_SHARE, unit)
        left = max(0, limit - self.total(now))
        grown = self.credit + self.rate(limit, unit, now) * (now - self.paced)
        # `burst - unit`: with a credit of 0, one unit may still be used.
        self.credit = max(-float(limit), min(grown, burst - unit, left))
        self.paced = now

    def rate(self, limit: int, unit: int, now: float) -> float:
        """Return the rate, in units of the resource per second, at which the credit grows from now on.

        It is the highest one at which no more than the limit is used until all present uses have expired, apart from
        one unit, which may wait for that. `spare` is what may be used until the next interval expires.
        """
        credit = max(0.0, self.credit)
        spare = limit - self.total(now) - credit + unit
        rate = (limit - min(credit, limit)) / COUNTS_S
        for number in sorted(self.used):
            seconds = expires(number) - now
            if seconds > 0:
                rate = min(rate, spare / seconds)
                spare += self.used[number]
        return max(0.0, rate)

    def has_room(self, limit: int, unit: int, before: int, now: float) -> bool:
        """Return whether a unit may be used now, after `before` other units. The credit must be up to date (`pace`)."""
        is_paced = self.credit - before * unit >= -_ROUNDING
        return is_paced and self.total(now) + (before + 1) * unit <= limit

    def wait_s(self, limit: int, unit: int, place: int, now: float) -> float:
        """Return a lower bound of the seconds until `place` units may be used, the last of them included."""
        return max(0.0, self._paced_wait_s(limit, unit, place), self._freed_wait_s(limit, unit, place, now))

    def _paced_wait_s(self, limit: int, unit: int, place: int) -> float:
        """Return the seconds until the credit suffices, if it grows as fast as it ever can: by the limit in 60 s."""
        missing = (place - 1) * unit - min(self.credit, limit)
        return missing * WINDOW_S / limit

    def _freed_wait_s(self, limit: int, unit: int, place: int, now: float) -> float:
        """Return the seconds until enough uses have expired."""
        # Of more units than the limit, each further limit of them has to wait for a whole window.
        windows = max(0, math.ceil(place * unit / limit) - 1)
        missing = place * unit - windows * limit - (limit - self.total(now))
        freed_s = 0.0
        for number in sorted(self.used):
            if missing <= 0:
                break
            if expires(number) > now:
                missing -= self.used[number]
                freed_s = expires(number) - now
        return freed_s + windows * COUNTS_S
