"""Slots, the places for running calls: how many may run, of which project, and which calls run without a slot.

A call that only waits gives up its slot to another one:

- The slot is *paused* while the requests of the call wait for a retry, or for a permit, which the rate limit gives. The
  call takes a slot again when it goes on, free or not.
- It is *released* for good while the finished result waits for its commit (ADR 8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_RESERVED_SHARE = 1 / 8
"""Fraction of the slots that one project cannot take, once there are others. Running calls are not interrupted, so
without it a project with long calls could block all others."""


class Slots:
    """Slots of running calls, by the command's sequence in the stream.

    Once calls of two projects have run, no project may begin a call while it holds 7/8 of the `limit` slots. At most
    `max_paused` calls are paused at once, and at most `limit` calls released; further ones keep their slots. `wake` is
    called when a slot becomes free before a call has ended, and when a call begins to wait for a permit.
    """

    def __init__(self, limit: int, max_paused: int = 0) -> None:
        self._limit = limit
        self._max_paused = max_paused
        self._max_of_project = limit - int(limit * _RESERVED_SHARE)
        self._slots: dict[int, PausableSlot] = {}
        self._first_project: str | None = None
        self._several_projects = False  # whether calls of two projects have run
        self._in_use: Counter[str] = Counter()  # slots that the calls of each project hold
        self._released = 0  # running calls that have released their slot
        self.paused = 0  # running calls that are paused
        self.wake: Callable[[], None] = lambda: None

    @property
    def without_slot(self) -> int:
        """Number of running calls without a slot."""
        return self._released + self.paused

    def may_begin(self, project: str) -> bool:
        """Return whether a project may have one more slot; whether one is free is another question."""
        most = self._max_of_project if self._several_projects else self._limit
        return self._in_use[project] < most

    @property
    def excess(self) -> int:
        """Slots that projects hold beyond 7/8; other projects may begin as many calls without a slot (ADR 6)."""
        return sum(max(0, held - self._max_of_project) for held in self._in_use.values())

    def begin(self, sequence: int, project: str) -> None:
        """Count a call that begins to run in a slot."""
        self._slots[sequence] = PausableSlot(self, project)
        self._in_use[project] += 1
        self._first_project = self._first_project or project
        self._several_projects = self._several_projects or project != self._first_project

    def release(self, slot: PausableSlot) -> None:
        """Take the slot from a running call for good, unless too many have released theirs."""
        if not slot.released and self._released < self._limit:
            self.resume(slot)  # counts the slot as held, if the call was paused
            slot.released = True
            self._released += 1
            self._in_use[slot.project] -= 1
            self.wake()

    def of(self, sequence: int) -> PausableSlot:
        """Return the slot of a running call."""
        return self._slots[sequence]

    def unsent(self) -> set[int]:
        """Return the sequences of the calls that wait for a permit or a retry and have sent no request yet."""
        return {sequence for sequence, slot in self._slots.items() if slot.waiting and not slot.sent}

    def pause(self, slot: PausableSlot) -> None:
        """Take the slot from a running call until it resumes, unless too many calls are paused."""
        if self.paused < self._max_paused and not slot.released:
            slot.paused = True
            self.paused += 1
            self._in_use[slot.project] -= 1
        self.wake()  # in any case: on shutdown the consumer hands back commands that wait for a permit

    def resume(self, slot: PausableSlot) -> None:
        """Give a paused call its slot back at once, also if none is free."""
        if slot.paused:
            slot.paused = False
            self.paused -= 1
            self._in_use[slot.project] += 1

    def ended(self, sequence: int) -> int:
        """Remove a call that has ended; return its number of upstream requests."""
        slot = self._slots.pop(sequence)
        self.resume(slot)  # counts the slot as held, if the call was paused
        slot.ended = True
        if slot.released:
            self._released -= 1
        else:
            self._in_use[slot.project] -= 1
        if not self._in_use[slot.project]:
            del self._in_use[slot.project]
        return slot.requests


class PausableSlot:
    """Slot of one running call; paused while a request of the call waits for a permit or a retry.

    Identical calls share one request, which may outlive the call that started it. Such a request has no slot to give up
    (`ended`).
    """

    __slots__ = ("_slots", "ended", "paused", "project", "released", "requests", "sent", "waiting")

    def __init__(self, slots: Slots, project: str) -> None:
        self._slots = slots
        self.project = project
        self.requests = 1  # to the upstream; assumed until the call has run, when the pipeline sets the number
        self.waiting = 0  # requests of the call that wait for a permit or a retry
        self.sent = False  # whether the call has sent a request
        # Set by `Slots`:
        self.paused = False
        self.released = False
        self.ended = False  # the call has ended

    def pause(self) -> None:
        """Give up the slot because a request begins to wait."""
        self.waiting += 1
        if self.waiting == 1 and not self.ended:
            self._slots.pause(self)

    def resume(self) -> None:
        """Note that a request waits no longer; take a slot again once none waits."""
        self.waiting -= 1
        if not self.waiting:
            self._slots.resume(self)

    def release(self) -> None:
        """Give up the slot for good."""
        self._slots.release(self)

    def sending(self) -> None:
        """Record that the call sends a request."""
        self.sent = True
