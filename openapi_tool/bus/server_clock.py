"""Clock of the NATS server, used for all deadlines and leases instead of the local wall clock."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

log = logging.getLogger(__name__)

_WINDOW_S = 30.0
"""Seconds for which a sample is used."""

_WARN_ABOVE_S = 2.0
_TOLERANCE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Sample:
    """Offset from our monotonic clock to the server's in seconds, with an error of at most `error_s`."""

    at: float
    offset_s: float
    error_s: float


class ServerClock:
    """Server time, estimated from `ts` in its replies and the local monotonic clock.

    Publish times of commands are server time: on a machine whose wall clock is 28 s ahead, every call would look
    expired. As in NTP, the reply with the shortest round trip of the last 30 s counts. Before the first reply the
    local wall clock is used.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._offset_s: float | None = None
        self._warned_unknown = False
        self._warned = False

    def time(self) -> float:
        """Return the server's time in seconds since the epoch."""
        if self._offset_s is not None:
            return time.monotonic() + self._offset_s
        if not self._warned_unknown:
            self._warned_unknown = True
            log.warning("the time of NATS is not known yet; using the local clock", extra={"action": "clock.local"})
        return time.time()

    @property
    def local_offset_s(self) -> float | None:
        """Seconds by which the local wall clock is ahead of the server's; None before the first reply."""
        return None if self._offset_s is None else time.time() - time.monotonic() - self._offset_s

    def observe(self, server_time: float, requested_at: float, replied_at: float) -> None:
        """Add a reply with `server_time` (seconds since the epoch).

        The times of request and reply are in seconds on the monotonic clock.
        """
        newest = _Sample(replied_at, server_time - (requested_at + replied_at) / 2, (replied_at - requested_at) / 2)
        recent = [sample for sample in self._samples if sample.at >= replied_at - _WINDOW_S and _agree(sample, newest)]
        self._samples = deque([*recent, newest])
        self._offset_s = min(self._samples, key=lambda sample: sample.error_s).offset_s
        self._warn_of_offset()

    def _warn_of_offset(self) -> None:
        off_s = self.local_offset_s or 0.0
        too_far = abs(off_s) > _WARN_ABOVE_S
        if too_far and not self._warned:
            log.warning(
                "the local clock is %.1f s %s that of NATS, which is used; synchronize the local clock",
                abs(off_s),
                "ahead of" if off_s > 0 else "behind",
                extra={"action": "clock.offset", "offset_s": round(off_s, 3)},
            )
        self._warned = too_far


def _agree(sample: _Sample, newest: _Sample) -> bool:
    """Return whether both samples can be right; not after the machine was suspended, as monotonic time stopped."""
    return abs(sample.offset_s - newest.offset_s) <= sample.error_s + newest.error_s + _TOLERANCE_S
