"""Clock of the NATS server, by which deadlines and leases are computed.

The publish times of commands are server time, and all processes see the same one. The local clock may be wrong.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

log = logging.getLogger(__name__)

_WINDOW_S = 30.0  # in which a sample counts
_WARN_ABOVE_S = 2.0  # offset of the local clock
_TOLERANCE_S = 0.05  # in addition to the error bounds of two samples


@dataclass(frozen=True, slots=True)
class _Sample:
    """Offset of the server's clock from our monotonic clock, measured `at` a monotonic time."""

    at: float
    offset_s: float
    error_s: float


class ServerClock:
    """Server time, estimated from its replies: as in NTP, the one with the shortest round trip of the last 30 s counts.

    A worker waits for 30 s from the publish time of a command, and the commit needs 3 s of them. By a local clock that
    is 27 s ahead, no time would be left for the call.
    """

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._offset_s: float | None = None
        self._warned_of_unknown_time = False
        self._warned_of_offset = False

    def time(self) -> float:
        """Return the server's time in seconds since the epoch; before the first reply that of the local clock."""
        if self._offset_s is not None:
            return time.monotonic() + self._offset_s
        if not self._warned_of_unknown_time:
            self._warned_of_unknown_time = True
            log.warning("the time of NATS is not known yet; using the local clock", extra={"action": "clock.local"})
        return time.time()

    @property
    def local_offset_s(self) -> float | None:
        """Seconds by which the local wall clock is ahead of the server's; None before the first reply."""
        return None if self._offset_s is None else time.time() - time.monotonic() - self._offset_s

    def observe(self, server_time: float, requested_at: float, replied_at: float) -> None:
        """Add a reply: its `server_time` in seconds since the epoch, both other times on the monotonic clock."""
        newest = _Sample(
            at=replied_at,
            offset_s=server_time - (requested_at + replied_at) / 2,
            error_s=(replied_at - requested_at) / 2,
        )
        oldest_at = replied_at - _WINDOW_S
        self._samples = [each for each in self._samples if each.at >= oldest_at and _agree(each, newest)]
        self._samples.append(newest)
        self._offset_s = min(self._samples, key=lambda sample: sample.error_s).offset_s
        self._warn_of_offset(self.local_offset_s or 0.0)

    def _warn_of_offset(self, off_s: float) -> None:
        """Log once that the local clock is wrong, and again if it was right in between."""
        is_too_far = abs(off_s) > _WARN_ABOVE_S
        if is_too_far and not self._warned_of_offset:
            log.warning(
                "the local clock is %.1f s %s that of NATS, which is used; synchronize the local clock",
                abs(off_s),
                "ahead of" if off_s > 0 else "behind",
                extra={"action": "clock.offset", "offset_s": round(off_s, 3)},
            )
        self._warned_of_offset = is_too_far


def _agree(sample: _Sample, newest: _Sample) -> bool:
    """Return whether both can be right. If not, the machine was suspended: that stops the monotonic clock."""
    return abs(sample.offset_s - newest.offset_s) <= sample.error_s + newest.error_s + _TOLERANCE_S
