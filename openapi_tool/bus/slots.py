"""Slots and upstream requests of running calls."""

from __future__ import annotations

from collections.abc import Callable

from openapi_tool.options import ExecutorOptions


class Slots:
    """Running calls without a slot, and upstream requests of calls, by the command's sequence in the stream.

    At most `limit` at once are released for good, because their answer is held, and at most `most_parked` parked while
    they wait for a permit; further ones keep their slots.
    """

    def __init__(self, limit: int, most_parked: int = 0) -> None:
        self._limit = limit
        self._most_parked = most_parked
        self._released: set[int] = set()
        self._parked: set[int] = set()
        self._requests: dict[int, int] = {}
        self.wake: Callable[[], None] = lambda: None

    @property
    def released(self) -> int:
        """Number of running calls without a slot."""
        return len(self._released) + len(self._parked)

    @property
    def parked(self) -> int:
        """Number of running calls that wait for a permit without a slot."""
        return len(self._parked)

    def release(self, sequence: int) -> None:
        """Give the slot of a running call to the next command."""
        if len(self._released) < self._limit:
            self._released.add(sequence)
            self.wake()

    def charge(self, sequence: int, requests: int) -> None:
        """Record the number of upstream requests of a running call; one is assumed."""
        if requests != 1:
            self._requests[sequence] = requests

    def of(self, sequence: int) -> CallSlot:
        """Return the slot of a running call."""
        return CallSlot(self, sequence)

    def park(self, sequence: int) -> None:
        """Let another command have the slot of a running call until it resumes."""
        if len(self._parked) < self._most_parked:
            self._parked.add(sequence)
            self.wake()

    def resume(self, sequence: int) -> None:
        """Count a call as running again at once; no command begins until a slot is free."""
        self._parked.discard(sequence)

    def ended(self, sequence: int) -> int:
        """Forget a call; return its number of upstream requests."""
        self._released.discard(sequence)
        self._parked.discard(sequence)
        return self._requests.pop(sequence, 1) if self._requests else 1


def slots_of(options: ExecutorOptions) -> Slots:
    """Return the slots for these settings."""
    return Slots(options.concurrency, options.max_parked)


class CallSlot:
    """Slot of one running call, whose requests wait one by one: it is parked while at least one of them waits."""

    __slots__ = ("_sequence", "_slots", "_waiting")

    def __init__(self, slots: Slots, sequence: int) -> None:
        self._slots, self._sequence, self._waiting = slots, sequence, 0

    def park(self) -> None:
        """Give up the slot while a request waits, if the number of such calls allows."""
        self._waiting += 1
        if self._waiting == 1:
            self._slots.park(self._sequence)

    def resume(self) -> None:
        """Take a slot again once no request waits."""
        self._waiting -= 1
        if not self._waiting:
            self._slots.resume(self._sequence)
