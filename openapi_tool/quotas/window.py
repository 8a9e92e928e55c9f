"""What was used of a limit in the last 60 s, and the pace at which the rest may be used. No I/O."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, Field

from openapi_tool.quotas.amounts import Number, Time

WINDOW_S = 60.0
MARGIN_S = 0.5  # for differences between clocks, and between latencies of the upstream
INTERVAL_S = 0.5  # by which uses are counted; intervals are numbered from the epoch on
COUNTS_S = WINDOW_S + MARGIN_S  # for which a use counts
_CLOCK_S = 10.0  # by which a replica's clock may be ahead before its uses are dropped as forged
_BURST_SHARE, _MIN_BURST = 1 / 6, 10
_ROUNDING = 1e-6
_PACED_S = 0.005


def interval(at: float) -> int:
    """Return the interval of a time."""
    return math.ceil(at / INTERVAL_S)


def expires(number: int) -> float:
    """Return when the uses of an interval no longer count."""
    return number * INTERVAL_S + COUNTS_S


class Window(BaseModel):
    """Uses of one resource by interval, and the credit of its pace at the time `paced`.

    A unit may be used while the credit is not negative; each use takes its amount from it. So an idle key may send a
    burst. Afterwards the credit grows at the highest constant rate at which the window never runs dry, so the burst is
    paid back over the whole next minute: a fixed rate would end in a pause until the burst leaves the window.
    """

    used: dict[Number, Number] = Field(default_factory=dict)
    credit: Annotated[float, Field(ge=-1e15, le=1e15)] = 1e15  # as much as the burst allows
    paced: Time = 0.0

    def drop_expired(self, now: float) -> None:
        """Drop uses that no longer count, and those of the future."""
        latest = now + _CLOCK_S + COUNTS_S
        self.used = {number: amount for number, amount in self.used.items() if now < expires(number) < latest}
        self.paced = min(self.paced, now)

    def total(self, now: float) -> int:
        """Return what counts."""
        oldest = (now - COUNTS_S) / INTERVAL_S
        return sum([amount for number, amount in self.used.items() if number > oldest])

    def since(self, at: float) -> int:
        """Return what was used after a time."""
        return sum(amount for number, amount in self.used.items() if number > interval(at))

    def add(self, at: float, amount: int, *, paced: bool = True) -> None:
        """Count a use; a negative amount is a correction. It takes no credit unless `paced`."""
        number = interval(at)
        self.used[number] = self.used.get(number, 0) + amount
        if paced:
            self.credit -= amount

    def pace(self, limit: int, unit: int, now: float) -> None:
        """Bring the credit up to now, unless it was a moment ago."""
        if 0 <= now - self.paced < _PACED_S:
            return
        burst = max(min(_MIN_BURST * unit, limit / 2), limit * _BURST_SHARE, unit)
        grown = self.credit + self.rate(limit, unit, now) * (now - self.paced)
        most = min(burst - unit, max(0, limit - self.total(now)))
        self.credit = max(-float(limit), min(grown, most))
        self.paced = now

    def rate(self, limit: int, unit: int, now: float) -> float:
        """Return the highest amount per second that can be used from now on until only a unit waits for the window."""
        credit = max(0.0, self.credit)
        spare = limit - self.total(now) - credit + unit
        rate = (limit - min(credit, limit)) / COUNTS_S
        for number in sorted(self.used):
            if (seconds := expires(number) - now) > 0:
                rate = min(rate, spare / seconds)
                spare += self.used[number]
        return max(0.0, rate)

    def has_room(self, limit: int, unit: int, before: int, now: float) -> bool:
        """Return whether a unit may be used now, after `before` others. The credit must be up to date."""
        is_paced = self.credit - before * unit >= -_ROUNDING
        return is_paced and self.total(now) + (before + 1) * unit <= limit

    def wait_s(self, limit: int, unit: int, place: int, now: float) -> float:
        """Return a lower bound of the seconds until `place` units may be used, the last of them included."""
        paced_s = ((place - 1) * unit - min(self.credit, limit)) * WINDOW_S / limit
        missing = place * unit - (limit - self.total(now))
        freed_s = 0.0
        windows = max(0, math.ceil(place * unit / limit) - 1)  # beyond the limit, whole windows have to pass
        missing -= windows * limit
        for number in sorted(self.used):
            if missing <= 0:
                break
            if expires(number) > now:
                missing -= self.used[number]
                freed_s = expires(number) - now
        return max(0.0, paced_s, freed_s + windows * COUNTS_S)
