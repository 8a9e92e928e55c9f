"""Order in which held commands get a slot, and which of them is evicted if too many are held.

A *slot* is one of the places for running calls. All slots may be busy, so received commands are held in memory until
one is free. The intake (`intake.py`) puts them in here, and takes out the next one for each slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from openapi_tool.kernel.jetstream.fair_queue import EQUAL_WEIGHTS, FairQueue, any_flow
from openapi_tool.kernel.jetstream.held import HeldCommand

_MIN_COST = 0.1  # of a command, in upstream requests


class FairScheduler:
    """Queue of the commands that wait for a slot. Projects take turns, and within a project its agents.

    The next slot goes to the project that was charged least for its weight (`weights`, else 1). So a project that
    queues thousands of commands delays only its own. An idle project earns no credit. The agents of a project have
    equal weights, and the commands of an agent run in the order of their arrival.

    If too many commands wait, the newest one of the project with the most memory per weight is evicted. `memory_bytes`
    is the memory that all waiting commands take.
    """

    def __init__(self, weights: Mapping[str, float] = EQUAL_WEIGHTS) -> None:
        self.memory_bytes = 0
        self._length = 0
        self._projects = FairQueue(levels=2, weights=weights)  # of projects, each with a queue of its agents

    def __len__(self) -> int:
        """Return the number of waiting commands."""
        return self._length

    def offer(self, held: HeldCommand) -> None:
        """Enqueue a command."""
        self._projects.push(held.claimed_agent, held)
        self._length += 1
        self.memory_bytes += held.memory_bytes

    def next(self, may_begin: Callable[[str], bool] = any_flow) -> HeldCommand | None:
        """Remove and return the command that runs next, and charge project and agent with one request for it.

        Only a project that `may_begin` a call is considered. Returns None if no command may run.
        """
        held = self._projects.pop(may_begin) if self._length else None
        if held is not None:
            self._deduct(held)
        return held

    def finished(self, held: HeldCommand, requests: int) -> None:
        """Charge project and agent of a command that has run with the rest of its cost: its upstream requests.

        `next` has charged one request. A command that made three is charged two more. One that made none gets 0.9 back,
        so that it costs a tenth: at full cost, expired commands would use up their project's share; at no cost, a flood
        of invalid calls would occupy all slots.
        """
        if requests != 1:
            self._projects.charge(held.claimed_agent, max(requests, _MIN_COST) - 1)

    def evict(self) -> HeldCommand:
        """Remove and return the newest command of the largest agent in the largest project, by memory and weight.

        A command must wait.
        """
        held = self._projects.evict()
        self._deduct(held)
        return held

    def would_evict(self, project: str) -> bool:
        """Return whether `evict` would take a command of this project, as it has the most memory per weight."""
        return self._length > 0 and self._projects.largest() == project

    def ahead_of(self, project: str) -> int:
        """Estimate how many commands run before a further one of a project.

        With each waiting command of the project, one of every other project runs.
        """
        return min(self._projects.ahead_of(project), self._length)

    def withdraw(self) -> list[HeldCommand]:
        """Remove and return all waiting commands, in the order in which they would have run."""
        withdrawn = []
        # The last `pop` finds no command. It removes what the queue still knows of flows that were emptied by `evict`.
        while (held := self._projects.pop()) is not None:
            self._deduct(held)
            withdrawn.append(held)
        return withdrawn

    def _deduct(self, held: HeldCommand) -> None:
        self._length -= 1
        self.memory_bytes -= held.memory_bytes
