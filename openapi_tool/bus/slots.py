"""Slots of calls that wait for nothing but time."""

from __future__ import annotations

from collections.abc import Callable


class Slots:
    """Commands whose call keeps no slot although it runs, by their sequence in the stream.

    At most `limit` at once, so that as many calls wait beside those that run; further ones keep their slots.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._released: set[int] = set()
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

    def ended(self, sequence: int) -> None:
        """Forget a call."""
        self._released.discard(sequence)
