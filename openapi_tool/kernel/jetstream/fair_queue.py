"""Weighted fair queueing: which flow of commands is served next, so that none of them can take more than its share.

A *flow* is a project, or an agent of a project. `FairScheduler` has a `FairQueue` over projects. There each project has
a `FairQueue` over its agents, and each agent a `_Fifo`:

    FairQueue
      flow "project_a"   FairQueue
                           flow "agent_1"   _Fifo   command, command
                           flow "agent_2"   _Fifo   command
      flow "project_b"   FairQueue
                           …

The algorithm is start-time fair queueing (Goyal, Vin and Cheng, 1996). Each flow has a *start*, a number that says when
it is due. The flow with the earliest start is served next, and its start advances by cost / weight, where one upstream
request costs 1. *Virtual time* is the start of the flow that was served last. A flow that was idle starts at that time
at the earliest, so that it earns no credit. For example, with A of weight 1 and B of weight 2, both waiting since 0:

| served | start of A | start of B | virtual time |
| --- | --- | --- | --- |
| A | 1 | 0 | 0 |
| B | 1 | 0.5 | 0 |
| B | 1 | 1 | 0.5 |
| A | 2 | 1 | 1 |
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from openapi_tool.kernel.jetstream.held import HeldCommand

EQUAL_WEIGHTS: Mapping[str, float] = MappingProxyType({})

_MAX_STALE_ENTRIES = 64  # entries of a heap, beside two per flow, from which on stale ones are removed
_MAX_IDLE_FLOWS = 4_096  # flows of a queue that are remembered with their charge, although no command waits in them


def any_flow(_: str) -> bool:
    """Let every flow begin a command."""
    return True


class _Flow:
    """Flow of a fair queue: a project, or an agent of a project.

    - `queue`: its waiting commands; `length` and `memory_bytes` are their number and memory.
    - `start`: the virtual time at which the next command is due.
    - `step`: by how much one request advances `start`: 1 / weight.
    - `entry_number`: number of the flow's valid entry in the heap, 0 without one.
    """

    __slots__ = ("entry_number", "length", "memory_bytes", "name", "queue", "start", "step")

    def __init__(self, name: str, queue: _Fifo | FairQueue, start: float, weight: float) -> None:
        self.name = name
        self.queue = queue
        self.start = start
        self.step = 1 / weight
        self.memory_bytes = 0
        self.length = 0
        self.entry_number = 0


class _Entry(NamedTuple):
    """Entry of the heap of flows that are due. The earliest start is first, and of equal starts the lowest number."""

    start: float
    number: int
    flow_name: str


class FairQueue:
    """Queue of commands that serves its flows in turn, by their `weights`, by default 1.

    With `levels` above 1 each flow is itself a fair queue. A command then has a path with a name for each level: one
    with the path (project, agent) is in the flow of its project, and there in the flow of its agent.
    """

    def __init__(self, levels: int, weights: Mapping[str, float] = EQUAL_WEIGHTS) -> None:
        self._levels = levels
        self._weights = weights
        self._virtual_time = 0.0
        self._flows: dict[str, _Flow] = {}
        # Heap of entries, the earliest start first. Each flow with waiting commands has one valid entry. An entry is
        # stale if its flow has a newer one, or is gone.
        # - A charge leaves the flow's entry as it is. Its start is then too early, which `_take_earliest` corrects.
        # - A refund adds an entry with the earlier start, so that the old entry becomes stale.
        self._due: list[_Entry] = []
        self._last_entry_number = 0

    def push(self, path: tuple[str, ...], held: HeldCommand) -> None:
        """Enqueue a command in the flow `path[0]`; the rest of the path is for that flow's own queue."""
        name = path[0]
        flow = self._flows.get(name)
        if flow is None:
            queue = FairQueue(self._levels - 1) if self._levels > 1 else _Fifo()
            flow = self._flows[name] = _Flow(name, queue, self._virtual_time, self._weights.get(name, 1.0))
        flow.queue.push(path[1:], held)
        flow.memory_bytes += held.memory_bytes
        flow.length += 1
        if not flow.entry_number:  # the flow was idle
            flow.start = max(flow.start, self._virtual_time)
            self._enqueue(flow)

    def pop(self, may_begin: Callable[[str], bool] = any_flow) -> HeldCommand | None:
        """Remove and return the command that is due first, and charge its flow with one request.

        Only flows that `may_begin` a command are considered. Returns None without a command.
        """
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
            self._forget_idle_flows()
        return held

    def evict(self) -> HeldCommand:
        """Remove and return the newest command of the flow with the most memory per weight. A command must wait."""
        name = self.largest()
        flow = self._flows[name]
        held = flow.queue.evict()
        flow.memory_bytes -= held.memory_bytes
        flow.length -= 1
        is_charged = flow.start > self._virtual_time  # which must be remembered
        if not flow.length and not is_charged:
            del self._flows[name]
            self._remove_stale_entries()
        return held

    def charge(self, path: tuple[str, ...], cost: float) -> None:
        """Charge the flow of a path, and its flows below, with a cost in requests; a negative cost is a refund.

        A refund never moves the start before the virtual time: it would be a credit.
        """
        flow = self._flows.get(path[0])
        if flow is None:  # forgotten since
            return
        flow.queue.charge(path[1:], cost)
        charged_start = flow.start + cost * flow.step
        if cost >= 0:
            flow.start = charged_start
            return
        earliest_start = min(flow.start, self._virtual_time)
        flow.start = max(charged_start, earliest_start)
        if flow.entry_number:
            self._enqueue(flow)

    def ahead_of(self, name: str) -> int:
        """Return the flow's number of commands, times the number of flows with waiting commands.

        Stale entries are counted as flows, too, so the number may be too large.
        """
        flow = self._flows.get(name)
        return flow.length * len(self._due) if flow else 0

    def largest(self) -> str:
        """Return the flow with the most memory per weight. A command must wait."""
        return max((entry.flow_name for entry in self._due), key=self._memory_by_weight)

    def _memory_by_weight(self, name: str) -> float:
        flow = self._flows.get(name)
        return flow.memory_bytes * flow.step if flow else 0.0

    def _enqueue(self, flow: _Flow) -> None:
        """Add an entry for the flow's present start; an older entry of the flow becomes stale."""
        self._last_entry_number += 1
        flow.entry_number = self._last_entry_number
        heapq.heappush(self._due, _Entry(flow.start, flow.entry_number, flow.name))

    def _take_earliest(self, may_begin: Callable[[str], bool]) -> _Flow | None:
        """Return the flow to serve, and remove its entry; None if no flow may begin a command.

        Entries of flows that may not begin a command stay. On the way, stale and empty entries are removed, and those
        of flows that were charged meanwhile get their later start.
        """
        passed_over = []
        try:
            while self._due:
                entry = heapq.heappop(self._due)
                flow = self._flows.get(entry.flow_name)
                if flow is None or flow.entry_number != entry.number:  # a stale entry
                    continue
                if not flow.length:  # the flow's last command was evicted
                    flow.entry_number = 0
                elif flow.start > entry.start:  # the flow was charged meanwhile
                    self._enqueue(flow)
                elif may_begin(flow.name):
                    flow.entry_number = 0
                    return flow
                else:
                    passed_over.append(entry)
            return None
        finally:
            for entry in passed_over:
                heapq.heappush(self._due, entry)

    def _remove_stale_entries(self) -> None:
        """Remove stale entries, which pile up if commands of ever new agents are evicted unrun."""
        if len(self._due) > 2 * len(self._flows) + _MAX_STALE_ENTRIES:
            valid = {flow.entry_number for flow in self._flows.values()}
            self._due = [entry for entry in self._due if entry.number in valid]
            heapq.heapify(self._due)

    def _forget_idle_flows(self) -> None:
        """Forget flows without waiting commands: a client may invent any number of project and agent names."""
        self._flows = {name: flow for name, flow in self._flows.items() if flow.entry_number}


class _Fifo:
    """Commands of one agent, in the order of their arrival; with the methods of `FairQueue` that a flow needs."""

    def __init__(self) -> None:
        self._waiting: deque[HeldCommand] = deque()

    def push(self, _path: tuple[str, ...], held: HeldCommand) -> None:
        self._waiting.append(held)

    def pop(self) -> HeldCommand:
        return self._waiting.popleft()

    def evict(self) -> HeldCommand:
        return self._waiting.pop()

    def charge(self, _path: tuple[str, ...], _cost: float) -> None:
        """Do nothing: within one agent the order does not depend on cost."""
