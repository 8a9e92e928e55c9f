"""When this process sent requests with one key: known also while the key has no limit, and nothing is counted."""

from __future__ import annotations

from collections import deque

from openapi_tool.quotas.window import COUNTS_S

# Bounds the memory of a key without a limit to less than 1 MB. A process that sends more than 20,000 requests in 60 s
# counts too few of them if a limit is set at that moment.
_MAX_SENT = 20_000


class SentRequests:
    """Server times of the requests of the last `COUNTS_S` seconds, oldest first; `len` may still count older ones."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MAX_SENT)

    def __len__(self) -> int:
        return len(self._times)

    def add(self, at: float) -> None:
        """Record a request that is sent now, at the time `at`."""
        while self._times and self._times[0] <= at - COUNTS_S:
            self._times.popleft()
        self._times.append(at)

    def forget(self, at: float) -> None:
        """Remove a request that was sent at exactly this time, if it is known."""
        if at in self._times:
            self._times.remove(at)

    def counting(self, now: float) -> list[float]:
        """Return the times of the requests that still count in a window that ends now."""
        return [at for at in self._times if at > now - COUNTS_S]
