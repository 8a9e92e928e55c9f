"""Calls that wait for a permit: their fair queue, and the keys that may give them one. No I/O."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

from openapi_tool.limits.keys import STATES
from openapi_tool.limits.ledger import Use
from openapi_tool.limits.permits import Need, Permit
from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.projects import bare_project

if TYPE_CHECKING:
    from openapi_tool.limits.allowance import LimitAllowance
    from openapi_tool.limits.key_limiter import KeyLimiter


NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})
_MAX_TAGS = 1_000
_BACKLOG_S = 2.0  # after which a project that waits is expected to send more calls
_FORGET_S = 60.0
"""Seconds without a waiting call until tags are forgotten: under a low limit most calls are refused at once, so the
queue is often empty although projects compete."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """Waiting call that needs a permit before `latest` (server time)."""

    need: Need
    latest: float
    permit: asyncio.Future[Permit]


@dataclass(slots=True)
class _Project:
    """Waiting calls of a project. That of the lowest `tag` is served next, which raises it by 1/`weight`."""

    waiting_since: float
    weight: float
    tag: float
    agents: OrderedDict[str, deque[WaitingCall]] = field(default_factory=OrderedDict)
    length: int = 0

    def start(self, virtual_time: float) -> float:
        """Return after how much virtual time it is served again; later if its requests cost more than estimated."""
        return max(0.0, self.tag - virtual_time - 1 / self.weight)


def _expected_calls(project: _Project, now: float) -> float:
    """Return the number of calls that wait, infinite for a lasting backlog."""
    return math.inf if now - project.waiting_since >= _BACKLOG_S else project.length


class _ServedCalls:
    """Forecast of the calls that are served for all projects together, by progress: virtual time from now on.

    The calls served for one project are its weight times the progress since its start, up to its expected calls. The
    sum is piecewise linear: a value takes a binary search, not a loop over the projects.
    """

    def __init__(self, projects: Iterable[_Project], virtual_time: float, now: float) -> None:
        changes = []  # of the slope
        for project in projects:
            start = project.start(virtual_time)
            changes.append((start, project.weight))
            if (expected := _expected_calls(project, now)) < math.inf:
                changes.append((start + expected / project.weight, -project.weight))
        changes.sort()
        self._progress = [progress for progress, _ in changes]
        self._slopes = [0.0, *accumulate(slope for _, slope in changes)]
        self._offsets = [0.0, *accumulate(progress * slope for progress, slope in changes)]

    def at(self, progress: float) -> float:
        count = bisect_right(self._progress, progress)
        return progress * self._slopes[count] - self._offsets[count]


class FairQueue:
    """Waiting calls, in the order of weighted fair queueing; `weights` of projects are 1 by default."""

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        self._weights = weights
        self._projects: dict[str, _Project] = {}
        self._length = 0
        self._virtual_time = 0.0  # tag of the project that was served last
        self._tags: dict[str, float] = {}  # of projects that were served and left, while ahead of the virtual time
        self._added_at = -math.inf

    def __len__(self) -> int:
        return self._length

    def by_project(self) -> dict[str, int]:
        """Return the number of calls by project."""
        return {name: project.length for name, project in self._projects.items()}

    def add(self, waiter: WaitingCall, now: float) -> None:
        """Enqueue a call."""
        if now - self._added_at >= _FORGET_S and not self._projects:
            self._tags.clear()
        self._added_at = now
        name, agent = waiter.need.flow
        project = self._projects.get(name)
        if project is None:
            tag = max(self._tags.pop(name, 0.0), self._virtual_time)
            project = self._projects[name] = _Project(now, self._weight(name), tag)
        project.agents.setdefault(agent, deque()).append(waiter)
        project.length += 1
        self._length += 1

    def _weight(self, name: str) -> float:
        return self._weights.get(bare_project(name), 1.0)

    def next_project(self, may_send: Callable[[str], bool]) -> str | None:
        """Return the project whose call is next, of those that may send; None if there is none."""
        return min(filter(may_send, self._projects), key=lambda name: self._projects[name].tag, default=None)

    def pop(self, name: str) -> WaitingCall:
        """Remove and return the next call of a project."""
        project = self._projects[name]
        self._virtual_time = project.tag
        project.tag += 1 / project.weight
        agent, waiting = next(iter(project.agents.items()))
        waiter = waiting.popleft()
        project.agents.move_to_end(agent)
        self._deduct(waiter)
        return waiter

    def charge(self, name: str, requests: float, now: float) -> None:
        """Charge a project for a request that cost as much as this many more; a negative number is a refund.

        Only if calls have waited in the last minute: a permit that nobody else wanted delays no later call.
        """
        if now - self._added_at >= _FORGET_S:
            return
        project, weight, virtual_time = self._projects.get(name), self._weight(name), self._virtual_time
        before = project.tag if project else max(self._tags.get(name, 0.0), virtual_time)
        tag = max(min(before, virtual_time), before + requests / weight)  # no credit for cheap requests
        if project:
            project.tag = tag
        else:
            self._keep_tag(name, tag)

    def discard(self, waiter: WaitingCall) -> None:
        """Remove a call if it still waits."""
        project = self._projects.get(waiter.need.flow[0])
        waiting = project.agents.get(waiter.need.flow[1]) if project else None
        if waiting and waiter in waiting:
            waiting.remove(waiter)
            self._deduct(waiter)

    def waiters(self) -> list[WaitingCall]:
        """Return all calls, by project."""
        return [waiter for project in self._projects.values() for waiter in _in_order(project)]

    def certain_timeouts(self, wait_s: Callable[[float], float], now: float) -> list[tuple[WaitingCall, float]]:
        """Return the calls that certainly get no permit in time, each with the seconds until it would get one.

        `wait_s` returns the seconds until a number of permits is free. A call gets one after the earlier calls of its
        project and, by their weights, as many of every other one. A project that began to wait less than `_BACKLOG_S`
        ago is expected to send no more calls than those that wait now.
        """
        served, found = _ServedCalls(self._projects.values(), self._virtual_time, now), []
        for project in self._projects.values():
            maximum, position, start = _expected_calls(project, now), 1, project.start(self._virtual_time)
            for waiter in _in_order(project):
                # `served` includes `position` calls of this project itself, at most its `maximum`.
                progress = start + position / project.weight
                needed_s = wait_s(position + served.at(progress) - min(position, maximum))
                if now + needed_s > waiter.latest:
                    found.append((waiter, max(1.0, needed_s)))
                else:
                    position += 1
        return found

    def _deduct(self, waiter: WaitingCall) -> None:
        name, agent = waiter.need.flow
        project = self._projects[name]
        project.length -= 1
        self._length -= 1
        if not project.agents[agent]:
            del project.agents[agent]
        if not project.length:
            del self._projects[name]
            self._keep_tag(name, project.tag)

    def _keep_tag(self, name: str, tag: float) -> None:
        self._tags[name] = tag
        if len(self._tags) > _MAX_TAGS:
            ahead = [(tag, name) for name, tag in self._tags.items() if tag > self._virtual_time]
            self._tags = {name: tag for tag, name in nlargest(_MAX_TAGS // 2, ahead)}


def _in_order(project: _Project) -> Iterator[WaitingCall]:
    queues = deque(iter(waiting) for waiting in project.agents.values())
    while queues:
        queue = queues.popleft()
        for waiter in queue:
            yield waiter
            queues.append(queue)
            break


_ACTIVE_S = 600.0
_CHECK_INTERVALS = 19  # durations of a search for timeouts until the next one
_KEY_STATUSES = (401, 402, 429)  # of the key, not of the request only


class OpenRequests:
    """Open requests of one key and endpoint in this replica, by project.

    If several projects have asked within `_ACTIVE_S`, each leaves an eighth of the allowed requests, at least one,
    to the others: otherwise the slow requests of one project can hold all of them.
    """

    def __init__(self, allowance: LimitAllowance, now: Callable[[], float]) -> None:
        self._allowance = allowance
        self._now = now
        self._open: Counter[str] = Counter()
        self._asked: dict[str, float] = {}  # the two projects that asked last, and when

    def asked(self, project: str) -> None:
        """Record that a project has asked for a permit."""
        self._asked.pop(project, None)
        self._asked[project] = self._now()
        if len(self._asked) > 2:  # noqa: PLR2004 - enough to know whether another one asked
            del self._asked[next(iter(self._asked))]

    def may_open(self, project: str) -> bool:
        """Return whether a project may open one more."""
        limit = self._allowance.max_concurrent
        if self._allowance.rates.concurrent is None or limit <= 1:
            return True
        now = self._now()
        others = any(name != project and now - at < _ACTIVE_S for name, at in self._asked.items())
        return not others or self._open[project] < limit - max(1, limit // 8)

    def opened(self, project: str) -> None:
        """Count a request."""
        self._open[project] += 1

    def ended(self, project: str) -> None:
        """Stop counting a request."""
        self._open[project] -= 1
        if not self._open[project]:
            del self._open[project]


class KeyGroup:
    """Limiters of one key, or of a pool's keys (`pooled`), and their waiting calls."""

    def __init__(self, weights: Mapping[str, float], *, pooled: bool) -> None:
        self.waiting = FairQueue(weights)
        self.limiters: list[KeyLimiter] = []
        self.pooled = pooled
        self._virtual_time = 0.0
        self._next_check_at = 0.0  # on the monotonic clock

    def usable(self) -> list[KeyLimiter]:
        """Return the limiters of keys that are set and not blocked."""
        return [limiter for limiter in self.limiters if limiter.usable]

    def by_load(self, limiters: list[KeyLimiter]) -> list[KeyLimiter]:
        """Sort limiters by load, lowest first; a key that was unusable for a while does not catch up."""
        return sorted(limiters, key=lambda limiter: max(limiter.load, self._virtual_time))

    def share_of_waiting(self, limiter: KeyLimiter) -> int:
        """Return how many of the waiting calls a key should serve."""
        if not self.pooled:
            return len(self.waiting)
        total = sum(other.weight for other in self.usable())
        return math.ceil(len(self.waiting) * limiter.weight / total) if limiter.usable else 0

    def count_request(self, limiter: KeyLimiter) -> None:
        """Count a request towards the load of a key."""
        limiter.load = max(limiter.load, self._virtual_time) + 1 / limiter.weight
        usable = [limiter.load for limiter in self.usable() if not limiter.paused_s]
        self._virtual_time = max(self._virtual_time, min(usable, default=0.0))

    def forecast(self, now: float) -> Callable[[float], float]:
        """Return a function from a number of permits to a lower bound of the seconds until they are granted.

        A function, because `certain_timeouts` asks for many numbers. The bound is the shortest wait of a key for its
        share of them: at least one key must grant that.
        """
        limiters = self.usable()
        total = sum(limiter.weight for limiter in limiters)
        parts = [
            (limiter.allowance.forecast(now, limiter.min_request_s), limiter.weight / total) for limiter in limiters
        ]
        return lambda count: min((wait_s(count * share) for wait_s, share in parts), default=0.0)

    def certain_timeouts(self, now: float) -> list[tuple[WaitingCall, float]]:
        """Return those of FairQueue; none if the last search is recent: it may take a twentieth of the time."""
        began = time.monotonic()
        if began < self._next_check_at:
            return []
        found = self.waiting.certain_timeouts(self.forecast(now), now)
        ended = time.monotonic()
        self._next_check_at = ended + (ended - began) * _CHECK_INTERVALS
        return found

    def wake(self) -> None:
        """Wake all limiters."""
        for limiter in self.limiters:
            limiter.wake()

    def fail(self, error: ToolError) -> None:
        """End all waiting calls with an error."""
        for waiter in self.waiting.waiters():
            self.waiting.discard(waiter)
            if not waiter.permit.done():
                waiter.permit.set_exception(copy.copy(error))


class KeyPermit(Permit):
    """Permit of a limited key, or the trial of a blocked one."""

    __slots__ = ("_ended", "_limiter", "_need", "_trial", "_use")

    def __init__(self, limiter: KeyLimiter, use: Use | None, need: Need) -> None:
        super().__init__(limiter.keys.get(limiter.variable) or need.key)
        self._limiter, self._use, self._need, self._ended = limiter, use, need, False
        self._trial, limiter.trial = limiter.trial, False

    def connected(self) -> None:
        """Record that the request is sent only now, so that the window of the limit counts it from now on."""
        if self._use is not None and not self._ended:
            self._use = self._limiter.allowance.sent_late(self._use, self._limiter.keys.now())

    def done(self, tokens: int) -> None:
        """Settle the request."""
        self._end(tokens)
        self._limiter.keys.record_success(self._limiter.variable, trial=self._trial)

    def failed(self, error: ToolError) -> None:
        """Settle the request; a refusal pauses or blocks its key."""
        self._end(error.tokens)
        if error.http_status in _KEY_STATUSES:
            self._limiter.record_upstream_refusal(error, self._need, self.key)
        if self._trial and error.upstream_status not in STATES:
            self._limiter.keys.end_trial(self._limiter.variable)

    def cancelled(self) -> None:
        """Settle the request."""
        self._end(None)
        if self._trial:
            self._limiter.keys.end_trial(self._limiter.variable)

    def _end(self, tokens: int | None) -> None:
        if not self._ended:
            self._ended = True
            self._limiter.end_request(self._use, tokens, self._need.flow[0])
