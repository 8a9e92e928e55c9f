"""A limit of requests that 429s have taught: lowered after each further one, and probed upwards from time to time."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from openapi_tool.quotas.amounts import Number, Time

LEARNED_S = 3600.0  # for which a learned limit applies after the last 429
PROBE_S = 180.0  # until a learned limit is probed; each failure doubles it, up to MAX_FAILURES times
MAX_FAILURES = 3
MIN_LEARNED, MAX_LEARNED = 10, 1_000_000
"""Bounds of a learned limit. Without the lower one, 429s that other users of the key cause would stop a service that
hardly uses it."""


class LearnedLimit(BaseModel):
    """Limit of requests in 60 s that 429s have taught. It applies until `until`, and was changed at `changed`.

    From time to time it is probed: raised by `step`, to find out whether the upstream accepts more now. `probing` says
    that the last change was such a raise, which no 429 has answered so far. Each such success doubles the next step.
    `failures` is the number of probes in succession that a 429 has answered: each doubles the time until the next one.
    """

    limit: Number
    until: Time
    changed: Time
    step: Annotated[int, Field(ge=1, le=MAX_LEARNED)] = 1
    probing: bool = False
    failures: Annotated[int, Field(ge=0, le=MAX_FAILURES)] = 0

    @classmethod
    def of(cls, accepted: int, now: float) -> LearnedLimit:
        """Return the limit that a 429 teaches, before which the upstream had accepted that many requests in 60 s."""
        return cls(limit=max(MIN_LEARNED, accepted), until=now + LEARNED_S, changed=now)

    def lower(self, accepted: int, now: float) -> None:
        """Lower the limit after a 429, before which the upstream had accepted that many requests in 60 s.

        This undoes a probe. Without one, the limit becomes what was accepted, or one request less than before.
        """
        if self.probing:
            limit = self.limit - self.step
            self.failures = min(MAX_FAILURES, self.failures + 1)
        else:
            limit = min(self.limit - 1, accepted)
            self.failures = 0
        self.limit = max(MIN_LEARNED, limit)
        self.step = 1
        self.probing = False
        self.changed = now
        self.until = now + LEARNED_S

    def probe(self, now: float) -> bool:
        """Raise the limit by a step if that is due; return whether it was raised."""
        if now - self.changed < PROBE_S * 2**self.failures:
            return False
        if self.probing:  # the last probe has succeeded
            self.step = min(MAX_LEARNED, 2 * self.step)
            self.failures = 0
        self.limit = min(MAX_LEARNED, self.limit + self.step)
        self.probing = True
        self.changed = now
        return True

    def correct(self, now: float) -> None:
        """Correct what no replica can have written: a limit or a time that is too large."""
        self.limit = min(self.limit, MAX_LEARNED)
        self.changed = min(self.changed, now)
        self.until = min(self.until, now + LEARNED_S)
