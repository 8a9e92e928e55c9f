"""Weighted fair queueing of projects, and of the agents of each: start-time fair queueing (Goyal et al., 1996)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from heapq import nlargest
from types import MappingProxyType
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, Field

from openapi_tool.protocol.projects import bare_project

Item = TypeVar("Item")

NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})
_MAX_ENDS = 500  # bounds the size of a shared record; above it only the later half is kept
_CREDIT = 2.0  # requests that a project which waited little may send ahead of its turn
Tag = Annotated[float, Field(ge=0, le=1e15)]


@lru_cache(maxsize=10_000)
def project_key(project: str) -> str:
    """Return the short name of a project in a shared record."""
    return hashlib.blake2b(project.encode(), digest_size=6).hexdigest()


class Turns(BaseModel):
    """Whose turn it is: that of the waiting project with the least `start`.

    To be served moves a project's next turn by cost / weight in virtual time. `time` is the latest start of a turn that
    was served. A project that did not wait for a while begins `_CREDIT` before `time`, not earlier: if it asks for less
    than its share, two or three of its requests that come together do not wait for those of busy projects. `ends` has
    the end of the last turn of each project that has used some of its credit.
    """

    time: Tag = 0.0
    ends: dict[str, Tag] = Field(default_factory=dict)

    def start(self, project: str) -> float:
        """Return when a project's next turn begins."""
        return max(self._earliest, self.ends.get(project, 0.0))

    def serve(self, project: str, cost: float) -> None:
        """Serve a project; `cost` is that of its request divided by its weight."""
        start = self.start(project)
        self.time = max(self.time, start)
        self.ends[project] = start + cost
        if len(self.ends) > _MAX_ENDS:
            ahead = ((end, name) for name, end in self.ends.items() if end > self._earliest)
            self.ends = {name: end for end, name in nlargest(_MAX_ENDS // 2, ahead)}

    def charge(self, project: str, cost: float) -> None:
        """Correct the cost of a request that was served; a negative one is a refund, up to the credit."""
        self.ends[project] = max(self._earliest, self.start(project) + cost)

    def limit_ahead(self, most: float) -> None:
        """Correct turns that are further ahead than `most`: those were forged, or are of another limit."""
        self.ends = {name: min(end, self.time + most) for name, end in self.ends.items() if end > self._earliest}

    @property
    def _earliest(self) -> float:
        return max(0.0, self.time - _CREDIT)


class FairQueue(Generic[Item]):
    """Waiting items by project and agent; the agents of a project take turns. `weights` of projects are 1 by default.

    `turns` order the projects; a queue whose turns are shared with others gets them from there instead.
    """

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        self._weights = weights
        self._projects: dict[str, OrderedDict[str, deque[Item]]] = {}
        self._length = 0
        self.turns = Turns()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for project in self.projects():
            yield from self.of(project)

    def projects(self) -> list[str]:
        """Return the projects with waiting items."""
        return list(self._projects)

    def counts(self) -> dict[str, int]:
        """Return the number of items by project."""
        return {name: sum(map(len, agents.values())) for name, agents in self._projects.items()}

    def count(self, project: str) -> int:
        """Return the number of items of a project."""
        return sum(map(len, self._projects.get(project, {}).values()))

    def weight(self, project: str) -> float:
        """Return the weight of a project."""
        return self._weights.get(bare_project(project), 1.0)

    def add(self, project: str, agent: str, item: Item) -> None:
        """Enqueue an item."""
        self._projects.setdefault(project, OrderedDict()).setdefault(agent, deque()).append(item)
        self._length += 1

    def put_back(self, project: str, agent: str, item: Item) -> None:
        """Enqueue an item that was popped, as the next of its project."""
        agents = self._projects.setdefault(project, OrderedDict())
        agents.setdefault(agent, deque()).appendleft(item)
        agents.move_to_end(agent, last=False)
        self._length += 1

    def first(self, project: str) -> Item:
        """Return the next item of a project."""
        return next(iter(self._projects[project].values()))[0]

    def of(self, project: str) -> Iterator[Item]:
        """Return the items of a project, in their order."""
        queues = deque(iter(waiting) for waiting in self._projects.get(project, {}).values())
        while queues:
            queue = queues.popleft()
            for item in queue:  # only one, then one of the next agent; an empty queue is left out
                yield item
                queues.append(queue)
                break

    def next(
        self, may: Callable[[str], bool] = lambda _: True, rank: Callable[[str], float] = lambda _: 0.0
    ) -> str | None:
        """Return the project whose turn it is, of those that `may` be served; None if there is none.

        Those of the lowest `rank` come first.
        """
        candidates = filter(may, self._projects)
        return min(candidates, key=lambda name: (rank(name), self.turns.start(name)), default=None)

    def pop(self, project: str) -> Item:
        """Remove and return the next item of a project."""
        agents = self._projects[project]
        agent, waiting = next(iter(agents.items()))
        item = waiting.popleft()
        agents.move_to_end(agent)
        self._drop_empty(project, agent)
        return item

    def discard(self, project: str, agent: str, item: Item) -> bool:
        """Remove an item; return whether it still waited."""
        agents = self._projects.get(project)
        if agents is None or item not in agents.get(agent, ()):
            return False
        agents[agent].remove(item)
        self._drop_empty(project, agent)
        return True

    def _drop_empty(self, project: str, agent: str) -> None:
        self._length -= 1
        if not self._projects[project][agent]:
            del self._projects[project][agent]
            if not self._projects[project]:
                del self._projects[project]
