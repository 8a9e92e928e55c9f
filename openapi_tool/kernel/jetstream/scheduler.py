"""Order in which held commands get a slot, and which of them is evicted if too many are held.

`FairScheduler` lets projects take turns, and within a project its agents. It is built of two levels of `_FlowQueue`:
one over the projects, and one for each project over its agents; each agent has a `_Fifo`.

To change the order, write another class with the methods of `Scheduler` and return it from `new_scheduler`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.nats_client.options import FairnessOptions

_EQUAL_WEIGHTS: Mapping[str, float] = MappingProxyType({})

_MIN_COST = 0.1  # of a command, in upstream requests
_MAX_STALE_ENTRIES = 64  # entries of a heap, beside two per flow, from which on stale ones are removed
_MAX_IDLE_FLOWS = 4_096  # flows of a queue that are remembered with their charge, although no command waits in them


def _any_project(_: str) -> bool:
    """Let every project begin a call."""
    return True


class Scheduler(Protocol):
    """Queue of the commands that wait for a slot; `memory_bytes` is the memory that all of them take."""

    memory_bytes: int

    def __len__(self) -> int:
        """Return the number of waiting commands."""

    def ahead_of(self, project: str) -> int:
        """Return about how many commands run before a further one of a project."""

    def offer(self, held: HeldCommand) -> None:
        """Enqueue a command."""

    def next(self, may_begin: Callable[[str], bool] = _any_project) -> HeldCommand | None:
        """Remove and return the command that runs next, of a project that `may_begin` a call; None without one."""

    def finished(self, held: HeldCommand, cost: float) -> None:
        """Charge a command that has run with `cost`, its upstream requests; `next` has charged one of them."""

    def evict(self) -> HeldCommand:
        """Remove and return the command to hand back if too many wait. Raises ValueError if none waits."""

    def would_evict(self, project: str) -> bool:
        """Return whether a further command of a project would be evicted at once."""

    def withdraw(self) -> list[HeldCommand]:
        """Remove and return all waiting commands."""


def new_scheduler(fairness: FairnessOptions) -> Scheduler:
    """Return the scheduler of a kernel's consumer."""
    return FairScheduler(fairness.weights)


class FairScheduler:
    """Weighted fair queueing over projects, within a project over agents of equal weight, and FIFO within an agent.

    The next slot goes to the project that was charged least for its weight (`weights`, else 1). So a project that
    queues thousands of commands delays only its own. An idle project earns no credit. If too many commands wait, the
    newest one of the project with the most memory per weight is evicted.
    """

    def __init__(self, weights: Mapping[str, float] = _EQUAL_WEIGHTS) -> None:
        self.memory_bytes = 0
        self._length = 0
        self._projects = _FlowQueue(levels=2, weights=weights)

    def __len__(self) -> int:
        return self._length

    def ahead_of(self, project: str) -> int:
        """Estimate how many commands run before a further one of a project.

        With each waiting command of the project, one of every other project runs.
        """
        return min(self._projects.ahead_of(project), self._length)

    def offer(self, held: HeldCommand) -> None:
        """Enqueue a command."""
        self._projects.push(held.claimed_agent, held)
        self._length += 1
        self.memory_bytes += held.memory_bytes

    def next(self, may_begin: Callable[[str], bool] = _any_project) -> HeldCommand | None:
        """Remove and return the command that runs next, and charge project and agent with one request for it."""
        held = self._projects.pop(may_begin) if self._length else None
        return None if held is None else self._deduct(held)

    def finished(self, held: HeldCommand, cost: float) -> None:
        """Charge project and agent with the rest of the cost, as `next` has charged one request.

        A command that made three requests is charged two more. One that made none gets 0.9 back, so that it costs a
        tenth: at full cost, expired commands would use up their project's share; at no cost, a flood of invalid calls
        would occupy all slots.
        """
        if cost != 1:
            self._projects.charge(held.claimed_agent, max(cost, _MIN_COST) - 1)

    def evict(self) -> HeldCommand:
        """Remove and return the newest command of the largest agent in the largest project, by memory and weight."""
        return self._deduct(self._projects.drop())

    def would_evict(self, project: str) -> bool:
        """Return whether a project has the most memory per weight."""
        return self._length > 0 and self._projects.largest() == project

    def withdraw(self) -> list[HeldCommand]:
        """Remove and return all waiting commands, in the order in which they would have run."""
        return [self._deduct(held) for held in iter(self._projects.pop, None)]

    def _deduct(self, held: HeldCommand) -> HeldCommand:
        self._length -= 1
        self.memory_bytes -= held.memory_bytes
        return held


class _Fifo:
    """Commands of one agent, in the order of their arrival; with the methods of `_FlowQueue` that a flow needs."""

    def __init__(self) -> None:
        self._waiting: deque[HeldCommand] = deque()

    def push(self, _: tuple[str, ...], held: HeldCommand) -> None:
        self._waiting.append(held)

    def pop(self) -> HeldCommand:
        return self._waiting.popleft()

    def drop(self) -> HeldCommand:
        return self._waiting.pop()

    def charge(self, _: tuple[str, ...], __: float) -> None:
        """Do nothing: within one agent the order does not depend on cost."""


class _Flow:
    """Flow of a fair queue: one project, or one agent of it.

    - `queue`: its waiting commands; `length` and `memory_bytes` are their number and memory.
    - `start`: the virtual time (see `_FlowQueue`) at which the next command is due.
    - `step`: by how much one request advances `start`: 1 / weight.
    - `entry_number`: number of the flow's valid entry in the heap, 0 without one.
    """

    __slots__ = ("entry_number", "length", "memory_bytes", "name", "queue", "start", "step")

    def __init__(self, name: str, queue: _Fifo | _FlowQueue, start: float, weight: float) -> None:
        self.name = name
        self.queue = queue
        self.start = start
        self.step = 1 / weight
        self.memory_bytes = 0
        self.length = 0
        self.entry_number = 0


class _FlowQueue:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996) over flows with `weights`, by default 1.

    The flow with the earliest start is served next, and its start advances by cost / weight. Virtual time is the start
    of the flow that was served last. A flow that was idle starts at that time at the earliest, so that it earns no
    credit. For example, with A of weight 1 and B of weight 2, both waiting since 0:

    | served | start of A | start of B | virtual time |
    | --- | --- | --- | --- |
    | A | 1 | 0 | 0 |
    | B | 1 | 0.5 | 0 |
    | B | 1 | 1 | 0.5 |
    | A | 2 | 1 | 1 |

    With `levels` above 1 each flow is itself a fair queue: a command with the path (project, agent) is in the flow of
    its project, and there in the flow of its agent.
    """

    def __init__(self, levels: int, weights: Mapping[str, float] = _EQUAL_WEIGHTS) -> None:
        self._levels = levels
        self._weights = weights
        self._virtual_time = 0.0
        self._flows: dict[str, _Flow] = {}
        # Heap of (start, number of the entry, name of the flow). An entry is stale if its flow has a newer one.
        # - A charge leaves the flow's entry as it is. Its start is then too early, which `_take_earliest` corrects.
        # - A refund adds an entry with the earlier start, so that the old entry becomes stale.
        self._due: list[tuple[float, int, str]] = []
        self._entries = 0  # numbers given so far

    def push(self, path: tuple[str, ...], held: HeldCommand) -> None:
        """Enqueue a command in the flow `path[0]`; the rest of the path is for that flow's own queue."""
        name = path[0]
        flow = self._flows.get(name)
        if flow is None:
            queue = _FlowQueue(self._levels - 1) if self._levels > 1 else _Fifo()
            flow = self._flows[name] = _Flow(name, queue, self._virtual_time, self._weights.get(name, 1.0))
        flow.queue.push(path[1:], held)
        flow.memory_bytes += held.memory_bytes
        flow.length += 1
        if not flow.entry_number:
            flow.start = max(flow.start, self._virtual_time)
            self._enqueue(flow)

    def pop(self, may_begin: Callable[[str], bool] = _any_project) -> HeldCommand | None:
        """Remove and return the command that is due first, and charge its flow with one request; None without one."""
        flow = self._take_earliest(may_begin)
        if flow is None:
            return None
        held = flow.queue.pop()
        if held is None:  # never: a flow that is due has a command
            return None
        # A flow that was passed over earlier, as it might not begin a command, has a start before the virtual time.
        self._virtual_time = max(self._virtual_time, flow.start)
        flow.memory_bytes -= held.memory_bytes
        flow.length -= 1
        flow.start += flow.step
        if flow.length:
            self._enqueue(flow)
        elif len(self._flows) > len(self._due) + _MAX_IDLE_FLOWS:  # an idle flow has no entry
            self._drop_idle_flows()
        return held

    def drop(self) -> HeldCommand:
        """Remove and return the newest command of the flow with the most memory per weight."""
        name = self.largest()
        flow = self._flows[name]
        held = flow.queue.drop()
        flow.memory_bytes -= held.memory_bytes
        flow.length -= 1
        is_charged = flow.start > self._virtual_time  # which must be remembered
        if not flow.length and not is_charged:
            del self._flows[name]
            self._drop_stale_entries()
        return held

    def ahead_of(self, name: str) -> int:
        """Return the flow's number of commands, times the number of flows with waiting commands."""
        flow = self._flows.get(name)
        return flow.length * len(self._due) if flow else 0

    def largest(self) -> str:
        """Return the flow with the most memory per weight. Raises ValueError if no command waits."""
        return max((name for _, _, name in self._due), key=self._weighted_size)

    def _weighted_size(self, name: str) -> float:
        flow = self._flows.get(name)
        return flow.memory_bytes * flow.step if flow else 0.0

    def charge(self, path: tuple[str, ...], cost: float) -> None:
        """Charge a flow with a cost in requests; a negative cost is a refund.

        A refund never moves the start before the virtual time: it would be a credit.
        """
        flow = self._flows.get(path[0])
        if flow is None:
            return
        charged = flow.start + cost * flow.step
        is_refund = cost < 0
        flow.start = max(charged, min(flow.start, self._virtual_time)) if is_refund else charged
        flow.queue.charge(path[1:], cost)
        if is_refund and flow.entry_number:
            self._enqueue(flow)

    def _enqueue(self, flow: _Flow) -> None:
        """Add an entry for the flow's present start; an older entry of the flow becomes stale."""
        self._entries += 1
        flow.entry_number = self._entries
        heapq.heappush(self._due, (flow.start, self._entries, flow.name))  # FIFO among equal starts

    def _take_earliest(self, may_begin: Callable[[str], bool]) -> _Flow | None:
        """Return the flow to serve, and remove its entry; None if no flow may begin a command.

        Entries of flows that may not begin a command stay. On the way, stale and empty entries are removed, and those
        of flows that were charged meanwhile get their later start.
        """
        passed_over = []
        try:
            while self._due:
                entry = heapq.heappop(self._due)
                start, number, name = entry
                flow = self._flows.get(name)
                if flow is None or flow.entry_number != number:  # a stale entry
                    continue
                flow.entry_number = 0
                if not flow.length:  # the flow's last command was evicted
                    continue
                if flow.start > start:  # the flow was charged meanwhile
                    self._enqueue(flow)
                elif may_begin(name):
                    return flow
                else:
                    flow.entry_number = number
                    passed_over.append(entry)
        finally:
            for entry in passed_over:
                heapq.heappush(self._due, entry)
        return None

    def _drop_stale_entries(self) -> None:
        """Remove stale entries, which pile up if commands of ever new agents are evicted unrun."""
        if len(self._due) > 2 * len(self._flows) + _MAX_STALE_ENTRIES:
            valid = {(flow.entry_number, name) for name, flow in self._flows.items()}
            self._due = [entry for entry in self._due if entry[1:] in valid]
            heapq.heapify(self._due)

    def _drop_idle_flows(self) -> None:
        """Forget flows without waiting commands: a client may invent any number of project and agent names."""
        self._flows = {name: flow for name, flow in self._flows.items() if flow.entry_number}
