"""Rate limiter of this process: permits of all keys and endpoints."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from openapi_tool.limits.allowance import LimitAllowance
from openapi_tool.limits.fair_queue import NO_WEIGHTS, KeyGroup
from openapi_tool.limits.key_limiter import KeyLimiter
from openapi_tool.limits.keys import PREFIX, Keys
from openapi_tool.limits.permits import LimitOptions, Need, Permit, Store
from openapi_tool.limits.record import REQUESTS, TOKENS, Rates
from openapi_tool.protocol.errors import ToolError
from openapi_tool.telemetry import metrics
from openapi_tool.tools.catalogue import OPERATIONS

_MAX_PROJECTS = 20


class Limiter:
    """Permits of all keys; the arguments are those of `Keys`, and the `weights` of projects, by default 1."""

    def __init__(
        self,
        name: str,
        options: LimitOptions,
        store: Store,
        clock: Callable[[], float],
        failure: Callable[[int], ToolError],
        weights: Mapping[str, float] = NO_WEIGHTS,
    ) -> None:
        self._weights = weights
        self.keys = Keys(name, store, clock, failure)
        self.keys.on_state_change = self._key_changed
        self._name = name
        self._options = options
        self._pools = options.pool_of
        self._store = store
        self._groups: dict[tuple[str, str], KeyGroup] = {}  # by variable in definitions, and endpoint
        self._limiters: dict[tuple[str, str], KeyLimiter] = {}
        for operation in OPERATIONS:
            metrics.RATE_LIMITED.labels(operation.name)  # 0 from the start, for alerts

    async def acquire(self, need: Need) -> Permit:
        """Wait for a permit (`Permits.acquire`)."""
        group = self._groups.get((need.variable, need.endpoint)) or self._open(need.variable, need.endpoint)
        if self.keys.blocked:
            await self._check_blocked(group)
        if group.pooled:
            return await self._acquire_from_pool(group, need)
        [limiter] = group.limiters
        return limiter.try_take(need) or await limiter.wait(need)

    async def _check_blocked(self, group: KeyGroup) -> None:
        """Let the call try a blocked key if that is due. Raises the error of a key if none is usable."""
        blocked = [limiter for limiter in group.limiters if limiter.variable in self.keys.blocked]
        for limiter in blocked:
            if await self.keys.claim_trial(limiter.variable):
                limiter.trial = True
        if blocked and not group.usable():
            # `claim_trial` awaits, so some keys may no longer be blocked; one is, as none is usable.
            raise self.keys.error(
                next(limiter.variable for limiter in blocked if limiter.variable in self.keys.blocked)
            )

    async def _acquire_from_pool(self, group: KeyGroup, need: Need) -> Permit:
        serving = group.usable() or group.limiters
        fresh = [limiter for limiter in serving if limiter.variable not in need.refused_by] or serving
        ready = [limiter for limiter in fresh if not limiter.paused_s] or fresh
        for limiter in group.by_load(ready):
            if permit := limiter.try_take(need):
                group.count_request(limiter)
                return permit
        return await ready[0].wait(need)  # any of them: the keys of a pool share one queue

    def on_change(self, name: str, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        if name.startswith(PREFIX):
            self.keys.on_change(name, revision, value)
            return
        for limiter in self._limiters.values():
            if limiter.record_name == name:
                limiter.on_change(revision, value)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the state of each key and endpoint with a limit."""
        return [self._snapshot(limiter) for limiter in self._limiters.values() if limiter.allowance.limited]

    def _snapshot(self, limiter: KeyLimiter) -> dict[str, Any]:
        allowance, waiting, now = limiter.allowance, limiter.counted_queue, limiter.keys.now()
        rates, record = allowance.in_force(now), allowance.record
        return {
            "variable": limiter.variable,
            "endpoint": limiter.endpoint,
            "requests_per_minute": rates.requests,
            "tokens_per_minute": rates.tokens,
            "concurrent": rates.concurrent,
            "found_by_429": allowance.rates.requests is None and rates.requests is not None,
            "used": record.counted(REQUESTS, now),
            "used_tokens": record.counted(TOKENS, now),
            "paused_s": round(allowance.paused_s(now), 1),
            "at_hand": allowance.at_hand[REQUESTS],
            "sent": allowance.sent_in_window(now),
            "running": allowance.running,
            "offline": bool(allowance.fallback_replicas),
            "waiting": len(waiting),
            "waiting_by_project": dict(Counter(waiting.by_project()).most_common(_MAX_PROJECTS)),
            "refused": limiter.calls_refused,
            "pool": self._options.pool_name(limiter.variable),
            "not_set": limiter.group.pooled and self.keys.get(limiter.variable) is None,
        }

    async def aclose(self) -> None:
        """Give back unused permits and stop."""
        await asyncio.gather(*(limiter.aclose() for limiter in self._limiters.values()), self.keys.aclose())

    def _key_changed(self, variable: str) -> None:
        """Serve the calls that wait for a key, or fail them."""
        for limiter in self._limiters.values():
            if limiter.variable == variable:
                limiter.trial = False
                limiter.group.wake()

    def _open(self, variable: str, endpoint: str) -> KeyGroup:
        members = self._pools.get(variable.upper(), (variable,))
        existing = self._limiters.get((members[0], endpoint))
        group = self._groups[variable, endpoint] = (
            existing.group if existing else KeyGroup(self._weights, pooled=len(members) > 1)
        )
        if existing is None:
            [operation] = (operation for operation in OPERATIONS if operation.name == endpoint)
            for member in members:
                rates = _rates(self._options, member, operation.limits)
                allowance = LimitAllowance(self._name, rates, operation.min_tokens)
                limiter = KeyLimiter(member, endpoint, allowance, self._store, self.keys, group)
                self._limiters[member, endpoint] = limiter
            _weigh(group.limiters)
        return group


def _weigh(limiters: list[KeyLimiter]) -> None:
    """Weight the keys of a pool by their limits if all have one of the same kind."""
    for name in ("requests", "tokens", "concurrent"):
        limits = [getattr(limiter.allowance.rates, name) for limiter in limiters]
        if all(limits):
            for limiter, limit in zip(limiters, limits, strict=True):
                limiter.weight = float(limit)
            return


def _rates(options: LimitOptions, variable: str, prefix: str) -> Rates:
    limits = options.of(variable)
    names = ("requests_per_minute", "tokens_per_minute", "concurrent")
    return Rates(*(getattr(limits, f"{prefix}_{name}") for name in names))
