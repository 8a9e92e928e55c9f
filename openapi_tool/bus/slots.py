"""What running calls report of themselves: slots that they give up, upstream requests that they made."""

from __future__ import annotations

from collections.abc import Callable


class Slots:
    """Commands whose call keeps no slot although it runs, and the costs of calls, by their sequence in the stream.

    At most `limit` give up their slot at once, so that as many calls wait beside those that run; further ones keep it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._released: set[int] = set()
        self._requests: dict[int, int] = {}
        self.wake: Callable[[], None] = lambda: None

    @property
    def released(self) -> int:
        """How many running calls keep no slot."""
        return len(self._released)

    def release(self, sequence: int) -> None:
        """Let another command have the slot of a running call."""
        if len(self._released) < self._limit:
            self._released.add(sequence)
            self.wake()

    def charge(self, sequence: int, requests: int) -> None:
        """Record the number of upstream requests of a running call; one is assumed."""
        if requests > 1:
            self._requests[sequence] = requests

    def ended(self, sequence: int) -> int:
        """Forget a call; return its number of upstream requests, at least 1."""
        self._released.discard(sequence)
        return self._requests.pop(sequence, 1) if self._requests else 1
