"""Days and months of budgets. An account has one record for each period."""

from __future__ import annotations

from datetime import date, datetime, timedelta, tzinfo
from typing import NamedTuple


class Period(NamedTuple):
    """Day (name `2026-11-22`), month (name `2026-11`), or all time (empty name).

    It lasts from `start` until before `end`, in seconds since the epoch. `renews` is its end in ISO 8601.
    """

    name: str = ""
    start: float = 0.0
    end: float = float("inf")
    renews: str = ""


ALWAYS = Period()


class Periods:
    """Days and months of the operator's time zone; the ones that were asked for last are kept."""

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
            following = (first + timedelta(days=31)).replace(day=1)  # 31 days later is always in the next month
            self._month = self._between(first.strftime("%Y-%m"), first, following)
        return self._month

    def _between(self, name: str, first: date, following: date) -> Period:
        """Return the period from the beginning of a day until that of a `following` one."""
        start = self._midnight(first)
        end = self._midnight(following)
        return Period(name, start.timestamp(), end.timestamp(), end.isoformat())

    def _midnight(self, day: date) -> datetime:
        return datetime(day.year, day.month, day.day, tzinfo=self._zone)
