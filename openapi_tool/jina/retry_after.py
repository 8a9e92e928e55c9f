"""When to ask again: reads the time that the upstream names in a failed response."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

_MAX_TEXT_CHARS = 500  # of a time; bounds the time of parsing it
_MAX_WAIT_S = 1e9  # some 30 years; a longer wait counts as this one


def retry_after_s(envelope: Mapping[str, Any], header: str | None) -> float | None:
    """Return the seconds to wait: of the header Retry-After, else of the body's number, else of the body's date."""
    for value in (header, envelope.get("retryAfter"), envelope.get("retryAfterDate")):
        seconds = seconds_of(value)
        if seconds is not None:
            return seconds
    return None


def seconds_of(value: Any) -> float | None:
    """Return the seconds that a value says, from 0 to some years; None if it says no time.

    It may be a number, a text of digits, or a date as HTTP, ISO 8601 or JavaScript write it.
    """
    if isinstance(value, str):
        text = value[:_MAX_TEXT_CHARS].strip()
        value = float(text) if text.isascii() and text.isdigit() else _seconds_until(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    seconds = float(min(max(value, 0), _MAX_WAIT_S))  # bounded first: an integer may have more digits than a float
    return None if math.isnan(seconds) else seconds


def _seconds_until(date: str) -> float | None:
    for parse in (datetime.fromisoformat, parsedate_to_datetime, _javascript_date):
        try:
            return (parse(date) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError, OverflowError):
            continue
    return None


def _javascript_date(text: str) -> datetime:
    """Parse `Sat Mar 01 2025 12:00:00 GMT+0000`."""
    return datetime.strptime(text, "%a %b %d %Y %H:%M:%S GMT%z")
