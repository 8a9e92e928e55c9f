"""Calls that wait for a permit, and the keys that may serve them: those of a pool, or one key alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openapi_tool.fair_queue import FairQueue, project_key
from openapi_tool.protocol.errors import ToolError
from openapi_tool.quotas.permits import Permit, PermitRequest

if TYPE_CHECKING:
    from openapi_tool.quotas.key_limit import KeyLimit

_ASKED_S = 600.0  # for which a project that has asked for a permit counts as one that may ask again


@dataclass(slots=True, eq=False)
class WaitingCall:
    """Call that waits for a `permit` of the key group, from `since` until `latest` (server times, in seconds).

    `since` is a whole number of milliseconds, as in the reports of replicas. If each replica compared the exact time of
    its own call with the rounded time of another's, each could find the other's call older, and both would wait.

    `preferred` is the key of a pool that may serve the call first. None: any of them may.
    """

    wanted: PermitRequest
    since: float
    latest: float
    permit: asyncio.Future[Permit]
    preferred: KeyLimit | None = None


class KeyGroup:
    """The keys of a pool for one endpoint, or one key alone (`pooled` is False), and the calls that wait for them.

    Here each key stands for its `KeyLimit`. The keys of a pool share the load by their weights: the *load* of a key is
    the number of its requests divided by its weight, and the key with the lowest load serves next.
    """

    def __init__(self, waiting: FairQueue[WaitingCall], *, pooled: bool) -> None:
        self.waiting = waiting
        self.pooled = pooled
        self.limits: list[KeyLimit] = []  # the keys; each adds itself
        self._weights: dict[KeyLimit, float] = {}
        self._loads: dict[KeyLimit, float] = {}
        # The lowest load of a usable key when a request was counted last. A key that was unusable for a while continues
        # from here. From its own, lower load it would get all requests until it has caught up.
        self._lowest_load = 0.0
        self._last_asked: dict[str, float] = {}  # server time by project, of the two that have asked last

    def add(self, limit: KeyLimit) -> None:
        """Add a key."""
        self.limits.append(limit)
        self._weights[limit] = 1.0
        self._loads[limit] = 0.0

    def weigh(self) -> None:
        """Weight the keys by their limits: by the first kind of limit that is set for all of them."""
        for kind in ("requests", "tokens", "concurrent"):
            values = [getattr(limit.rates, kind) for limit in self.limits]
            if all(values):
                self._weights = {limit: float(value) for limit, value in zip(self.limits, values, strict=True)}
                return

    # The keys.

    def usable(self) -> list[KeyLimit]:
        """Return the keys that are set and not blocked."""
        return [limit for limit in self.limits if limit.usable]

    def by_load(self, limits: Sequence[KeyLimit]) -> list[KeyLimit]:
        """Sort keys by load, lowest first."""
        return sorted(limits, key=self._load)

    def count_request(self, limit: KeyLimit) -> None:
        """Count a request towards the load of a key."""
        self._loads[limit] = self._load(limit) + 1 / self._weights[limit]
        loads = [self._loads[usable] for usable in self.usable() if not usable.paused_s]
        self._lowest_load = max(self._lowest_load, min(loads, default=0.0))

    def _load(self, limit: KeyLimit) -> float:
        return max(self._loads[limit], self._lowest_load)

    def wake(self) -> None:
        """Let all keys look at the waiting calls."""
        for limit in self.limits:
            limit.wake()

    # The calls.

    def note_asking(self, project: str, now: float) -> None:
        """Record that a project asks for a permit."""
        self._last_asked.pop(project, None)
        self._last_asked[project] = now
        if len(self._last_asked) > 2:  # noqa: PLR2004 - two tell whether another project than a given one has asked
            del self._last_asked[next(iter(self._last_asked))]

    def projects_asking(self, now: float) -> set[str]:
        """Return the short names (`project_key`) of the projects that asked within `_ASKED_S`: of two at most."""
        return {project_key(project) for project, at in self._last_asked.items() if now - at < _ASKED_S}

    def wait_s(self, place: int) -> float:
        """Return a lower bound of the seconds until the call in this place (1: the next one) gets a permit.

        Until then, the keys grant `place` permits. Whatever they do, at least one of them grants its share of these by
        weight, or more: if each granted less, together they would grant less. So the call waits at least until the
        first key can have granted its share.
        """
        limits = self.usable() or self.limits
        total_weight = sum(self._weights[limit] for limit in limits)
        waits = []
        for limit in limits:
            share = math.ceil(place * self._weights[limit] / total_weight)
            waits.append(limit.wait_s(max(1, share)))
        return min(waits)

    def discard(self, call: WaitingCall) -> bool:
        """Remove a call; return whether it still waited."""
        return self.waiting.discard(*call.wanted.agent, call)

    def fail(self, call: WaitingCall, error: ToolError) -> None:
        """End the wait of a call with an error."""
        self.discard(call)
        if not call.permit.done():
            call.permit.set_exception(error)
