"""Permits of all keys and endpoints of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from openapi_tool.limits import keys as key_state
from openapi_tool.limits.allowance import Allowance
from openapi_tool.limits.flow import Flow
from openapi_tool.limits.keys import Keys
from openapi_tool.limits.ledger import Rates
from openapi_tool.limits.permits import Need, Permit
from openapi_tool.limits.queue import Queue
from openapi_tool.limits.shown import shown
from openapi_tool.limits.store import Store
from openapi_tool.options import LimitOptions
from openapi_tool.protocol.errors import ToolError


class Limiter:
    """Permits of all keys of this process, and their state (`keys`).

    `clock` is the server's, in seconds since the epoch. `failure` returns the error of a key that is refused with a
    five-digit status.
    """

    def __init__(
        self,
        name: str,
        options: LimitOptions,
        store: Store,
        clock: Callable[[], float],
        failure: Callable[[int], ToolError],
    ) -> None:
        self.keys = Keys(name, store, clock, failure)
        self.keys.changed = self._key_changed
        self._name = name
        self._options = options
        self._pools = options.pool_of
        self._store = store
        self._queues: dict[tuple[str, str], Queue] = {}  # by a variable that definitions name, and endpoint
        self._flows: dict[tuple[str, str], Flow] = {}

    async def acquire(self, need: Need) -> Permit:
        """Wait for a permit.

        Raises RateLimited once it is certain that none comes before the deadline, and the error of a refused key while
        it is marked.
        """
        queue = self._queues.get((need.variable, need.endpoint)) or self._open(need.variable, need.endpoint)
        if self.keys.marks:
            await self._check_marks(queue)
        if queue.pooled:
            return await self._of_pool(queue, need)
        [flow] = queue.flows
        return flow.try_take(need) or await flow.wait(need)

    async def _check_marks(self, queue: Queue) -> None:
        """Let a call try a marked key again when it is time. Raises the error of the key if no other is left."""
        marked = [flow for flow in queue.flows if flow.variable in self.keys.marks]
        for flow in marked:
            if self.keys.is_due(flow.variable) and await self.keys.may_try(flow.variable):
                flow.trial = True
        if marked and not queue.serving():
            raise self.keys.error(next(flow.variable for flow in marked if flow.variable in self.keys.marks))

    async def _of_pool(self, queue: Queue, need: Need) -> Permit:
        serving = queue.serving() or queue.flows
        fresh = [flow for flow in serving if flow.variable not in need.refused_by] or serving
        ready = [flow for flow in fresh if not flow.paused_s] or fresh
        for flow in queue.in_turn(ready):
            if permit := flow.try_take(need):
                queue.used(flow)
                return permit
        return await ready[0].wait(need)

    def news(self, name: str, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        if name.startswith(key_state.PREFIX):
            self.keys.news(name, revision, value)
            return
        for flow in self._flows.values():
            if flow.record_name == name:
                flow.news(revision, value)

    def shown(self) -> list[dict[str, Any]]:
        """Return the state of every key and endpoint that is limited or was used."""
        return [shown(flow) for flow in self._flows.values() if flow.allowance.limited]

    async def aclose(self) -> None:
        """Give back unused permits and stop."""
        await asyncio.gather(*(flow.aclose() for flow in self._flows.values()), self.keys.aclose())

    def _key_changed(self, variable: str) -> None:
        """Let the calls that wait for a key be served, or be answered if it was marked and none else is left."""
        for flow in self._flows.values():
            if flow.variable == variable:
                flow.trial = False
                flow.queue.wake()

    def _open(self, variable: str, endpoint: str) -> Queue:
        """Make the queue of a variable, or of its pool, with the flows that serve it."""
        members = self._pools.get(variable.upper(), (variable,))
        known = self._flows.get((members[0], endpoint))
        queue = self._queues[variable, endpoint] = known.queue if known else Queue(pooled=len(members) > 1)
        if known is None:
            for member in members:
                allowance = Allowance(self._name, _rates(self._options, member, endpoint))
                self._flows[member, endpoint] = Flow(member, endpoint, allowance, self._store, self.keys, queue)
            _weigh(queue.flows)
        return queue


def _weigh(flows: list[Flow]) -> None:
    """Set the parts of a pool's load by the limits of its keys, if all have one of the same kind."""
    for name in ("requests", "tokens", "concurrent"):
        limits = [getattr(flow.allowance.rates, name) for flow in flows]
        if all(limits):
            for flow, limit in zip(flows, limits, strict=True):
                flow.weight = float(limit)
            return


def _rates(options: LimitOptions, variable: str, endpoint: str) -> Rates:
    limits = options.of(variable)
    names = ("requests_per_minute", "tokens_per_minute", "concurrent")
    return Rates(*(getattr(limits, f"{endpoint}_{name}", None) for name in names))
