"""Rate limiter of one key and endpoint."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from contextlib import suppress
from http import HTTPStatus

from pydantic import SecretStr

from openapi_tool.concurrency.background import in_background
from openapi_tool.limits.allowance import (
    OPEN_REPORT_S,
    REFILL_AT_ONCE_BELOW,
    REFILL_BELOW,
    REFILL_PAUSE_S,
    REPORT_INTERVAL_S,
    LimitAllowance,
    LimitUpdate,
)
from openapi_tool.limits.fair_queue import FairQueue, KeyGroup, KeyPermit, OpenRequests, WaitingCall
from openapi_tool.limits.keys import STATES, Keys
from openapi_tool.limits.ledger import Use, lower_adaptive
from openapi_tool.limits.permits import MAX_WRITE_ATTEMPTS, Need, Permit, Store
from openapi_tool.limits.record import BLOCK_S, MAX_PAUSE_S, REQUESTS, LimitRecord, decode, encode, parse
from openapi_tool.protocol.errors import RateLimited, ToolError, Unavailable
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_MIN_WRITE_INTERVAL_S = 0.5  # of one replica, while the record has no free permits
_MAX_WRITES_PER_S = 4.0  # of all replicas together, likewise
_SPACING_FACTORS = 0.75, 1.25  # random, of the time between writes

_POLL_S = 0.25  # between steps while calls wait
_RETRY_S, _RETRY_WITHOUT_LIMIT_S = 1.0, 60.0  # after an outage of the store, with and without a limit
_ROUNDING_S = 1e-6
_INITIAL_REQUEST_S = 1.0  # duration of a request before any has ended
_MAX_DURATIONS = 16
"""Number of durations stored. A call gives up its wait when less time is left than the shortest of them."""


class KeyLimiter:
    """Limiter with a task that takes blocks of permits from the shared record, and grants them to calls.

    `group` has the keys of its pool, or this key alone. In a pool `load` is its requests divided by `weight`. While
    `trial` is set (`Limiter`), one call may try a blocked key.
    """

    def __init__(
        self, variable: str, endpoint: str, allowance: LimitAllowance, store: Store, keys: Keys, group: KeyGroup
    ) -> None:
        self.variable, self.endpoint = variable, endpoint
        self._log_fields = {"variable": variable, "endpoint": endpoint}
        self.record_name = f"limit.{variable.upper()}.{endpoint}"
        self.allowance = allowance
        self.group, self.waiting, self.keys = group, group.waiting, keys
        self.weight, self.load = 1.0, 0.0
        self.trial = False
        self.calls_refused = 0
        self._store = store
        self._now = keys.now  # the NATS server's clock, as replicas share the times in the record
        self._wake = asyncio.Event()
        self.wake = self._wake.set
        self._task = in_background(self._run(), f"limits of {variable}")
        self._stored: tuple[int, bytes | None] = 0, None  # revision and value
        self._must_read = True
        self._unconfirmed: LimitUpdate | None = None  # of unknown outcome
        self._next_write_at = self._next_refill_at = 0.0
        self._written_at = -REPORT_INTERVAL_S
        self._unwritten_pause = self._logged_pause = 0.0  # ends of the pauses to be written, and last logged
        self._open_requests = OpenRequests(self.allowance, keys.now)
        self._durations: deque[float] = deque(maxlen=_MAX_DURATIONS)
        group.limiters.append(self)
        labels = (variable, endpoint)
        metrics.LIMIT_USED.set_function(lambda: allowance.record.counted(REQUESTS, self._now()), *labels)
        metrics.LIMIT_WAITING.set_function(lambda: len(self.counted_queue), *labels)
        metrics.LIMIT_PAUSED.set_function(lambda: self.paused_s, *labels)
        metrics.LIMIT_NOT_SHARED.set_function(lambda: bool(allowance.fallback_replicas), *labels)

    @property
    def usable(self) -> bool:
        """Return whether calls may use the key."""
        if self.variable in self.keys.blocked:
            return self.trial
        return not self.group.pooled or self.keys.get(self.variable) is not None

    @property
    def paused_s(self) -> float:
        """Seconds until a pause after a 429 ends."""
        return self.allowance.paused_s(self._now())

    @property
    def min_request_s(self) -> float:
        """Shortest duration of a recent request in seconds."""
        return min(self._durations, default=_INITIAL_REQUEST_S)

    def try_take(self, need: Need) -> Permit | None:
        """Return a permit if one is at hand and no call waits."""
        allowance, now = self.allowance, self._now()
        if not allowance.limited:
            allowance.record_sent(now)
            return KeyPermit(self, None, need)
        project = need.flow[0]
        self._open_requests.asked(project)
        use = None if self.waiting or not self._open_requests.may_open(project) else allowance.take(now)
        if use is None:
            return None
        self._open_requests.opened(project)
        if allowance.is_low(now, REFILL_BELOW):
            self.wake()
        return KeyPermit(self, use, need)

    async def wait(self, need: Need) -> Permit:
        """Wait for a permit of any key of the pool. Raises RateLimited, and the error of a key blocked meanwhile."""
        now, left_s = self._now(), need.deadline.remaining()
        patience_s = max(left_s - self.min_request_s, left_s / 2)  # at least half: the shortest one may have been slow
        future: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        waiter = WaitingCall(need, now + patience_s, future)
        self.waiting.add(waiter, now)
        self.group.wake()
        need.slot.pause()
        received = False
        try:
            async with asyncio.timeout(patience_s):
                permit = await future
            received = True
        except TimeoutError:
            raise self._rate_limited(max(1.0, self.group.forecast(self._now())(len(self.waiting)))) from None
        finally:
            self.waiting.discard(waiter)
            need.slot.resume()
            if not received and future.done() and not future.cancelled() and future.exception() is None:
                future.result().cancelled()  # settles a permit that was granted while the call was cancelled
        return permit

    def record_upstream_refusal(self, error: ToolError, need: Need, key: SecretStr) -> None:
        """Pause the key after a 429, or count its refusal; other replicas get it by the next write."""
        error.key_variable = self.variable
        if error.http_status == HTTPStatus.TOO_MANY_REQUESTS:
            self._unwritten_pause = self.allowance.pause(error.retry_after, self._now())
            self.wake()
        elif error.upstream_status is not None and error.upstream_status in STATES:
            self.keys.record_refusal(self.variable, key, error.upstream_status, need.call)
        else:
            return
        need.refused_by |= {self.variable}
        if any(limiter.variable not in need.refused_by and not limiter.paused_s for limiter in self.group.usable()):
            others = len(self.group.limiters) - 1  # a retry with each: the next one may be refused, too
            error.max_retries, error.retry_after = max(others, error.max_retries), 0.0

    def end_request(self, use: Use | None, tokens: int | None, project: str) -> None:
        """Settle a request; `tokens` is its cost, None if unknown."""
        if use is None:
            return
        self._open_requests.ended(project)
        allowance, now = self.allowance, self._now()
        allowance.settle(use, tokens)
        if tokens is not None:
            self._durations.append(now - use.at)
            self.waiting.charge(project, allowance.requests_above_estimate(use, tokens), now)
        if self.waiting:
            self.group.wake()
        elif allowance.has_surplus(now):
            self.wake()

    def on_change(self, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        if revision > self._stored[0] and (record := parse(value)) is not None:
            self._stored = revision, value
            self.allowance.adopt(record, revision, self._now())
            if self.waiting or self.allowance.limited:
                self.wake()

    async def aclose(self) -> None:
        """Give back unused permits and stop."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self.allowance.limited and not self._must_read:
            with suppress(Unavailable):
                await self._report(leave=True)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._step()
            except Unavailable as outage:
                self._use_fallback_share(str(outage))
            except Exception:  # a defect; if this task ended, every call with the key would wait until its deadline
                log.exception("internal error in a rate limit", extra={"action": "limits.broken", **self._log_fields})
                self._stored, self._must_read = (0, None), True
            with suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s()):
                    await self._wake.wait()

    async def _step(self) -> None:
        if self._must_read:
            await self._read()
        if self._unwritten_pause:
            await self._write_pause()
        self._grant()
        if self._is_due(self._now()):
            await self._report()
            self._grant()
        self._refuse_certain_timeouts()

    def _idle_s(self) -> float | None:
        """Return the seconds until the next step; None: until an event."""
        if self._must_read or self._unconfirmed is not None or self._unwritten_pause:
            return _RETRY_S if self.allowance.limited else _RETRY_WITHOUT_LIMIT_S
        if not self.allowance.limited:
            return None
        if self.waiting or self.allowance.is_low(self._now(), REFILL_BELOW):
            return _POLL_S
        if self.allowance.running and self.allowance.rates.concurrent is not None:
            return OPEN_REPORT_S
        return min(BLOCK_S, max(_POLL_S, self._written_at + REPORT_INTERVAL_S - self._now()))

    def _is_due(self, now: float) -> bool:
        allowance = self.allowance
        if not allowance.limited:
            return False
        waiting = self.group.share_of_waiting(self)
        if allowance.is_due(waiting, now - self._written_at, now):
            return True
        fraction = REFILL_BELOW if now >= self._next_refill_at else REFILL_AT_ONCE_BELOW
        wanted = waiting > 0 or allowance.is_low(now, fraction)
        return wanted and now >= self._next_write_at and allowance.forecast_free(now)(1) <= _ROUNDING_S

    def _grant(self) -> None:
        now = self._now()
        while self.usable and (project := self.waiting.next_project(self._open_requests.may_open)) is not None:
            if (use := self.allowance.take(now)) is None:
                return
            waiter = self.waiting.pop(project)
            if waiter.permit.done():
                self.allowance.settle(use, None)
            else:
                self._open_requests.opened(project)
                if self.group.pooled:
                    self.group.count_request(self)
                waiter.permit.set_result(KeyPermit(self, use, waiter.need))

    def _refuse_certain_timeouts(self) -> None:
        if not self.waiting:
            return
        if self.variable in self.keys.blocked and not self.group.usable():
            self.group.fail(self.keys.error(self.variable))
        for waiter, retry_after_s in self.group.certain_timeouts(self._now()):
            self.waiting.discard(waiter)
            if not waiter.permit.done():
                waiter.permit.set_exception(self._rate_limited(retry_after_s))

    def _rate_limited(self, retry_after_s: float) -> RateLimited:
        self.calls_refused, seconds = self.calls_refused + 1, math.ceil(min(retry_after_s, MAX_PAUSE_S))
        self.allowance.refused = True  # the next report says so, and may raise an adaptive limit
        metrics.RATE_LIMITED.labels(self.endpoint).inc()
        return RateLimited(
            f"The rate limit of this service is used up. Call again in {seconds} s.",
            detail={"retry_after_s": seconds},
            retry_after=float(seconds),
        )

    async def _read(self) -> bool:
        """Read the record; return whether it contains the change whose write had an unknown outcome."""
        allowance = self.allowance
        revision, value = await self._store.read(self.record_name)
        if parse(value) is None:
            value = self._stored[1]  # the bucket was deleted, or the record damaged: what was sent still counts
        self._stored, self._must_read = (revision, value), False
        allowance.revision = min(allowance.revision, revision)  # a new bucket counts from 1 again
        allowance.adopt(decode(value), revision, self._now())
        unconfirmed, self._unconfirmed = self._unconfirmed, None
        if unconfirmed is None or not allowance.is_written(unconfirmed, value):
            return False
        allowance.confirm(unconfirmed, revision)
        return True

    async def _write(self, record: LimitRecord) -> int | None:
        """Write the record by compare-and-set; return its revision, None after a conflict."""
        value = encode(record)
        written = await self._store.write(self.record_name, value, self._stored[0])
        if written is not None:
            self._stored = written, value
        return written

    async def _report(self, *, leave: bool = False) -> None:
        """Report uses and take a block, by compare-and-set."""
        allowance = self.allowance
        if self._unconfirmed is not None:
            await self._read()
        for _ in range(MAX_WRITE_ATTEMPTS):
            now = self._now()
            planned = allowance.plan(self._stored[1], self.group.share_of_waiting(self), now, leave=leave)
            self._unconfirmed = planned
            if (written := await self._write(planned.record)) is not None:
                self._unconfirmed = None
                self._adopt_written(planned, written, now)
                return
            if await self._read():
                return

    def _adopt_written(self, planned: LimitUpdate, revision: int, now: float) -> None:
        allowance = self.allowance
        if allowance.fallback_replicas:
            log.info("limits are shared again", extra={"action": "limits.shared", **self._log_fields})
        allowance.confirm(planned, revision)
        self._written_at = now
        self._next_refill_at = now + random.uniform(*REFILL_PAUSE_S)  # noqa: S311
        spacing_s = max(
            _MIN_WRITE_INTERVAL_S, (1 + len(planned.record.others(now, allowance.name))) / _MAX_WRITES_PER_S
        )
        self._next_write_at = now + spacing_s * random.uniform(*_SPACING_FACTORS) if planned.mine.want else now  # noqa: S311

    async def _write_pause(self) -> None:
        """Share a pause; until that succeeds, this replica pauses alone."""
        until, self._unwritten_pause = self._unwritten_pause, 0.0
        if until - self._logged_pause >= _POLL_S:
            self._logged_pause = until
            configured = self.allowance.rates.requests is not None
            log.warning(
                "the upstream answered 429: %s requests with the key of %s wait for %.1f s%s",
                self.endpoint,
                self.variable,
                self.paused_s,
                "" if configured else "; no limit is configured, so one is found by trial for an hour",
                extra={"action": "limits.paused", "pause_s": round(self.paused_s, 3), **self._log_fields},
            )
        try:
            await self._share_pause(until)
        except Unavailable:
            self._unwritten_pause = max(self._unwritten_pause, until)
            raise

    async def _share_pause(self, until: float) -> None:
        for _ in range(MAX_WRITE_ATTEMPTS):
            record, now = decode(self._stored[1]), self._now()
            paused_before, limit_before = record.paused_until, record.adaptive and record.adaptive.limit
            record.paused_until = max(record.paused_until, until)
            if self.allowance.rates.requests is None:
                lower_adaptive(record, now)
            limit = record.adaptive and record.adaptive.limit
            if record.paused_until - paused_before < _POLL_S and limit == limit_before:
                return  # another replica has written it
            if (written := await self._write(record)) is not None:
                self.allowance.adopt(record, written, now)
                return
            await self._read()

    def _use_fallback_share(self, reason: str) -> None:
        allowance = self.allowance
        if allowance.limited and not allowance.fallback_replicas:
            allowance.use_fallback()
            log.warning(
                "cannot share the limit of %s requests with the key of %s: %s; this replica uses 1/%s of it",
                self.endpoint,
                self.variable,
                reason,
                allowance.fallback_replicas,
                extra={"action": "limits.not_shared", "replicas": allowance.fallback_replicas, **self._log_fields},
            )
        self._grant()
        self._refuse_certain_timeouts()

    @property
    def counted_queue(self) -> FairQueue:
        """Waiting calls; those of a pool are reported for its first key only."""
        return self.waiting if self is self.group.limiters[0] else FairQueue()
