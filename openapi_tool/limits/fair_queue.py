"""Queue of calls that wait for a permit: by project and its weight, within a project by agent in turn, else FIFO.

Pure like `ledger`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})
_MAX_TAGS = 1_000
_BACKLOG_S = 2.0
"""Seconds after which a project that waits is expected to send more calls."""


@dataclass(slots=True, eq=False)
class Waiter(Generic[T]):
    """Waiting call of `flow` (project, agent) that needs a permit before `latest`. `item` belongs to the caller."""

    flow: tuple[str, str]
    latest: float
    item: T


@dataclass(slots=True)
class _Project(Generic[T]):
    """Waiting calls of a project; the one with the lowest `tag` is served next, which raises it by 1/`weight`."""

    waiting_since: float
    weight: float
    tag: float
    agents: OrderedDict[str, deque[Waiter[T]]] = field(default_factory=OrderedDict)
    length: int = 0


def _expected_calls(project: _Project[Any], now: float) -> float:
    """Return how many calls a forecast counts for a project: those that wait, infinite if it has a lasting backlog."""
    return math.inf if now - project.waiting_since >= _BACKLOG_S else project.length


class _ServedCalls:
    """Forecast of the calls that are served for all projects together, by the progress of weighted fair queueing.

    For a project these are its weight times `progress`, at most its expected calls. The sum is piecewise linear, so
    each value takes a binary search, not a loop over the projects.
    """

    def __init__(self, projects: Iterable[_Project[Any]], now: float) -> None:
        pairs = [(_expected_calls(project, now), project.weight) for project in projects]
        ends = sorted((calls / weight, calls, weight) for calls, weight in pairs if calls < math.inf)
        self._ends = [end for end, _, _ in ends]
        self._ended_calls = [0.0, *accumulate(calls for _, calls, _ in ends)]
        self._ended_weights = [0.0, *accumulate(weight for _, _, weight in ends)]
        self._total_weight = sum(weight for _, weight in pairs)

    def calls(self, progress: float) -> float:
        """Return the calls of all projects at this progress."""
        ended = bisect_right(self._ends, progress)
        return self._ended_calls[ended] + progress * (self._total_weight - self._ended_weights[ended])


class FairQueue(Generic[T]):
    """Waiting calls, in the order of weighted fair queueing; `weights` of projects are 1 by default."""

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        self._weights = weights
        self._projects: dict[str, _Project[T]] = {}
        self._length = 0
        self._virtual_time = 0.0  # tag of the project that was served last
        self._tags: dict[str, float] = {}  # of projects that were served and left, while ahead of the virtual time

    def __len__(self) -> int:
        return self._length

    def by_project(self) -> dict[str, int]:
        """Return the number of waiting calls by project."""
        return {name: project.length for name, project in self._projects.items()}

    def add(self, waiter: Waiter[T], now: float) -> None:
        """Enqueue a call."""
        name, agent = waiter.flow
        project = self._projects.get(name)
        if project is None:
            tag = max(self._tags.pop(name, 0.0), self._virtual_time)
            project = self._projects[name] = _Project(now, self._weights.get(name, 1.0), tag)
        project.agents.setdefault(agent, deque()).append(waiter)
        project.length += 1
        self._length += 1

    def pop(self) -> Waiter[T]:
        """Remove and return the next call. Raises ValueError if none waits."""
        project = min(self._projects.values(), key=attrgetter("tag"))
        self._virtual_time = project.tag
        project.tag += 1 / project.weight
        agent, waiting = next(iter(project.agents.items()))
        waiter = waiting.popleft()
        project.agents.move_to_end(agent)
        self._deduct(waiter)
        return waiter

    def discard(self, waiter: Waiter[T]) -> None:
        """Remove a call if it waits."""
        project = self._projects.get(waiter.flow[0])
        waiting = project.agents.get(waiter.flow[1]) if project else None
        if waiting and waiter in waiting:
            waiting.remove(waiter)
            self._deduct(waiter)

    def waiters(self) -> list[Waiter[T]]:
        """Return all calls by project."""
        return [waiter for project in self._projects.values() for waiter in _in_order(project)]

    def certain_timeouts(self, wait_s: Callable[[float], float], now: float) -> list[tuple[Waiter[T], float]]:
        """Return the calls that certainly get no permit in time, each with the seconds until it would get one.

        `wait_s` returns the seconds until a number of permits is free. A call gets a permit after the earlier calls of
        its project and as many calls of every other project, by their weights. A project that began to wait less than
        `_BACKLOG_S` ago counts only with the calls that wait now: it may send no more.
        """
        served, found = _ServedCalls(self._projects.values(), now), []
        for project in self._projects.values():
            maximum, position = _expected_calls(project, now), 1
            for waiter in _in_order(project):
                # `served` includes `position` calls of this project itself, at most its `maximum`.
                needed_s = wait_s(position + served.calls(position / project.weight) - min(position, maximum))
                if now + needed_s > waiter.latest:
                    found.append((waiter, max(1.0, needed_s)))
                else:
                    position += 1
        return found

    def _deduct(self, waiter: Waiter[T]) -> None:
        name, agent = waiter.flow
        project = self._projects[name]
        project.length -= 1
        self._length -= 1
        if not project.agents[agent]:
            del project.agents[agent]
        if not project.length:
            del self._projects[name]
            self._tags[name] = project.tag
        if not self._projects:
            self._tags.clear()  # without waiting calls there is nothing to be fair to
        elif len(self._tags) > _MAX_TAGS:
            self._tags = {key: tag for key, tag in self._tags.items() if tag > self._virtual_time}


def _in_order(project: _Project[T]) -> Iterator[Waiter[T]]:
    queues = [iter(waiting) for waiting in project.agents.values()]
    while queues:
        remaining = []
        for queue in queues:
            waiter = next(queue, None)
            if waiter is not None:
                yield waiter
                remaining.append(queue)
        queues = remaining
