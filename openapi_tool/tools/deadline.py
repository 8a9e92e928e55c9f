"""How long a call may take (protocol section 7)."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this machine's monotonic clock, in seconds."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline that is `seconds` away from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - time.monotonic())

    def shortened(self, seconds: float | None) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return self if seconds is None else Deadline(min(self.at, time.monotonic() + seconds))
