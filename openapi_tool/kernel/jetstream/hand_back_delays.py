"""After which delay a surplus command that was handed back is delivered again."""

from __future__ import annotations

import time
from collections.abc import Callable

from cachetools import LRUCache

_MIN_DELAY_S = 0.1
_MAX_DELAY_S = 10.0  # well below the time for which a worker waits, as the project's calls may become faster
_ASSUMED_CALL_S = 0.1  # duration of a call, until one of the project has ended
_MEAN_OF_CALLS = 64  # the moving average of call durations is over about as many calls
_MAX_MEANS = 4_096  # projects whose average is remembered
_MAX_RETURNS = 20_000  # projects in `_last_return_at`; beyond, those whose last command has returned are forgotten


class HandBackDelays:
    """Computes redelivery delays, so that a command returns when a slot should be free for it.

    Other commands run before it: those that wait here ahead of it, and those that its project had handed back earlier.
    With 8 slots and calls of 2 s on average, one call begins every 0.25 s. So with 19 commands before it, it returns in
    5 s.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._mean_s: LRUCache[str, float] = LRUCache(_MAX_MEANS)  # duration of a call by project
        self._last_return_at: dict[str, float] = {}  # when the last command that was handed back returns, by project

    def finished(self, project: str, duration_s: float) -> None:
        """Add the duration of a call to the moving average of its project."""
        mean_s = self._mean_s.get(project, duration_s)
        self._mean_s[project] = mean_s + (duration_s - mean_s) / _MEAN_OF_CALLS

    def next(self, project: str, ahead: int) -> float:
        """Return the redelivery delay in seconds of the next command of a project; `ahead` commands wait before it."""
        now = self._clock()
        each_s = self._mean_s.get(project, _ASSUMED_CALL_S) / self._slots  # between the beginnings of two calls
        after_waiting = now + ahead * each_s
        after_handed_back = self._last_return_at.get(project, 0.0)
        return_at = max(after_waiting, after_handed_back) + each_s
        self._last_return_at[project] = min(return_at, now + _MAX_DELAY_S)
        if len(self._last_return_at) > _MAX_RETURNS:
            self._last_return_at = {name: at for name, at in self._last_return_at.items() if at > now}
        return min(max(return_at - now, _MIN_DELAY_S), _MAX_DELAY_S)
