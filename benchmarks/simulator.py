"""Simulate the shares of projects over many replicas in virtual time: `python -m benchmarks.simulator`.

Scheduler and redelivery delays are the executor's own code. The durable (stream order, redeliveries first), the
replicas' requests for commands, and calls of one second are modelled. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from openapi_tool.kernel.jetstream.hand_back_delays import HandBackDelays
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.intake import MIN_LOOK_AHEAD
from openapi_tool.kernel.jetstream.look_ahead import JITTER, PAUSE_S
from openapi_tool.kernel.jetstream.scheduler import FairScheduler
from openapi_tool.protocol.projects import AgentKey

_CALL_S = 1.0
_EXPIRED_S = 0.01
"""Duration of a call without an upstream request, because its worker no longer waits."""

_WORKER_WAIT_S = 27.0  # defaults: executor.worker_timeout_s less commit_margin_s
_BYTES = 2_000
_WEIGHTS = (1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Scene:
    """Number of replicas, their slots and held commands, and the projects that send calls.

    Every `greedy_every`-th project demands `greed` times its share, all others half of theirs. Greedy projects have the
    weights 1, 2 and 4 in turn if `weighted` is 1. `seconds` are measured after `warm_s`.
    """

    replicas: int = 1_000
    slots: int = 16
    max_held: int = 128
    projects: int = 5_000
    greedy_every: int = 10
    greed: float = 20.0
    weighted: int = 0
    seconds: float = 60.0
    warm_s: float = 30.0
    seed: int = 1

    @property
    def capacity(self) -> float:
        """Return the calls per second of all replicas."""
        return self.replicas * self.slots / _CALL_S

    def demand(self, project: int) -> float:
        """Return the calls per second of a project."""
        return self.capacity / self.projects * (self.greed if self.greedy(project) else 0.5)

    def greedy(self, project: int) -> bool:
        """Return whether a project demands more than its share."""
        return project % self.greedy_every == 0

    def weighted_projects(self) -> range:
        """Return the projects whose weight may differ from 1."""
        return range(0, self.projects if self.weighted else 0, self.greedy_every)

    def weight(self, project: int) -> float:
        """Return the weight of a project."""
        return _WEIGHTS[project // self.greedy_every % len(_WEIGHTS)] if self.weighted and self.greedy(project) else 1.0


@dataclass(slots=True, eq=False)
class Command:
    """Fields of a held command that the scheduler reads, and the time of its publication."""

    project: int
    published_at: float
    claimed_agent: AgentKey = field(init=False)
    memory_bytes: int = _BYTES

    def __post_init__(self) -> None:
        """Name the flow."""
        self.claimed_agent = AgentKey(str(self.project), "agent")


class Replica:
    """Slots, and held commands in the executor's own scheduler."""

    def __init__(self, scene: Scene, clock: Callable[[], float]) -> None:
        self.free = scene.slots
        self.scheduler = FairScheduler({str(project): scene.weight(project) for project in scene.weighted_projects()})
        self.delays = HandBackDelays(scene.slots, clock)
        self._max_held = scene.max_held

    def look_ahead(self) -> int:
        """Return the number of commands to ask for, as `Intake` does."""
        return max(self._max_held - len(self.scheduler), MIN_LOOK_AHEAD)

    def hold(self, command: Command) -> Command | None:
        """Hold a command, as `Intake` does; return the command that is evicted: another one, or itself."""
        full = len(self.scheduler) >= self._max_held
        if full and self.scheduler.would_evict(command.claimed_agent.project):
            return command
        self.scheduler.offer(cast("HeldCommand", command))
        return cast("Command", self.scheduler.evict()) if full else None


class Simulation:
    """Events in virtual time; `waits` and `expired` count the calls of each project that began in the window."""

    def __init__(self, scene: Scene) -> None:
        self.now = 0.0
        self.deliveries = 0
        self.waits: list[list[float]] = [[] for _ in range(scene.projects)]
        self.expired = [0] * scene.projects
        self._scene = scene
        self._random = random.Random(scene.seed)  # noqa: S311 - a simulation
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._redeliveries: deque[Command] = deque()
        self._stream: deque[Command] = deque()
        self._replicas = [Replica(scene, lambda: self.now) for _ in range(scene.replicas)]
        self._idle: deque[Replica] = deque(replica for _ in range(scene.slots) for replica in self._replicas)

    def run(self) -> None:
        """Run all events until the window ends."""
        demands = [self._scene.demand(project) for project in range(self._scene.projects)]
        self._arrivals(list(itertools.accumulate(demands)))
        for replica in self._replicas:
            self._at(self._random.random() * PAUSE_S, self._look, replica)
        until = self._scene.warm_s + self._scene.seconds
        while self._events[0][0] < until:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _at(self, delay_s: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), lambda: act(*arguments)))

    def _arrivals(self, cumulated: Sequence[float]) -> None:
        """Publish the next command, and plan the one after it (Poisson)."""
        [project] = self._random.choices(range(len(cumulated)), cum_weights=cumulated)
        self._stream.append(Command(project, self.now))
        self._serve_idle()
        self._at(self._random.expovariate(cumulated[-1]), self._arrivals, cumulated)

    def _serve_idle(self) -> None:
        """Deliver to open pull requests, the oldest first."""
        while self._idle and (command := self._next_delivery()):
            self._begin(self._idle.popleft(), command)

    def _next_delivery(self) -> Command | None:
        queue = self._redeliveries or self._stream
        self.deliveries += bool(queue)
        return queue.popleft() if queue else None

    def _begin(self, replica: Replica, command: Command) -> None:
        replica.free -= 1
        waited = self.now - command.published_at
        if self.now >= self._scene.warm_s:
            if waited <= _WORKER_WAIT_S:
                self.waits[command.project].append(waited)
            else:
                self.expired[command.project] += 1
        duration_s = _CALL_S if waited <= _WORKER_WAIT_S else _EXPIRED_S
        self._at(duration_s, self._end, replica, command, duration_s)

    def _end(self, replica: Replica, command: Command, duration_s: float) -> None:
        replica.free += 1
        replica.delays.finished(command.claimed_agent.project, duration_s)
        replica.scheduler.finished(cast("HeldCommand", command), int(duration_s == _CALL_S))
        held = replica.scheduler.next()
        if held is not None:
            self._begin(replica, cast("Command", held))
            return
        self._idle.append(replica)
        self._serve_idle()

    def _look(self, replica: Replica) -> None:
        """Fetch commands while all slots are busy; hold them or hand them back."""
        requested = replica.look_ahead() if not replica.free else 0
        received = 0
        while received < requested and (command := self._next_delivery()):
            received += 1
            if (evicted := replica.hold(command)) is not None:
                ahead = replica.scheduler.ahead_of(evicted.claimed_agent.project)
                self._at(replica.delays.next(evicted.claimed_agent.project, ahead), self._redeliver, evicted)
        self._at(
            0.0 if requested and received == requested else PAUSE_S * self._random.uniform(*JITTER), self._look, replica
        )

    def _redeliver(self, command: Command) -> None:
        self._redeliveries.append(command)
        self._serve_idle()


def figures(scene: Scene) -> dict[str, Any]:
    """Run a simulation; return shares and waits of greedy and modest projects."""
    simulation = Simulation(scene)
    simulation.run()
    greedy = [project for project in range(scene.projects) if scene.greedy(project)]
    modest = [project for project in range(scene.projects) if not scene.greedy(project)]
    served = [len(waits) for waits in simulation.waits]
    left = scene.capacity * scene.seconds - sum(scene.demand(project) * scene.seconds for project in modest)
    per_weight = left / sum(scene.weight(project) for project in greedy)
    shares = sorted(served[project] / per_weight / scene.weight(project) for project in greedy)
    waits = sorted(wait for project in modest for wait in simulation.waits[project])
    expired = sum(simulation.expired[project] for project in modest)
    result = {
        "replicas": scene.replicas,
        "projects": scene.projects,
        "calls": sum(served),
        "of_capacity": round(sum(served) / scene.capacity / scene.seconds, 3),
        "deliveries_per_call": round(simulation.deliveries / (sum(served) + sum(simulation.expired)), 2),
        "greedy_share": {f"p{rank}": _rank(shares, rank) for rank in (0, 5, 50, 95, 100)},
        "greedy_share_deviation": round(statistics.pstdev(shares), 3),
    }
    if not modest:
        return result
    unserved = round(expired / (expired + len(waits)), 4)
    return result | {
        "modest_unserved": unserved,
        "modest_wait_s": {f"p{rank}": _rank(waits, rank) for rank in (50, 95)},
    }


def _rank(values: Sequence[float], percent: int) -> float:
    return round(values[min(len(values) - 1, percent * len(values) // 100)], 3)


def main() -> None:
    """Simulate the scene of the arguments and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in Scene.__slots__:
        value = getattr(Scene(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    sys.stdout.write(json.dumps(figures(Scene(**vars(parser.parse_args())))) + "\n")


if __name__ == "__main__":
    main()
