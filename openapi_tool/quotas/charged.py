"""What the accounts of a project hold, for the commands that show use.

Stored results count the requests of calls that have ended. Accounts also hold the requests of calls without a result:
their process has died, or they still run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, tzinfo

from openapi_tool.quotas.account_id import AccountId
from openapi_tool.quotas.account_record import parse
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.periods import Period, Periods
from openapi_tool.state.port import Records

_STORED_S = 40 * 86_400.0  # for which the store keeps the record of an account after its last change


async def charged(
    records: Records, project: str, start: datetime, end: datetime, zone: tzinfo
) -> Mapping[Period, Amount]:
    """Return what is used and reserved in each day that the time from `start` to `end` overlaps.

    If the project has no accounts for these days, return the same for months. A period without an account has no entry:
    no budget for it was set, or its record is too old to be stored. `project` is named as in the records
    (`quota_project`). Raises Unavailable.
    """
    for scope in ("project_day", "project_month"):
        found = {}
        for period in _periods(scope, start.timestamp(), end.timestamp(), zone):
            stored = await records.read(AccountId(scope, project).record_name(period))
            record = parse(stored.value)
            if record is not None:
                found[period] = record.charged.plus(record.reserved)
        if found:
            return found
    return {}


WithoutResult = Mapping[str, Amount]
"""Requests and tokens of calls without a result, by the name of a day or month."""


def without_result(held: Mapping[Period, Amount], stored: Sequence[Amount]) -> WithoutResult:
    """Return what the accounts of periods hold (`charged`) beyond the stored results of the same periods, in order.

    An amount may be below 0: a call that ran at midnight is charged to the day of its requests, and its result counts
    for the day of its end.
    """
    found = {}
    for (period, amount), results in zip(held.items(), stored, strict=True):
        found[period.name] = amount.minus(results)
    return found


def _periods(scope: str, start: float, end: float, zone: tzinfo) -> Iterator[Period]:
    """Yield the days or months between two times for which a record may still be stored."""
    periods = Periods(zone)
    at = max(start, end - _STORED_S)
    while at < end:
        period = periods.day(at) if scope == "project_day" else periods.month(at)
        yield period
        at = period.end
