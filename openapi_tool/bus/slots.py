"""Slots and upstream requests of running calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from openapi_tool.options import ExecutorOptions

_RESERVED_SHARE = 1 / 8
"""Fraction of the slots that one of several projects cannot take: a running call is never interrupted for another."""


class Slots:
    """Slots of running calls, and their upstream requests, by the command's sequence in the stream.

    Of `limit` slots one project cannot take all, once calls of another one have run. At most `limit` at once are
    released for good, because their answer is held, and at most `most_parked` parked while they wait for a permit;
    further ones keep their slots.
    """

    def __init__(self, limit: int, most_parked: int = 0) -> None:
        self._limit = limit
        self._most_parked = most_parked
        self._most_of_project = limit - int(limit * _RESERVED_SHARE)
        self._projects: dict[int, str] = {}
        self._only: str | None = None  # project of all calls so far
        self._shared = False
        self._held: Counter[str] = Counter()  # slots of each project
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

    def may_begin(self, project: str) -> bool:
        """Return whether a project may have one more slot, if one is free."""
        return not self._shared or self._held[project] < self._most_of_project

    def begin(self, sequence: int, project: str) -> None:
        """Count a call that begins to run in a slot."""
        self._projects[sequence] = project
        self._held[project] += 1
        self._only = self._only or project
        self._shared = self._shared or project != self._only

    def release(self, sequence: int) -> None:
        """Give the slot of a running call to the next command."""
        if len(self._released) < self._limit:
            self._leave(sequence, self._released)

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
            self._leave(sequence, self._parked)

    def resume(self, sequence: int) -> None:
        """Count a call as running again at once; no command begins until a slot is free."""
        if sequence in self._parked:
            self._parked.discard(sequence)
            self._held[self._projects[sequence]] += 1

    def ended(self, sequence: int) -> int:
        """Forget a call; return its number of upstream requests."""
        self.resume(sequence)
        project = self._projects.pop(sequence)
        if sequence in self._released:
            self._released.discard(sequence)
        else:
            self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        return self._requests.pop(sequence, 1) if self._requests else 1

    def _leave(self, sequence: int, without: set[int]) -> None:
        if sequence not in without:
            without.add(sequence)
            self._held[self._projects[sequence]] -= 1
            self.wake()


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
