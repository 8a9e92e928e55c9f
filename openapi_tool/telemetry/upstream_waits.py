"""Requests to Jina's hosts that wait for a response: what `top` and the status page say of a host that does not answer.

`jina/attempts.py` reports when each request begins and ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from openapi_tool.protocol.attempts import UpstreamAttempt

_SHOWN_S = 60.0
"""Seconds for which a request that was sent, and ended without a response, still counts."""


@dataclass(slots=True)
class _Host:
    """What is known of one host; times are on the monotonic clock.

    - `open`: when each open request began, the oldest first, by the `id` of its attempt.
    - `silent_since`: when the host answered last; if then nobody waited for it, when the next request began.
    - `unanswered_at`: when a request that was sent last ended without a response since then.
    """

    open: dict[int, float] = field(default_factory=dict)
    silent_since: float = 0.0
    unanswered_at: float | None = None

    def is_waited_for(self, now: float) -> bool:
        """Return whether a request is open, or one that was sent ended without a response not long ago."""
        return bool(self.open) or (self.unanswered_at is not None and now - self.unanswered_at <= _SHOWN_S)


class UpstreamWaits:
    """Requests of this process by host."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}

    def begin(self, attempt: UpstreamAttempt) -> None:
        """Record that a request is sent now."""
        host = self._hosts.setdefault(attempt.host, _Host())
        if not host.is_waited_for(attempt.began):
            host.silent_since = attempt.began
            host.unanswered_at = None
        host.open[id(attempt)] = attempt.began

    def end(self, attempt: UpstreamAttempt) -> None:
        """Record the end of a request."""
        host = self._hosts[attempt.host]
        del host.open[id(attempt)]
        was_answered = attempt.http_status is not None
        was_cancelled = attempt.seconds is None  # which says nothing about the host
        if was_answered:
            host.silent_since = time.monotonic()
            host.unanswered_at = None
        elif attempt.is_sent and not was_cancelled:  # without a connection, nobody was to answer
            host.unanswered_at = time.monotonic()

    def snapshot(self) -> list[dict[str, Any]]:
        """Return each host that is waited for: its open requests, the age of the oldest, and how long it is silent."""
        now = time.monotonic()
        shown = []
        for name, host in self._hosts.items():
            if host.is_waited_for(now):
                oldest_began = next(iter(host.open.values()), now)
                oldest_s, silent_s = round(now - oldest_began, 1), round(now - host.silent_since, 1)
                shown.append({"host": name, "open": len(host.open), "oldest_s": oldest_s, "silent_s": silent_s})
        return shown


UPSTREAM_WAITS = UpstreamWaits()
