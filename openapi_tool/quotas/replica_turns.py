"""Whose turn it is among the calls that wait for one key at all replicas. No I/O.

Each replica decides by the shared record alone: the reports of the others say which projects wait there, and the turns
of the projects are in the record. It grants permits to its own calls, and leaves free those that others come before.
All replicas order the calls in the same way. So they need no message to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from openapi_tool.fair_queue import FairQueue, Turns, project_key
from openapi_tool.quotas.key_group import KeyGroup, WaitingCall
from openapi_tool.quotas.limit_record import LimitRecord, ReportedCalls

_MORE_EXPECTED_S = 2.0  # a project that waits as long as this is expected to send more calls all the time


class CallsElsewhere:
    """Calls that wait at other replicas, by the short name of their project; each list has the oldest calls last.

    A call elsewhere comes before the calls here if it is the turn of its project, and if the call has waited longer
    than the next call of that project here.
    """

    def __init__(self, waiting: dict[str, list[ReportedCalls]], turns: Turns) -> None:
        self._waiting = waiting
        # A copy: the turns as they will be once the calls elsewhere have got their permits.
        self._turns = turns.model_copy(update={"ends": dict(turns.ends)})
        self._left_to_others = 0  # permits that the calls elsewhere get before the next one here

    def next_here(self, here: Mapping[str, float], has_room: Callable[[int], bool]) -> str | None:
        """Return the project whose next call gets a permit here; None if no call here gets one now.

        `here` is since when the next call of each project has waited here. `has_room` says whether the key may send one
        more request after the given number of others.
        """
        while has_room(self._left_to_others):
            project = min([*here, *self._waiting], key=lambda name: self._precedence(name, here), default=None)
            if project is None:
                return None
            if project in here and not self._has_waited_longer(project, here[project]):
                return project
            self._leave_permit(project)
        return None

    def serve_here(self, project: str, cost: float) -> None:
        """Record that a call of a project gets a permit here; `cost` is divided by the project's weight."""
        self._turns.serve(project, cost)

    def _precedence(self, project: str, here: Mapping[str, float]) -> tuple[float, float, str]:
        """Return the sort key of a project: its turn, then its oldest call, then its name.

        It is the same at all replicas. If two of them ordered equal turns differently, each could wait for the other.
        """
        oldest = min((calls.since for calls in self._waiting.get(project, ())), default=math.inf)
        return self._turns.start(project), min(oldest, here.get(project, math.inf)), project

    def _has_waited_longer(self, project: str, since: float) -> bool:
        return project in self._waiting and self._waiting[project][-1].since < since

    def _leave_permit(self, project: str) -> None:
        """Leave a permit to the oldest call of a project elsewhere."""
        calls = self._waiting[project].pop()
        if calls.number > 1:
            self._waiting[project].append(calls._replace(number=calls.number - 1))
        if not self._waiting[project]:
            del self._waiting[project]
        self._left_to_others += 1
        self._turns.serve(project, 1.0)  # a weight of 1 is assumed: reports have short names, which tell no weight


def place_among_all(
    record: LimitRecord,
    replica: str,
    queue: FairQueue[WaitingCall],
    project: str,
    number: int,
    *,
    newest: bool,
    now: float,
) -> int:
    """Return the place of a call among those that wait at all replicas, 1 for the next one.

    The call is number `number` of its `project` in the `queue` of this `replica`. Before it are earlier calls of its
    own project, and those calls of the other projects that come before the end of its own turn.

    Of the calls of its own project that wait elsewhere, all are before the `newest` call of all replicas. Before
    another call, as many of them are expected as calls of the project are before it here.
    """
    own = project_key(project)
    elsewhere = record.waiting_elsewhere(replica, now)
    own_elsewhere = sum(calls.number for calls in elsewhere.pop(own, ()))
    place_in_project = number + (own_elsewhere if newest else min(own_elsewhere, number - 1))
    turn_ends = record.turns.start(own) + place_in_project / queue.weight(project)

    reports = list(_reports_of(queue))
    for other, found in elsewhere.items():
        reports += [(other, calls) for calls in found]
    weights = {project_key(name): queue.weight(name) for name in queue.projects()}  # of the others: 1 is assumed
    place = place_in_project
    for other, expected in _expected_calls(reports, now).items():
        if other != own:
            # A project of weight 3 has three turns in each unit of virtual time.
            turns_before = math.floor((turn_ends - record.turns.start(other)) * weights.get(other, 1.0))
            place += int(min(expected, max(0, turns_before)))
    return place


def _reports_of(queue: FairQueue[WaitingCall]) -> Iterator[tuple[str, ReportedCalls]]:
    """Yield what waits here by project, as replicas report it."""
    for name, number in queue.counts().items():
        yield project_key(name), ReportedCalls(number, queue.first(name).since)


def _expected_calls(reports: Iterable[tuple[str, ReportedCalls]], now: float) -> dict[str, float]:
    """Return how many calls each project is expected to send before the present ones are served."""
    expected: dict[str, float] = {}
    for project, calls in reports:
        sends_more = now - calls.since >= _MORE_EXPECTED_S
        expected[project] = expected.get(project, 0) + (math.inf if sends_more else calls.number)
    return expected


def may_hold_one_more(
    project: str, limit: int | None, record: LimitRecord, replica: str, group: KeyGroup, now: float
) -> bool:
    """Return whether a project may have one more concurrent request; all together may have `limit`, None is unlimited.

    If there are other projects, each project leaves an eighth of the limit, at least one request, to them. Otherwise
    slow requests of one project could hold all of it. There are others if they have asked the `group` of this replica,
    or if they run or wait at any replica. `project` is a short name.
    """
    if limit is None or limit <= 1:
        return True
    held = sum(attempt.project == project for attempt in record.open.values())
    left_to_others = max(1, limit // 8)
    if held < limit - left_to_others:
        return True
    running = {attempt.project for attempt in record.open.values()}  # "": sent while no such limit was set
    known = group.projects_asking(now) | running | record.waiting_elsewhere(replica, now).keys()
    return known <= {project, ""}
