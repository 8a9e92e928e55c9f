"""Deadlines of calls: until when a call may run."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline of a call on the monotonic clock; `turn` may bring it forward while the call runs."""

    at: float
    turn: TurnLimit | None = None

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        at = self.at if self.turn is None else min(self.at, self.turn.at)
        return max(0.0, at - time.monotonic())

    def limit(self) -> asyncio.Timeout:
        """Return a context that raises TimeoutError at the deadline."""
        timeout = asyncio.timeout(self.remaining())
        if self.turn is not None:
            self.turn.watch(timeout)
        return timeout

    def shortened(self, seconds: float | None) -> Deadline:
        """Return the earlier of this deadline and `seconds` from now."""
        return self if seconds is None else Deadline(min(self.at, time.monotonic() + seconds), self.turn)


class TurnLimit:
    """Second limit of a running call, which may come while the call runs: the end of its turn.

    A *turn* is one run of an agent. It may end while the call runs, if its worker waits no longer for results.
    `kernel/pipeline/turn_deadline.py` finds that out. Until then the limit is infinite.
    """

    def __init__(self) -> None:
        self.at = float("inf")  # on the monotonic clock
        self._timeouts: list[asyncio.Timeout] = []

    def shorten(self, at: float) -> None:
        """Bring the limit forward to `at`, also for waits in progress."""
        self.at = min(self.at, at)
        loop = asyncio.get_running_loop()
        at_on_loop = loop.time() + self.at - time.monotonic()
        for timeout in self._timeouts:
            before = timeout.when()
            if before is None or before > at_on_loop:
                with suppress(RuntimeError):  # the timeout has ended
                    timeout.reschedule(at_on_loop)

    def watch(self, timeout: asyncio.Timeout) -> None:
        """Register a timeout for `shorten` to reschedule. It stays registered after its end; a call has few."""
        self._timeouts.append(timeout)
