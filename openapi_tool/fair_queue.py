"""Weighted fair queueing of projects, and of the agents of each: start-time fair queueing (Goyal et al., 1996).

`Turns` decides whose turn it is; `FairQueue` holds what waits, and asks it. The turns of projects that wait for a key
are shared by all replicas (`quotas/limit_record.py`).
"""

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
_MAX_ENDS = 500  # projects in a shared record, to bound its size; above it, only the 250 latest ends are kept
_CREDIT = 2.0  # requests that a project which has not sent for a while may send ahead of its turn
VirtualTime = Annotated[float, Field(ge=0, le=1e15)]
"""Time that advances by requests, not by seconds: a request of a project of weight 1 takes 1.0."""


@lru_cache(maxsize=10_000)
def project_key(project: str) -> str:
    """Return the short name of a project in a shared record."""
    return hashlib.blake2b(project.encode(), digest_size=6).hexdigest()


class Turns(BaseModel):
    """Whose turn it is: that of the waiting project whose next turn has the earliest `start`, in virtual time.

    A turn lasts for the cost of its request divided by the weight of its project. The project's next turn begins when
    its last one ends. So a project of weight 2 gets two turns in the time in which one of weight 1 gets one.

    `time` is the latest start of a turn that was served: where the busy projects are. A project that has not sent for a
    while begins `_CREDIT` before that, and no earlier. So it cannot save up turns. But if it sends less than its share,
    two or three of its requests that come together need not wait for those of busy projects.

    `ends` has the end of the last turn of each project for which that is later than `time - _CREDIT`.
    """

    time: VirtualTime = 0.0
    ends: dict[str, VirtualTime] = Field(default_factory=dict)

    def start(self, project: str) -> float:
        """Return when a project's next turn begins."""
        return max(self._earliest, self.ends.get(project, 0.0))

    def serve(self, project: str, cost: float) -> None:
        """Give a project its turn; `cost` is that of its request divided by the project's weight."""
        start = self.start(project)
        self.time = max(self.time, start)
        self.ends[project] = start + cost
        if len(self.ends) > _MAX_ENDS:
            still_needed = ((end, name) for name, end in self.ends.items() if end > self._earliest)
            self.ends = {name: end for end, name in nlargest(_MAX_ENDS // 2, still_needed)}

    def charge(self, project: str, cost: float) -> None:
        """Add to the cost of a request that was served; a negative cost is given back, as far as the credit goes."""
        self.ends[project] = max(self._earliest, self.start(project) + cost)

    def limit_ahead(self, most: float) -> None:
        """Move back turns that end more than `most` after `time`: they were forged, or another limit applied then."""
        self.ends = {name: min(end, self.time + most) for name, end in self.ends.items() if end > self._earliest}

    @property
    def _earliest(self) -> float:
        return max(0.0, self.time - _CREDIT)


class FairQueue(Generic[Item]):
    """Waiting items by project and agent.

    Projects take turns by their `weights`, which are 1 by default; the agents of one project take turns one by one.
    `turns` are those of this queue. A user whose turns are shared with other processes decides by those instead, and
    calls `pop` with the project.
    """

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        self._weights = weights
        # By project and agent. The agents of a project are in the order of their turns: the next one is first.
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
        """Return an item that was popped to the queue; it is the next of its project."""
        agents = self._projects.setdefault(project, OrderedDict())
        agents.setdefault(agent, deque()).appendleft(item)
        agents.move_to_end(agent, last=False)
        self._length += 1

    def first(self, project: str) -> Item:
        """Return the next item of a project."""
        return next(iter(self._projects[project].values()))[0]

    def of(self, project: str) -> Iterator[Item]:
        """Return the items of a project in the order in which they would be popped: one of each agent, then again."""
        of_agents = deque(iter(waiting) for waiting in self._projects.get(project, {}).values())
        while of_agents:
            items = of_agents.popleft()
            item = next(items, None)
            if item is not None:  # else this agent has no more
                yield item
                of_agents.append(items)

    def next(
        self, may: Callable[[str], bool] = lambda _: True, rank: Callable[[str], float] = lambda _: 0.0
    ) -> str | None:
        """Return the project whose turn it is; None if there is none.

        Only projects for which `may` is true are considered, and of these only those with the lowest `rank`.
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
