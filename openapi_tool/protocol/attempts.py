"""Upstream requests of a call, one by one: for its result card, its log line, its spans and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openapi_tool.protocol.jsonvalue import AttemptObject

MAX_ATTEMPTS = 64
"""Maximum number of attempts that are recorded of one call; a batch with retries may have more."""


@dataclass(slots=True)
class Attempt:
    """One upstream request; `began` is on the monotonic clock, in seconds.

    `resends` counts the requests before it that it repeats. `seconds`, `http_status` and `error_code` are None until it
    ends, `http_status` also without a response, `error_code` also without an error.
    """

    began: float
    method: str
    host: str
    resends: int
    seconds: float | None = None
    http_status: int | None = None
    error_code: str | None = None

    def end(self, now: float, error_code: str | None = None) -> None:
        """Record the end."""
        self.seconds = now - self.began
        self.error_code = error_code


def shown(attempts: Sequence[Attempt]) -> list[AttemptObject]:
    """Return the form of a result card; times in milliseconds, `at_ms` since the first attempt."""
    first = attempts[0].began if attempts else 0.0
    return [_shown(attempt, first) for attempt in attempts]


def _shown(attempt: Attempt, first: float) -> AttemptObject:
    found = AttemptObject(at_ms=round((attempt.began - first) * 1000), http_status=attempt.http_status)
    if attempt.seconds is not None:
        found["ms"] = round(attempt.seconds * 1000)
    if attempt.error_code is not None:
        found["error_code"] = attempt.error_code
    return found


def upstream_span(attempts: Sequence[Attempt], now: float) -> float:
    """Return the seconds from the first request to the last response; one that did not end lasts until `now`."""
    ends = [now if attempt.seconds is None else attempt.began + attempt.seconds for attempt in attempts]
    return max(ends) - min(attempt.began for attempt in attempts)
