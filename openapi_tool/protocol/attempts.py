"""Record of each upstream request of a call, for its result card, log line, spans and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openapi_tool.protocol.jsontext import AttemptObject

MAX_ATTEMPTS = 64
"""Maximum number of recorded attempts of one call; a batch with retries may have more."""


@dataclass(slots=True)
class Attempt:
    """One upstream request; `began` is in seconds on the monotonic clock.

    `resends` is the number of earlier requests that it repeats. `seconds`, `http_status` and `error_code` are None
    until it ends, `http_status` also without a response, `error_code` also without an error.
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


def attempt_objects(attempts: Sequence[Attempt]) -> list[AttemptObject]:
    """Return the attempts for a result card; times in milliseconds, `at_ms` since the first attempt."""
    first = attempts[0].began if attempts else 0.0
    return [_attempt_object(attempt, first) for attempt in attempts]


def _attempt_object(attempt: Attempt, first: float) -> AttemptObject:
    attempt_object = AttemptObject(at_ms=round((attempt.began - first) * 1000), http_status=attempt.http_status)
    if attempt.seconds is not None:
        attempt_object["ms"] = round(attempt.seconds * 1000)
    if attempt.error_code is not None:
        attempt_object["error_code"] = attempt.error_code
    return attempt_object


def upstream_span(attempts: Sequence[Attempt], now: float) -> float:
    """Return the seconds from the first request to the last response, or to `now` if one has not ended."""
    ends = [now if attempt.seconds is None else attempt.began + attempt.seconds for attempt in attempts]
    return max(ends) - min(attempt.began for attempt in attempts)
