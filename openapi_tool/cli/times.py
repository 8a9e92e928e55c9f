"""Times in options of commands: a span such as 7d, 24h or 30m, or a date or time in ISO 8601."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from openapi_tool.cli.output import fail
from openapi_tool.tools.wording import short

_SPAN = re.compile(r"(?P<number>[0-9]{1,4}+)(?P<unit>[dhm])")  # 7d
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


def time_before(text: str, now: datetime, option: str) -> datetime:
    """Return the time that is a span before now, or that a date or time names; exit with 2 if it is neither."""
    span = _span(text)
    return _absolute(text, option) if span is None else now - span


def time_after(text: str, now: datetime, option: str) -> datetime:
    """Return the time that is a span after now, or that a date or time names; exit with 2 if it is neither."""
    span = _span(text)
    if span is None:
        return _absolute(text, option)
    try:
        return now + span
    except OverflowError:
        fail(f"{option} {short(text)!r} is too far away")


def _span(text: str) -> timedelta | None:
    match = _SPAN.fullmatch(text)
    return timedelta(**{_UNITS[match["unit"]]: int(match["number"])}) if match else None


def _absolute(text: str, option: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        wanted = "neither a span such as 7d, 24h or 30m nor a date or time such as 2030-01-31T12:00"
        fail(f"{option} {short(text)!r} is {wanted}")
