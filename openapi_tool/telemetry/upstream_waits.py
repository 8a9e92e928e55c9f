"""Upstream requests that wait for a response: what `top` and the page say about a host that does not answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from openapi_tool.protocol.attempts import UpstreamAttempt

_SHOWN_S = 60.0
"""Seconds for which a request that ended without a response still counts."""


@dataclass(slots=True)
class _Host:
    """Begin of each open request, the oldest first.

    `silent_since` is when the host answered last, or when the first request after a pause began. `unanswered_at` is
    when a request last ended without a response since then.
    """

    open: dict[int, float] = field(default_factory=dict)
    silent_since: float = 0.0
    unanswered_at: float | None = None

    def is_waited_for(self, now: float) -> bool:
        """Return whether a request is open, or ended without a response not long ago."""
        return bool(self.open) or (self.unanswered_at is not None and now - self.unanswered_at <= _SHOWN_S)


class UpstreamWaits:
    """Requests of this process by host; times are on the monotonic clock."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}

    def begin(self, attempt: UpstreamAttempt) -> None:
        """Record that a request is sent now."""
        host = self._hosts.setdefault(attempt.host, _Host())
        if not host.is_waited_for(attempt.began):
            host.silent_since, host.unanswered_at = attempt.began, None
        host.open[id(attempt)] = attempt.began

    def end(self, attempt: UpstreamAttempt) -> None:
        """Record the end of a request; one that was cancelled says nothing about its host."""
        host = self._hosts[attempt.host]
        del host.open[id(attempt)]
        if attempt.http_status is not None:
            host.silent_since, host.unanswered_at = time.monotonic(), None
        elif attempt.seconds is not None:
            host.unanswered_at = time.monotonic()

    def snapshot(self) -> list[dict[str, Any]]:
        """Return each host that is waited for: its open requests, the age of the oldest, and how long it is silent."""
        now = time.monotonic()
        return [
            {
                "host": name,
                "open": len(host.open),
                "oldest_s": round(now - next(iter(host.open.values()), now), 1),
                "silent_s": round(now - host.silent_since, 1),
            }
            for name, host in self._hosts.items()
            if host.is_waited_for(now)
        ]


UPSTREAM_WAITS = UpstreamWaits()
