"""Calls that wait for one endpoint with one key, or with one of the keys of a pool."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from openapi_tool.limits.ledger import Use
from openapi_tool.limits.line import Line
from openapi_tool.protocol.errors import ToolError

if TYPE_CHECKING:
    from openapi_tool.limits.flow import Flow

Given = tuple["Flow", Use, bool]
"""What a waiting call gets: the key and endpoint, the use of a permit, and whether it tries a marked key again."""


class Queue:
    """Calls that wait for a permit of one key, or of one of the keys of a pool (`pooled`), whose `flows` serve it."""

    def __init__(self, *, pooled: bool) -> None:
        self.line: Line[asyncio.Future[Given]] = Line()
        self.flows: list[Flow] = []
        self.pooled = pooled
        self._clock = 0.0

    def serving(self) -> list[Flow]:
        """Return the keys that may be used: set, and not marked."""
        return [flow for flow in self.flows if flow.serves]

    def in_turn(self, flows: list[Flow]) -> list[Flow]:
        """Return the keys in the order in which they should be asked: the one with the least load for its limit first.

        Fair queueing by virtual time: a key that could not be used for a while does not catch up.
        """
        return sorted(flows, key=lambda flow: max(flow.load, self._clock))

    def used(self, flow: Flow) -> None:
        """Count a request of a key of a pool."""
        flow.load = max(flow.load, self._clock) + 1 / flow.weight
        usable = [one.load for one in self.serving() if not one.paused_s]
        self._clock = max(self._clock, min(usable, default=0.0))

    def wait_s(self, now: float) -> Callable[[float], float]:
        """Return a function from a number of permits to the seconds within which there certainly are fewer.

        Of several keys one must give at least its share of them.
        """
        flows = self.serving()
        total = sum(flow.weight for flow in flows)
        parts = [(flow.allowance.forecast(now), flow.weight / total) for flow in flows]
        return lambda count: min((wait_s(count * share) for wait_s, share in parts), default=0.0)

    def wake(self) -> None:
        """Let all keys look whether they can give permits."""
        for flow in self.flows:
            flow.wake()

    def fail(self, error: ToolError) -> None:
        """Answer all calls that wait."""
        for waiter in self.line.all():
            self.line.discard(waiter)
            if not waiter.item.done():
                waiter.item.set_exception(copy.copy(error))
