"""How often the same error of a connection is logged, while the client tries to reconnect."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache

_FIRST_REPEAT_S = 5.0  # after the first line with a text
_MAX_REPEAT_S = 300.0
_MAX_TEXTS = 64  # remembered


@dataclass(slots=True)
class _Repeat:
    """When a text may be logged again: at `next_at`, which is `wait_s` seconds after the last time."""

    wait_s: float
    next_at: float


class LogBackoff:
    """Back-off for repeated log lines: each text again after 5 s, then after 10 s, … up to 5 minutes.

    The client reconnects twice a second, so an outage of an hour would log 7,000 lines. Several servers may fail for
    different reasons in turn, so each text has its own back-off.
    """

    def __init__(self) -> None:
        self._repeats: LRUCache[str, _Repeat] = LRUCache(_MAX_TEXTS)

    def should_log(self, text: str, now: float) -> bool:
        """Return whether to log `text` at `now`, in seconds on the monotonic clock."""
        wait_s = _FIRST_REPEAT_S
        last = self._repeats.get(text)
        if last is not None:
            if now < last.next_at:
                return False
            is_same_outage = now - last.next_at < _MAX_REPEAT_S
            if is_same_outage:
                wait_s = min(2 * last.wait_s, _MAX_REPEAT_S)
        self._repeats[text] = _Repeat(wait_s, now + wait_s)
        return True
