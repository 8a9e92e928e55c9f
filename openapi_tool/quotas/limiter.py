"""Rate limiter of this process: permits of all keys and endpoints.

A call asks `Limiter.acquire` for a permit before each request. Each key and endpoint has a `KeyLimit`, which counts
requests and grants permits. The limits of the keys of a pool share a `KeyGroup`, in which calls wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openapi_tool.fair_queue import NO_WEIGHTS, FairQueue
from openapi_tool.protocol.errors import ToolError
from openapi_tool.quotas.key_group import KeyGroup, WaitingCall
from openapi_tool.quotas.key_limit import KeyLimit
from openapi_tool.quotas.key_record import PREFIX, KeyUse
from openapi_tool.quotas.keys import Keys
from openapi_tool.quotas.limit_statistics import configured_limits, state_of
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.quotas.permits import Permit, PermitRequest
from openapi_tool.quotas.rates import operation_of, rates_of
from openapi_tool.state.port import ALL_RECORDS, Records, Stored
from openapi_tool.telemetry import metrics
from openapi_tool.tools.operations import OPERATIONS

# A call is refused at once if its expected wait is longer than `max_wait_share` allows. The expected wait is a lower
# bound: so a call that is not refused waits for up to 1.5 times as long as that share.
_PATIENCE = 1.5
_PAUSE_AFTER_S = 0.02  # of waiting, a call gives up its slot; a permit that is free comes sooner


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
        self._groups: dict[tuple[str, str], KeyGroup] = {}  # by variable in definitions, or pool, and endpoint
        self._limits: dict[tuple[str, str], KeyLimit] = {}  # by variable of the key, and endpoint
        for operation in OPERATIONS:
            metrics.RATE_LIMITED.labels(operation.name)  # 0 from the start, for alerts

    def max_wait_share(self) -> float:
        """Return the part of its remaining time for which a call may wait."""
        return self._options.max_wait_share

    def apply_options(self, options: LimitOptions) -> None:
        """Apply other limits from now on; `pools` stay as they are until a restart."""
        self._options = replace(options, pools=self._options.pools)
        for limit in self._limits.values():
            limit.apply_rates(rates_of(self._options, limit.variable, limit.endpoint), dry_run=options.dry_run)
        for group in self._groups.values():
            group.weigh()
            group.wake()

    async def acquire(self, wanted: PermitRequest) -> Permit:
        """Wait for a permit (`Permits.acquire`)."""
        group = self._groups.get((wanted.variable, wanted.endpoint))
        if group is None:
            group = self._open_group(wanted.variable, wanted.endpoint)
        if self.keys.blocked:
            await self._check_blocked(group)
        limits = self._limits_to_ask(group, wanted)
        for limit in limits:
            if not limit.limited:
                group.count_request(limit)
                return limit.send_unlimited(wanted)
        return await self._wait(group, limits, wanted)

    def _open_group(self, variable: str, endpoint: str) -> KeyGroup:
        """Return the keys that a variable of definitions, or a pool, stands for, and keep them under that name."""
        variables = self._pools.get(variable.upper(), (variable,))
        existing = self._limits.get((variables[0], endpoint))  # opened by another name of the same pool
        group = self._new_group(variables, endpoint) if existing is None else existing.group
        self._groups[variable, endpoint] = group
        return group

    def _new_group(self, variables: Sequence[str], endpoint: str) -> KeyGroup:
        group = KeyGroup(FairQueue(self._weights), pooled=len(variables) > 1)
        for variable in variables:
            limit = KeyLimit(
                variable,
                endpoint,
                rates_of(self._options, variable, endpoint),
                operation_of(endpoint).min_tokens,
                self._store,
                self.keys,
                group,
                dry_run=self._options.dry_run,
            )
            self._limits[variable, endpoint] = limit
            limit.wake()  # reads the record: a 429 may have taught a limit, at another replica or before a restart
        group.weigh()
        return group

    async def _check_blocked(self, group: KeyGroup) -> None:
        """Let the call try a blocked key if that is due. Raises the error of a key if none is usable."""
        blocked = [limit for limit in group.limits if limit.key_use in self.keys.blocked]
        for limit in blocked:
            if await self.keys.claim_trial(limit.key_use):
                limit.trial = True
        if blocked and not group.usable():
            # `claim_trial` awaits, so some of them may no longer be blocked. At least one is, as none is usable.
            still_blocked = next(limit for limit in blocked if limit.key_use in self.keys.blocked)
            raise self.keys.error(still_blocked.key_use)

    @staticmethod
    def _limits_to_ask(group: KeyGroup, wanted: PermitRequest) -> list[KeyLimit]:
        """Return the limits of the keys to ask for a permit, best first.

        These are the usable keys; of them, the ones that have not refused the request; of them, the ones that are not
        paused after a 429. A condition that no key meets does not count: then the request waits, or fails.
        """
        usable = group.usable() or group.limits
        unrefused = [limit for limit in usable if limit.variable not in wanted.refused_by] or usable
        unpaused = [limit for limit in unrefused if not limit.paused_s] or unrefused
        return group.by_load(unpaused) if group.pooled else unpaused

    async def _wait(self, group: KeyGroup, limits: list[KeyLimit], wanted: PermitRequest) -> Permit:
        """Wait for a permit of any key of the group; `limits` are those to ask, best first.

        Raises RateLimited, and the error of a key that was blocked meanwhile.
        """
        first = limits[0]
        if group.pooled:
            first = next((limit for limit in limits if limit.seems_free()), first)
        group.note_asking(wanted.agent.project, first.now())
        patience_s = self._patience_s(group, first, wanted)
        now = first.now()
        call = WaitingCall(
            wanted,
            since=round(now, 3),
            latest=now + patience_s,
            permit=asyncio.get_running_loop().create_future(),
            preferred=first if group.pooled else None,
        )
        group.waiting.add(*wanted.agent, call)
        first.wake()
        has_permit = False
        try:
            permit = await self._permit_of(call, patience_s)
            has_permit = True
        except TimeoutError:
            raise first.rate_limited(self._expected_wait_s(group, first, wanted, newest=False)) from None
        finally:
            group.discard(call)
            if not has_permit:
                _give_back(call.permit)
            call.permit.cancel()
        return permit

    def _patience_s(self, group: KeyGroup, first: KeyLimit, wanted: PermitRequest) -> float:
        """Return the seconds for which a call waits for a permit. Raises RateLimited if it would wait too long."""
        left_s = wanted.deadline.remaining()
        max_wait_s = left_s * self._options.max_wait_share
        wait_s = self._expected_wait_s(group, first, wanted, newest=True)
        if wait_s > max_wait_s and not first.dry_run:
            raise first.rate_limited(wait_s)
        # Time must be left for the request itself. As even the fastest request so far may have been a slow one, half of
        # the time may be used for the wait in any case.
        longest_s = max(left_s - first.min_request_s, left_s / 2)
        return min(max_wait_s * _PATIENCE, longest_s)

    @staticmethod
    def _expected_wait_s(group: KeyGroup, first: KeyLimit, wanted: PermitRequest, *, newest: bool) -> float:
        """Return a lower bound of the seconds that one more call of the project waits; `newest` as in `place_of`."""
        project = wanted.agent.project
        number = 1 + group.waiting.count(project)
        return group.wait_s(first.place_of(project, number, newest=newest))

    @staticmethod
    async def _permit_of(call: WaitingCall, patience_s: float) -> Permit:
        """Wait for a permit; give up the slot of the call if that takes longer than a moment. Raises TimeoutError."""
        await asyncio.wait([call.permit], timeout=min(_PAUSE_AFTER_S, patience_s))
        if call.permit.done():
            return call.permit.result()
        slot = call.wanted.slot
        slot.pause()
        try:
            async with asyncio.timeout(patience_s):
                return await call.permit
        finally:
            slot.resume()

    def on_change(self, name: str, stored: Stored) -> None:
        """Adopt a record that another replica wrote; with the name ALL_RECORDS, all records were deleted."""
        if name.startswith(PREFIX):
            self.keys.on_change(name, stored)
            return
        for limit in self._limits.values():
            if name == ALL_RECORDS:
                limit.forget()
            elif limit.record_name == name and limit.on_change(stored) and limit.limited:
                limit.wake()

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the state of each key and endpoint with a limit, for statistics."""
        return [state_of(limit, self._options, self.keys) for limit in self._limits.values() if limit.limited]

    def configured(self) -> list[dict[str, Any]]:
        """Return the limits of the settings by key and endpoint, for statistics."""
        return configured_limits(self._options)

    async def aclose(self) -> None:
        """Store what is known, and stop."""
        await asyncio.gather(*(limit.aclose() for limit in self._limits.values()), self.keys.aclose())

    def _key_changed(self, use: KeyUse) -> None:
        """Serve the calls that wait for a key, or fail them: the key was unblocked or blocked."""
        if (limit := self._limits.get(use)) is not None:
            limit.trial = False
            limit.group.wake()


def _give_back(permit: asyncio.Future[Permit]) -> None:
    """Give back a permit that a call got in the moment in which it was cancelled, or its wait ended."""
    if permit.done() and not permit.cancelled() and permit.exception() is None:
        permit.result().unsent()
