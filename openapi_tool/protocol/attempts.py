"""Upstream requests of one call, as its result card and its span show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openapi_tool.protocol.result_objects import AttemptObject

MAX_ATTEMPTS = 64
"""Attempts of one call that are recorded; a batch with retries may have more."""


@dataclass(slots=True)
class UpstreamAttempt:
    """One attempt to send an upstream request.

    - `began`: when it began, in seconds on the monotonic clock.
    - `resends`: how often the same request was tried before.
    - `is_sent`: whether the request has got a connection; without one it is none, and costs nothing.
    - `seconds`: how long it took; None until it has ended.
    - `http_status`: None without a response.
    - `error_code`: None without an error.
    """

    began: float
    method: str
    host: str
    resends: int
    seconds: float | None = None
    http_status: int | None = None
    error_code: str | None = None
    is_sent: bool = False

    def end(self, now: float, error_code: str | None = None) -> None:
        """Record the end at `now`, on the monotonic clock."""
        self.seconds = now - self.began
        self.error_code = error_code


def requests_sent(attempts: Sequence[UpstreamAttempt]) -> int:
    """Return the number of requests, which is less than that of the attempts if some got no connection."""
    return sum(attempt.is_sent for attempt in attempts)


def requests_resent(attempts: Sequence[UpstreamAttempt]) -> int:
    """Return the number of requests that were tried before."""
    return sum(attempt.is_sent and attempt.resends > 0 for attempt in attempts)


def attempt_objects(attempts: Sequence[UpstreamAttempt]) -> list[AttemptObject]:
    """Return the attempts for a result card."""
    objects = []
    for attempt in attempts:
        at_ms = round((attempt.began - attempts[0].began) * 1000)
        attempt_object = AttemptObject(at_ms=at_ms, http_status=attempt.http_status)
        if attempt.seconds is not None:
            attempt_object["ms"] = round(attempt.seconds * 1000)
        if attempt.error_code is not None:
            attempt_object["error_code"] = attempt.error_code
        objects.append(attempt_object)
    return objects


def upstream_seconds(attempts: Sequence[UpstreamAttempt], now: float) -> float:
    """Return the seconds from the first request to the last response, to `now` if one has not ended."""
    ends = [now if attempt.seconds is None else attempt.began + attempt.seconds for attempt in attempts]
    return max(ends) - min(attempt.began for attempt in attempts)
