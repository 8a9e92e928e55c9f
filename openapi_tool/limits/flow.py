"""Requests of one key to one endpoint: hands out permits, takes more from the shared record, holds calls in line."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from contextlib import suppress
from typing import Any

from pydantic import SecretStr

from openapi_tool.limits import ledger
from openapi_tool.limits.allowance import Allowance, Planned
from openapi_tool.limits.key_record import STATES
from openapi_tool.limits.keys import Keys
from openapi_tool.limits.ledger import BLOCK_S, Use
from openapi_tool.limits.line import Line, Waiter
from openapi_tool.limits.permits import Need, Permit
from openapi_tool.limits.queue import Given, Queue
from openapi_tool.limits.store import RACES, Store
from openapi_tool.protocol.errors import RateLimited, ToolError, Unavailable
from openapi_tool.shielding import in_background
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_SPACING_S, _CHANGES_PER_S = 0.5, 4.0
"""Least seconds between a replica's changes of a record whose permits are used up, and most changes by all a second."""

_IDLE_S = 20.0
"""Seconds between reports of a replica that sends nothing, which keep it among the replicas that share a limit."""

_LOOK_S = 0.25
_AFTER_OUTAGE_S, _AFTER_OUTAGE_UNLIMITED_S = 1.0, 60.0
_TOO_MANY_REQUESTS = 429
_OF_THE_KEY = (401, 402, _TOO_MANY_REQUESTS)
_MEAN_SHARE = 0.2  # weight of the newest request in the mean of tokens and duration
_ROUNDING_S = 1e-6
_REQUEST_S = 1.0  # mean duration before any request was seen
_LEAST_TOKENS = {"search": 10_000}
"""Least that the upstream charges (jina-api section 5); the estimate before any request was seen."""


class _Permit:
    __slots__ = ("_ended", "_flow", "_need", "_trial", "_use", "key")

    def __init__(self, flow: Flow, use: Use | None, need: Need, key: SecretStr, *, trial: bool) -> None:
        self._flow, self._use, self._need, self._trial, self._ended = flow, use, need, trial, False
        self.key = key

    def done(self, tokens: int) -> None:
        self._end(tokens)
        if self._trial:
            self._flow.keys.works(self._flow.variable)

    def failed(self, error: ToolError) -> None:
        self._end(error.tokens)
        if error.http_status in _OF_THE_KEY:
            self._flow.refused(error, self._need, self.key)

    def cancelled(self) -> None:
        self._end(None)

    def _end(self, tokens: int | None) -> None:
        if not self._ended:
            self._ended = True
            self._flow.ended(self._use, tokens)


class Flow:
    """Requests of one key to one endpoint: permits at hand, calls that wait, and the task that takes permits.

    `weight` is its part of a pool's load. While the key is marked, it serves one call only, if `trial` is set.
    """

    def __init__(
        self, variable: str, endpoint: str, allowance: Allowance, store: Store, keys: Keys, queue: Queue
    ) -> None:
        self.variable, self.endpoint = variable, endpoint
        self.allowance = allowance
        rates = allowance.rates
        self.allowance.tokens_each = _LEAST_TOKENS.get(endpoint, 1) if rates.tokens is not None else 0
        self.queue, self.line = queue, queue.line
        self.keys = keys
        self.weight, self.load = 1.0, 0.0
        self.trial = False
        self.refusals = 0
        self._store = store
        self._now = keys.now
        self._wake = asyncio.Event()
        self._task = in_background(self._run(), f"limits of {variable}")
        self._stored: tuple[int, bytes | None] | None = None
        self._unsure: Planned | None = None
        self._next_change = 0.0
        self._changed_at = -_IDLE_S
        self._refused: list[float | None] = []
        self._request_s = _REQUEST_S
        queue.flows.append(self)
        self._export()

    def _export(self) -> None:
        labels, allowance = (self.variable, self.endpoint), self.allowance
        metrics.LIMIT_USED.follow(lambda: allowance.record.counted(ledger.REQUESTS, self._now()), *labels)
        metrics.LIMIT_WAITING.follow(lambda: len(self.shown_line), *labels)
        metrics.LIMIT_PAUSED.follow(lambda: self.paused_s, *labels)

    @property
    def serves(self) -> bool:
        """Return whether calls may use the key."""
        if self.variable in self.keys.marks:
            return self.trial
        return not self.queue.pooled or self.keys.get(self.variable) is not None

    @property
    def paused_s(self) -> float:
        """Return the seconds until a pause after a 429 ends."""
        return self.allowance.paused_s(self._now())

    @property
    def record_name(self) -> str:
        """Key of the shared record."""
        return f"limit.{self.variable.upper()}.{self.endpoint}"

    def try_take(self, need: Need) -> Permit | None:
        """Return a permit if one is at hand and nobody waits for it."""
        allowance = self.allowance
        if not allowance.limited:
            allowance.note_sent(self._now())
            return self._permit(None, need)
        if self.line:
            return None
        now = self._now()
        use = allowance.take(now)
        if use is None:
            return None
        if allowance.is_low(now):
            self.wake()
        return self._permit(use, need)

    def _permit(self, use: Use | None, need: Need) -> Permit:
        return _Permit(self, use, need, self.key(need), trial=self._tries())

    def key(self, need: Need) -> SecretStr:
        """Return the key to send: the call's own, or that of a pool."""
        return (self.keys.get(self.variable) or need.key) if self.queue.pooled else need.key

    def _tries(self) -> bool:
        trial, self.trial = self.trial, False
        return trial

    async def wait(self, need: Need) -> Permit:
        """Wait in line for a permit of this key or of another one of its pool.

        Raises RateLimited, and the error of a key that is marked meanwhile.
        """
        now = self._now()
        future: asyncio.Future[Given] = asyncio.get_running_loop().create_future()
        waiter = Waiter(need.flow, now + need.deadline.remaining() - self._request_s, future)
        self.line.add(waiter, now)
        self.queue.wake()
        need.slot.park()
        given = None
        try:
            async with need.deadline.limit():
                given = flow, use, trial = await future
        except TimeoutError:
            raise self._too_late(self._request_s) from None
        finally:
            self.line.discard(waiter)
            need.slot.resume()
            if given is None and future.done() and not future.cancelled() and future.exception() is None:
                flow, use, _ = future.result()  # given at the moment in which the call was cancelled
                flow.ended(use, None)
        return _Permit(flow, use, need, flow.key(need), trial=trial)

    def wake(self) -> None:
        """Look at once whether permits can be given or taken."""
        self._wake.set()

    def refused(self, error: ToolError, need: Need, key: SecretStr) -> None:
        """Pause the key after a 429, or count its refusal: here at once, elsewhere as soon as the record is written."""
        error.key_variable = self.variable
        if error.http_status == _TOO_MANY_REQUESTS:
            ledger.pause(self.allowance.record, error.retry_after, self._now())
            self._refused.append(error.retry_after)
            self.wake()
        elif error.upstream_status is not None and error.upstream_status in STATES:
            self.keys.refused(self.variable, key, error.upstream_status, need.call)
        else:
            return
        need.refused_by |= {self.variable}
        if any(flow.variable not in need.refused_by and not flow.paused_s for flow in self.queue.serving()):
            error.repeats, error.retry_after = max(1, error.repeats), 0.0  # with another key of the pool

    def ended(self, use: Use | None, tokens: int | None) -> None:
        """End a request."""
        if use is None:
            return
        allowance = self.allowance
        allowance.settle(use, tokens)
        if tokens is not None:
            self._request_s += _MEAN_SHARE * (self._now() - use.at - self._request_s)
        if tokens and allowance.rates.tokens is not None:
            mean = allowance.tokens_each + _MEAN_SHARE * (tokens - allowance.tokens_each)
            allowance.tokens_each = max(_LEAST_TOKENS.get(self.endpoint, 1), round(mean))
        if self.line:
            self.queue.wake()

    def news(self, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        if self._stored is None or revision > self._stored[0]:
            self._stored = revision, value
            self.allowance.see(ledger.decode(value), revision)
            if self.line or self.allowance.limited:
                self.wake()

    async def aclose(self) -> None:
        """Give back unused permits and stop."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self.allowance.limited and self._stored is not None:
            with suppress(Unavailable):
                await self._change(leave=True)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
            except Unavailable as outage:
                self._go_alone(str(outage))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s()):
                    await self._wake.wait()

    async def _look(self) -> None:
        """Write what is due, and give permits to those who wait."""
        if self._stored is None:
            await self._read()
        if self._refused:
            await self._write_refusal()
        self._give()
        if self._is_due(self._now()):
            await self._change()
            self._give()
        self._refuse_hopeless()

    def _idle_s(self) -> float | None:
        """Return the seconds until the next look; None until something happens."""
        if self._stored is None or self._unsure is not None:
            return _AFTER_OUTAGE_S if self.allowance.limited else _AFTER_OUTAGE_UNLIMITED_S
        if not self.allowance.limited:
            return None
        now = self._now()
        if self.line or self.allowance.is_low(now):
            return _LOOK_S
        return min(BLOCK_S, max(_LOOK_S, self._changed_at + _IDLE_S - now))

    def _is_due(self, now: float) -> bool:
        allowance = self.allowance
        if not allowance.limited:
            return False
        if allowance.alone or allowance.holds_unused(now) or now - self._changed_at >= _IDLE_S:
            return True
        wanted = bool(self._waiting()) or (allowance.is_low(now) and allowance.demand > 0)
        return wanted and now >= self._next_change and allowance.free_in_s(now) <= _ROUNDING_S

    def _give(self) -> None:
        """Give permits at hand to the calls in line."""
        now = self._now()
        while self.line and self.serves and (use := self.allowance.take(now)) is not None:
            future = self.line.pop().item
            if future.done():
                self.allowance.settle(use, None)
            else:
                if self.queue.pooled:
                    self.queue.used(self)
                future.set_result((self, use, self._tries()))

    def _waiting(self) -> int:
        """Return this key's part of the calls that wait."""
        if not self.queue.pooled:
            return len(self.line)
        total = sum(flow.weight for flow in self.queue.serving())
        return math.ceil(len(self.line) * self.weight / total) if self.serves else 0

    def _refuse_hopeless(self) -> None:
        if not self.line:
            return
        if self.variable in self.keys.marks and not self.queue.serving():
            self.queue.fail(self.keys.error(self.variable))
        now = self._now()
        for waiter, retry_after_s in self.line.hopeless(self.queue.wait_s(now), now):
            self.line.discard(waiter)
            if not waiter.item.done():
                waiter.item.set_exception(self._too_late(retry_after_s))

    def _too_late(self, retry_after_s: float) -> RateLimited:
        self.refusals += 1
        metrics.RATE_LIMITED.labels(self.endpoint).inc()
        seconds = math.ceil(retry_after_s)
        return RateLimited(
            f"The rate limit of this service is used up; nothing was sent. Call again in {seconds} s, or ask for less.",
            detail={"retry_after_s": seconds},
            retry_after=float(seconds),
        )

    async def _read(self) -> None:
        self._stored = await self._store.read(self.record_name)
        self.allowance.see(ledger.decode(self._stored[1]), self._stored[0])
        if self._unsure is not None and self.allowance.is_written(self._unsure, self._stored[1]):
            self.allowance.confirm(self._unsure, self._stored[0])
        self._unsure = None

    async def _change(self, *, leave: bool = False) -> None:
        """Report uses and take a block, by compare-and-set."""
        allowance = self.allowance
        if self._unsure is not None or self._stored is None:
            await self._read()
        for _ in range(RACES):
            revision, stored = self._stored or (0, None)
            now = self._now()
            planned = allowance.plan(stored, self._waiting(), now, leave=leave)
            value = ledger.encode(planned.record)
            self._unsure = planned
            written = await self._store.write(self.record_name, value, revision)
            if written is not None:
                self._unsure, self._stored = None, (written, value)
                self._confirmed(planned, written, now)
                return
            await self._read()
            if allowance.revision and self._stored is not None and allowance.is_written(planned, self._stored[1]):
                return

    def _confirmed(self, planned: Planned, revision: int, now: float) -> None:
        if self.allowance.alone:
            log.info("limits are shared again", extra={"action": "limits.shared", **self._named()})
        self.allowance.confirm(planned, revision)
        self._changed_at = now
        spacing_s = max(_SPACING_S, planned.record.contenders(now, self.allowance.name) / _CHANGES_PER_S)
        self._next_change = now + spacing_s * random.uniform(0.75, 1.25) if planned.mine.want else now  # noqa: S311

    async def _write_refusal(self) -> None:
        """Tell the other replicas of a 429, and lower the limit where none is configured."""
        refused, self._refused = self._refused, []
        longest = max((seconds for seconds in refused if seconds is not None), default=None)
        for _ in range(RACES):
            revision, stored = self._stored or (0, None)
            record, now = ledger.decode(stored), self._now()
            before = record.paused_until, record.adaptive and record.adaptive.limit
            ledger.pause(record, longest, now)
            if self.allowance.rates.requests is None:
                ledger.lower(record, now)
            if record.paused_until - before[0] < _LOOK_S and before[1] == (record.adaptive and record.adaptive.limit):
                return  # another replica has told the same
            value = ledger.encode(record)
            written = await self._store.write(self.record_name, value, revision)
            if written is not None:
                self._stored = written, value
                self.allowance.see(record, written)
                self._log_refusal(now)
                return
            await self._read()

    def _log_refusal(self, now: float) -> None:
        adaptive = self.allowance.record.adaptive
        log.warning(
            "the upstream answered 429: %s requests with the key of %s wait for %.1f s%s",
            self.endpoint,
            self.variable,
            self.allowance.paused_s(now),
            "; no limit is configured, so one is found by trial for an hour" if adaptive else "",
            extra={"action": "limits.paused", "pause_s": round(self.allowance.paused_s(now), 3), **self._named()},
        )

    def _go_alone(self, reason: str) -> None:
        """Go on with this replica's share of the limit while the record cannot be changed."""
        allowance, now = self.allowance, self._now()
        if allowance.limited and not allowance.alone:
            allowance.go_alone(now)
            log.warning(
                "cannot share the limit of %s requests with the key of %s: %s; this replica uses 1/%s of it",
                self.endpoint,
                self.variable,
                reason,
                allowance.alone,
                extra={"action": "limits.alone", "replicas": allowance.alone, **self._named()},
            )
        self._give()
        self._refuse_hopeless()

    def _named(self) -> dict[str, str]:
        return {"variable": self.variable, "endpoint": self.endpoint}

    @property
    def shown_line(self) -> Line[Any]:
        """Return the calls that wait; those of a pool, which wait in one line, are shown for its first key alone."""
        return self.line if self is self.queue.flows[0] else Line()
