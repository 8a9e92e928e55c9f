"""What the accounts of a project hold: also requests whose calls have no result, as their process died or they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, tzinfo

from openapi_tool.quotas.account import AccountId
from openapi_tool.quotas.account_record import parse
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.periods import Period, Periods
from openapi_tool.state.port import Records

_DAYS = 40  # for which an account is stored after its last change


async def charged(
    records: Records, project: str, start: datetime, end: datetime, zone: tzinfo
) -> Mapping[Period, Amount]:
    """Return what is used and reserved in each day, or else in each month, that a time overlaps.

    There is no entry without an account: no budget of the project was set for days or months, or it is 40 days old.
    `project` is named as in the records (`quota_project`). Raises Unavailable.
    """
    for scope in ("project_day", "project_month"):
        found = {}
        for period in _periods(scope, start.timestamp(), end.timestamp(), zone):
            record = parse((await records.read(AccountId(scope, project).record_name(period))).value)
            if record is not None:
                found[period] = record.charged.plus(record.reserved)
        if found:
            return found
    return {}


WithoutResult = Mapping[str, Amount]
"""Requests and tokens by the name of a day or month."""


def without_result(held: Mapping[Period, Amount], stored: Sequence[Amount]) -> WithoutResult:
    """Return what accounts hold beyond what the stored results count, which are in the order of the accounts.

    A call that ran at midnight is charged to the day of its requests, and its result counts for that of its end. So a
    difference below 0 is one of another day.
    """
    return {period.name: amount.minus(results) for (period, amount), results in zip(held.items(), stored, strict=True)}


def _periods(scope: str, start: float, end: float, zone: tzinfo) -> Iterator[Period]:
    periods = Periods(zone)
    at = max(start, end - _DAYS * 86_400)
    while at < end:
        period = periods.day(at) if scope == "project_day" else periods.month(at)
        yield period
        at = period.end
