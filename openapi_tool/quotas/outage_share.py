"""The part of a limit that this replica uses while it cannot reach the others, as the store is unavailable. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from openapi_tool.quotas.rates import Rates
from openapi_tool.quotas.window import Window


@dataclass(slots=True)
class OutageShare:
    """One of `parts` equal parts of what was left of a limit when an outage began, at the server time `began`.

    `requests` and `tokens` are the last known uses of all replicas. `sent` are the requests that this replica has sent
    since then. So all replicas together stay below the limit, without knowing of each other.
    """

    began: float
    parts: int
    requests: Window
    tokens: Window
    sent: Window = field(default_factory=Window)

    def has_room(self, rates: Rates, *, next_tokens: int, own_tokens: int, running: int, now: float) -> bool:
        """Return whether this replica may send a request of `next_tokens` tokens now.

        `own_tokens` are those of its requests of the last 60 s that no record contains; `running` are its requests that
        have not ended.
        """
        self.sent.drop_expired(now)
        if rates.requests is not None and not self._has_room_of_requests(rates.requests, now):
            return False
        if rates.tokens is not None:
            tokens = own_tokens + next_tokens
            if tokens > self._part_of_rest(rates.tokens, self.tokens, now):
                return False
        return rates.concurrent is None or running < rates.concurrent // self.parts

    def _has_room_of_requests(self, limit: int, now: float) -> bool:
        """Return whether one more request is in this replica's part of the rest, and of the pace of the limit."""
        part_of_limit = max(1, limit // self.parts)
        self.sent.pace(part_of_limit, 1, now)
        is_left = self.sent.total(now) < self._part_of_rest(limit, self.requests, now)
        return is_left and self.sent.has_room(part_of_limit, 1, 0, now)

    def _part_of_rest(self, limit: int, known: Window, now: float) -> int:
        """Return this replica's part of what the known uses have left of a limit."""
        return max(0, limit - known.total(now)) // self.parts
