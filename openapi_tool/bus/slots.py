"""Slots and upstream requests of running calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from openapi_tool.options import ExecutorOptions

_RESERVED_SHARE = 1 / 8
"""Fraction of the slots that one project cannot take, so that others need not wait: running calls are not preempted."""


class Slots:
    """Slots of running calls, and the number of their upstream requests, by the command's sequence in the stream.

    Once calls of two projects have run, no project may begin a call in the last eighth of the `limit` slots. A call may
    give up its slot in two ways: released for good while its result is delayed (ADR 8), at most `limit` calls at once;
    or parked while it waits for a permit or a retry, at most `max_parked` calls at once. Further calls keep theirs.
    """

    def __init__(self, limit: int, max_parked: int = 0) -> None:
        self._limit = limit
        self._max_parked = max_parked
        self._max_of_project = limit - int(limit * _RESERVED_SHARE)
        self._projects: dict[int, str] = {}
        self._first_project: str | None = None
        self._several_projects = False  # True once calls of a second project have run
        self._in_use: Counter[str] = Counter()  # slots of each project
        self._released: set[int] = set()
        self._parked: set[int] = set()
        self._waiting: set[int] = set()  # for a permit; with a slot if too many are parked
        self._sent: set[int] = set()
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
        return self._in_use[project] < (self._max_of_project if self._several_projects else self._limit)

    @property
    def excess(self) -> int:
        """Number of slots that projects hold beyond 7/8 of all; others may begin as many calls besides (ADR 6)."""
        return sum(max(0, held - self._max_of_project) for held in self._in_use.values())

    def begin(self, sequence: int, project: str) -> None:
        """Count a call that begins to run in a slot."""
        self._projects[sequence] = project
        self._in_use[project] += 1
        self._first_project = self._first_project or project
        self._several_projects = self._several_projects or project != self._first_project

    def release(self, sequence: int) -> None:
        """Take the slot from a running call for good: the next command gets it."""
        if len(self._released) < self._limit:
            self._give_up_slot(sequence, self._released)

    def charge(self, sequence: int, requests: int) -> None:
        """Record the number of upstream requests of a running call; one is assumed."""
        if requests != 1:
            self._requests[sequence] = requests

    def of(self, sequence: int) -> CallSlot:
        """Return the slot of a running call."""
        return CallSlot(self, sequence)

    def unsent(self) -> set[int]:
        """Return the calls that wait for a permit and have sent no request yet."""
        return self._waiting - self._sent

    def sending(self, sequence: int) -> None:
        """Note that a call sends a request; one that has ended is left out, as in `park`."""
        if sequence in self._projects:
            self._sent.add(sequence)

    def park(self, sequence: int) -> None:
        """Take the slot from a running call until it resumes.

        A shared request may outlive the call that started it: a call that has ended has no slot to give up.
        """
        if sequence not in self._projects:
            return
        self._waiting.add(sequence)
        if len(self._parked) < self._max_parked:
            self._give_up_slot(sequence, self._parked)
        else:
            self.wake()  # `wake` of the consumer hands it back in a drain

    def resume(self, sequence: int) -> None:
        """Give a parked call its slot back at once, even if none is free; then no command begins until one is."""
        self._waiting.discard(sequence)
        if sequence in self._parked:
            self._parked.discard(sequence)
            self._in_use[self._projects[sequence]] += 1

    def ended(self, sequence: int) -> int:
        """Remove a call; return its number of upstream requests."""
        self.resume(sequence)
        self._sent.discard(sequence)
        project = self._projects.pop(sequence)
        if sequence in self._released:
            self._released.discard(sequence)
        else:
            self._in_use[project] -= 1
        if not self._in_use[project]:
            del self._in_use[project]
        return self._requests.pop(sequence, 1) if self._requests else 1

    def _give_up_slot(self, sequence: int, calls: set[int]) -> None:
        if sequence not in calls:
            calls.add(sequence)
            self._in_use[self._projects[sequence]] -= 1
            self.wake()


def slots_of(options: ExecutorOptions) -> Slots:
    """Return the slots for these settings."""
    return Slots(options.concurrency, options.max_parked)


class CallSlot:
    """Slot of one running call; parked while at least one of the call's requests waits for a permit."""

    __slots__ = ("_sequence", "_slots", "_waiting")

    def __init__(self, slots: Slots, sequence: int) -> None:
        self._slots, self._sequence, self._waiting = slots, sequence, 0

    def park(self) -> None:
        """Give up the slot while a request waits, unless too many calls are parked."""
        self._waiting += 1
        if self._waiting == 1:
            self._slots.park(self._sequence)

    def resume(self) -> None:
        """Take a slot again once no request waits."""
        self._waiting -= 1
        if not self._waiting:
            self._slots.resume(self._sequence)

    def sending(self) -> None:
        """Note that the call sends a request."""
        self._slots.sending(self._sequence)
