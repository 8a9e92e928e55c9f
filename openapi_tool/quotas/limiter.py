"""Rate limiter of this process: permits of all keys and endpoints."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from openapi_tool.fair_queue import NO_WEIGHTS, FairQueue
from openapi_tool.protocol.errors import ToolError
from openapi_tool.quotas.key_group import KeyGroup, WaitingCall
from openapi_tool.quotas.key_limit import KeyLimit
from openapi_tool.quotas.keys import PREFIX, Keys, KeyUse
from openapi_tool.quotas.limit_record import Rates
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.quotas.permits import Permit, PermitRequest
from openapi_tool.state.port import ALL_RECORDS, Records, Stored
from openapi_tool.telemetry import metrics
from openapi_tool.tools.catalogue import OPERATIONS, Operation

_MAX_PROJECTS = 20
_MAX_CONFIGURED = 50  # keys with limits of their own, in statistics
_PATIENCE = 1.5  # times the longest expected wait, for which a call really waits: the expectation is a lower bound
_PAUSE_AFTER_S = 0.02  # of waiting: a permit that is free comes sooner, so the call keeps its slot


class Limiter:
    """Permits of all keys. `replica` is the name of this process; `weights` are those of projects, by default 1.

    `clock` returns the NATS server's time in seconds since the epoch. `failure` returns the error of a call whose key
    is refused, from the upstream's five-digit status.
    """

    def __init__(
        self,
        replica: str,
        options: LimitOptions,
        store: Records,
        clock: Callable[[], float],
        failure: Callable[[int], ToolError],
        weights: Mapping[str, float] = NO_WEIGHTS,
    ) -> None:
        self._weights = weights
        self.keys = Keys(replica, store, clock, failure)
        self.keys.on_state_change = self._key_changed
        self._options = options
        self._pools = options.pool_of
        self._store = store
        self._groups: dict[tuple[str, str], KeyGroup] = {}  # by variable in definitions, and endpoint
        self._limits: dict[tuple[str, str], KeyLimit] = {}
        for operation in OPERATIONS:
            metrics.RATE_LIMITED.labels(operation.name)  # 0 from the start, for alerts

    def max_wait_share(self) -> float:
        """Return the part of its remaining time for which a call may wait."""
        return self._options.max_wait_share

    def apply_options(self, options: LimitOptions) -> None:
        """Apply other limits from now on; `pools` stay as they are until a restart."""
        self._options = replace(options, pools=self._options.pools)
        for limit in self._limits.values():
            limit.apply_rates(self._rates(limit.variable, limit.endpoint), dry_run=options.dry_run)
        for group in self._groups.values():
            group.weigh()
            group.wake()

    async def acquire(self, wanted: PermitRequest) -> Permit:
        """Wait for a permit (`Permits.acquire`)."""
        group = self._groups.get((wanted.variable, wanted.endpoint)) or self._open(wanted.variable, wanted.endpoint)
        if self.keys.blocked:
            await self._check_blocked(group)
        usable = group.usable() or group.limits
        unrefused = [limit for limit in usable if limit.variable not in wanted.refused_by] or usable
        unpaused = [limit for limit in unrefused if not limit.paused_s] or unrefused
        ordered = group.by_load(unpaused) if group.pooled else unpaused
        for limit in ordered:
            if not limit.limited:
                group.count_request(limit)
                return limit.send_unlimited(wanted)
        return await self._wait(group, ordered, wanted)

    async def _wait(self, group: KeyGroup, ordered: list[KeyLimit], wanted: PermitRequest) -> Permit:
        """Wait for a permit of any key of the group. Raises RateLimited, and the error of a key blocked meanwhile."""
        project = wanted.agent.project
        left_s = wanted.deadline.remaining()
        first = next((limit for limit in ordered if limit.seems_free()), ordered[0]) if group.pooled else ordered[0]
        group.note_asking(project, first.now())
        number = 1 + sum(1 for _ in group.waiting.of(project))
        wait_s = group.wait_s(first.place_of(project, number, newest=True))
        max_wait_s = left_s * self._options.max_wait_share
        if wait_s > max_wait_s and not first.dry_run:
            raise first.rate_limited(wait_s)
        # `min_request_s` is measured, and even the fastest request so far may have been slow: so at least half.
        patience_s = min(max_wait_s * _PATIENCE, max(left_s - first.min_request_s, left_s / 2))
        now = first.now()
        since = round(now, 3)  # whole milliseconds: see WaitingCall
        future: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        waiter = WaitingCall(wanted, since, now + patience_s, future, first if group.pooled else None)
        group.waiting.add(*wanted.agent, waiter)
        first.wake()
        received = False
        try:
            await asyncio.wait([future], timeout=min(_PAUSE_AFTER_S, patience_s))
            permit = future.result() if future.done() else await self._paused(future, wanted, patience_s)
            received = True
        except TimeoutError:
            place = 1 + sum(1 for _ in group.waiting.of(project))
            raise first.rate_limited(group.wait_s(first.place_of(project, place))) from None
        finally:
            group.discard(waiter)
            if not received and future.done() and not future.cancelled() and future.exception() is None:
                future.result().unsent()  # granted in the moment in which the call was cancelled
            future.cancel()
        return permit

    @staticmethod
    async def _paused(future: asyncio.Future[Permit], wanted: PermitRequest, patience_s: float) -> Permit:
        wanted.slot.pause()
        try:
            async with asyncio.timeout(patience_s):
                return await future
        finally:
            wanted.slot.resume()

    async def _check_blocked(self, group: KeyGroup) -> None:
        """Let the call try a blocked key if that is due. Raises the error of a key if none is usable."""
        blocked = [limit for limit in group.limits if limit.key_use in self.keys.blocked]
        for limit in blocked:
            if await self.keys.claim_trial(limit.key_use):
                limit.trial = True
        if blocked and not group.usable():
            # `claim_trial` awaits, so some keys may no longer be blocked; one is, as none is usable.
            raise self.keys.error(next(limit.key_use for limit in blocked if limit.key_use in self.keys.blocked))

    def on_change(self, name: str, stored: Stored) -> None:
        """Adopt a record that another replica wrote, or that all were deleted."""
        if name.startswith(PREFIX):
            self.keys.on_change(name, stored)
            return
        for limit in self._limits.values():
            if name == ALL_RECORDS:
                limit.forget()
            if limit.record_name == name and limit.on_change(stored) and limit.limited:
                limit.wake()

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the state of each key and endpoint with a limit."""
        return [self._snapshot(limit) for limit in self._limits.values() if limit.limited]

    def configured(self) -> list[dict[str, Any]]:
        """Return the limits of the settings by endpoint; `variable` None is each key that has no limits of its own."""
        found = []
        for variable in islice((None, *self._options.keys), _MAX_CONFIGURED):
            for operation in OPERATIONS:
                rates = self._rates(variable or "", operation.name)
                if rates.limited:
                    found.append(
                        {
                            "variable": variable,
                            "endpoint": operation.name,
                            **_shown(rates),
                            "dry_run": self._options.dry_run,
                        }
                    )
        return found

    def _snapshot(self, limit: KeyLimit) -> dict[str, Any]:
        rates = limit.in_force
        record = limit.record
        waiting = limit.counted_queue
        now = limit.now()
        return {
            "variable": limit.variable,
            "endpoint": limit.endpoint,
            **_shown(rates),
            "found_by_429": limit.rates.requests is None and rates.requests is not None,
            "dry_run": limit.dry_run,
            "used": record.requests.total(now),
            "used_tokens": record.tokens.total(now),
            "estimated_tokens": None if rates.tokens is None else limit.tokens_each,
            "paused_s": round(limit.paused_s, 1),
            "sent": limit.sent_in_window(),
            "running": limit.running,
            "offline": bool(limit.outage),
            "waiting": len(waiting),
            "waiting_by_project": dict(Counter(waiting.counts()).most_common(_MAX_PROJECTS)),
            "refused": limit.calls_refused,
            "would_have_waited": limit.would_have_waited,
            "pool": self._options.pool_name(limit.variable),
            "not_set": limit.group.pooled and self.keys.get(limit.variable) is None,
        }

    async def aclose(self) -> None:
        """Store what is known, and stop."""
        await asyncio.gather(*(limit.aclose() for limit in self._limits.values()), self.keys.aclose())

    def _key_changed(self, use: KeyUse) -> None:
        """Serve the calls that wait for a key, or fail them."""
        if (limit := self._limits.get(use)) is not None:
            limit.trial = False
            limit.group.wake()

    def _rates(self, variable: str, endpoint: str) -> Rates:
        limits = self._options.of(variable)
        prefix = _operation(endpoint).limits
        names = ("requests_per_minute", "tokens_per_minute", "concurrent")
        return Rates(*(getattr(limits, f"{prefix}_{name}") for name in names))

    def _open(self, variable: str, endpoint: str) -> KeyGroup:
        members = self._pools.get(variable.upper(), (variable,))
        existing = self._limits.get((members[0], endpoint))
        group = existing.group if existing else KeyGroup(FairQueue(self._weights), pooled=len(members) > 1)
        self._groups[variable, endpoint] = group
        if existing is None:
            for member in members:
                limit = KeyLimit(
                    member,
                    endpoint,
                    self._rates(member, endpoint),
                    _operation(endpoint).min_tokens,
                    self._store,
                    self.keys,
                    group,
                    dry_run=self._options.dry_run,
                )
                self._limits[member, endpoint] = limit
                limit.wake()  # reads the record, in which a 429 may have taught a limit
            group.weigh()
        return group


def _shown(rates: Rates) -> dict[str, int | None]:
    return {
        "requests_per_minute": rates.requests,
        "tokens_per_minute": rates.tokens,
        "concurrent": rates.concurrent,
    }


def _operation(endpoint: str) -> Operation:
    return next(operation for operation in OPERATIONS if operation.name == endpoint)
