"""The limit of one key and endpoint in this process: calls that wait for a permit, and requests that have one."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from http import HTTPStatus

from pydantic import SecretStr

from openapi_tool.fair_queue import FairQueue, Turns, project_key
from openapi_tool.protocol.errors import RateLimited, ToolError
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.keys import STATES, Keys, KeyUse
from openapi_tool.quotas.limit_record import (
    MAX_PAUSE_S,
    MAX_REPLICAS,
    LimitRecord,
    Rates,
    Replica,
    WaitingCalls,
    encode,
    parse,
)
from openapi_tool.quotas.permits import Permit, PermitRequest
from openapi_tool.quotas.shared_record import SETTLE_S, SharedRecord
from openapi_tool.quotas.window import COUNTS_S, INTERVAL_S, Window
from openapi_tool.state.port import Records
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_POLL_S = 0.25  # longest time between two looks at the record while calls wait
_MIN_POLL_S = 0.01
_ANNOUNCE_S = 1.0  # between reports of what waits here, while it waits; less than half of WAITING_S
_ANNOUNCE_NEW_S = 0.2  # the same if others do not know it yet
_ANNOUNCED = 20  # projects
_REPORT_S = 20.0  # between reports of a replica that sends nothing, or the record drops it after 60 s
_BACKLOG_S = 2.0
_REVIEW_S = 1.0  # between searches for calls that get no permit in time
_END_MARGIN_S = 60.0  # from the deadline of a call until its requests have certainly ended
_MIN_PAUSE_S = 0.5  # also after a Retry-After of 0, or each waiting call would cause a 429
_PAUSE_S = 2.0  # after a 429 without Retry-After
_USUAL_TOKENS = 10_000  # of a request
_NEWEST_WEIGHT = 0.2  # of the newest request in the moving average of tokens
_MAX_GROWTH = 2  # largest multiple of the average that counts: a page of millions of tokens must stop nothing
_INITIAL_REQUEST_S = 1.0  # duration of a request before any has ended
_MAX_DURATIONS = 16
_MAX_SENT = 20_000
_ACTIVE_S = 600.0
_KEY_STATUSES = (401, 402, 429)  # of the key, not of the request only


@dataclass(slots=True, eq=False)
class WaitingCall:
    """Call that needs a permit before `latest`, and has waited since `since` (server times).

    `since` has no fractions of a millisecond, as replicas compare it: if each took the rounded time of another for
    longer than its own exact one, each would leave the turn to the other. `preferred`: the key of its pool that looks
    at it first.
    """

    wanted: PermitRequest
    since: float
    latest: float
    permit: asyncio.Future[Permit]
    preferred: KeyLimit | None = None


@dataclass(eq=False)
class KeyGroup:
    """The keys of a pool, or one key alone, and the calls that wait for any of them."""

    waiting: FairQueue[WaitingCall]
    pooled: bool
    limits: list[KeyLimit] = field(default_factory=list)
    _virtual_time: float = 0.0

    def usable(self) -> list[KeyLimit]:
        """Return the keys that are set and not blocked."""
        return [limit for limit in self.limits if limit.usable]

    def by_load(self, limits: list[KeyLimit]) -> list[KeyLimit]:
        """Sort keys by load, lowest first; one that was unusable for a while does not catch up."""
        return sorted(limits, key=lambda limit: max(limit.load, self._virtual_time))

    def count_request(self, limit: KeyLimit) -> None:
        """Count a request towards the load of a key."""
        limit.load = max(limit.load, self._virtual_time) + 1 / limit.weight
        usable = [limit.load for limit in self.usable() if not limit.paused_s]
        self._virtual_time = max(self._virtual_time, min(usable, default=0.0))

    def wait_s(self, place: int) -> float:
        """Return a lower bound of the seconds until a call in this place gets a permit.

        At least one key must grant its share of that many.
        """
        limits = self.usable() or self.limits
        total = sum(limit.weight for limit in limits)
        return min(limit.wait_s(max(1, math.ceil(place * limit.weight / total))) for limit in limits)

    def wake(self) -> None:
        """Let all keys look at the waiting calls."""
        for limit in self.limits:
            limit.wake()

    def discard(self, waiter: WaitingCall) -> bool:
        """Remove a call; return whether it still waited."""
        return self.waiting.discard(*waiter.wanted.agent, waiter)

    def fail(self, waiter: WaitingCall, error: ToolError) -> None:
        """End the wait of a call with an error."""
        self.discard(waiter)
        if not waiter.permit.done():
            waiter.permit.set_exception(error)


class _Rivals:
    """Calls that wait at other replicas. Theirs is the turn if their project's is, and if they have waited longer.

    `left` are the permits that are left to them.
    """

    def __init__(self, waiting: dict[str, list[WaitingCalls]], turns: Turns) -> None:
        self._waiting = waiting
        self.order = turns.model_copy(deep=True)
        self.left = 0

    def next(self, mine: Mapping[str, float], has_room: Callable[[int], bool]) -> str | None:
        """Return the project whose turn it is, None if nobody of `mine` gets a permit.

        `mine` is since when the next call of each project has waited here; `has_room` is asked with the number of
        permits that others get before.
        """
        while has_room(self.left):
            turn = min([*mine, *self._waiting], key=lambda name: self._precedence(name, mine), default=None)
            if turn is None or (turn in mine and not self._has_waited_longer(turn, mine[turn])):
                return turn
            self._take(turn)
        return None

    def _precedence(self, project: str, mine: Mapping[str, float]) -> tuple[float, float, str]:
        """Return what orders projects in the same way at all replicas: else each may leave the turn to another one."""
        since = [calls.since for calls in self._waiting.get(project, ())]
        return self.order.start(project), min([*since, mine.get(project, math.inf)]), project

    def _has_waited_longer(self, project: str, since: float) -> bool:
        return project in self._waiting and self._waiting[project][-1].since < since

    def _take(self, project: str) -> None:
        calls = self._waiting[project].pop()
        if calls.number > 1:
            self._waiting[project].append(calls._replace(number=calls.number - 1))
        if not self._waiting[project]:
            del self._waiting[project]
        self.left += 1
        self.order.serve(project, 1.0)


class KeyLimit(SharedRecord):
    """Limit of one key and endpoint. In a pool `load` is the number of its requests divided by its `weight`.

    While `trial` is set (`Limiter`), one call may try a blocked key. `dry_run`: requests are only counted.
    """

    def __init__(
        self,
        variable: str,
        endpoint: str,
        rates: Rates,
        min_tokens: int,
        store: Records,
        keys: Keys,
        group: KeyGroup,
        *,
        dry_run: bool = False,
    ) -> None:
        super().__init__(f"limit.{variable.upper()}.{endpoint}", keys.replica, store, keys.now)
        self.variable = variable
        self.endpoint = endpoint
        self.rates = rates
        self.keys = keys
        self.group = group
        self.key_use = KeyUse(variable, endpoint)
        self.record = LimitRecord()
        self.weight = 1.0
        self.load = 0.0
        self.trial = False
        self.dry_run = dry_run
        self.calls_refused = self.would_have_waited = 0
        self._min_tokens = min_tokens
        self.tokens_each = self._usual_tokens
        self._log_fields = {"variable": variable, "endpoint": endpoint}
        self._granted: list[tuple[WaitingCall, Attempt]] = []  # by `apply`
        self._settled: list[Attempt] = []  # by `apply`
        self._moved: dict[str, Attempt] = {}  # sent later than they were granted
        self._refusals: list[tuple[float, float, bool]] = []  # 429s: time of sending, end of the pause, teaches
        self._applied_refusals = 0
        self._charges: list[tuple[str, float]] = []  # cost of requests beyond what their projects paid for
        self._applied_charges = 0
        self._own_pause_until = self._reviewed_at = 0.0
        self._unreadable_logged = False
        self._offline: LimitRecord | None = None
        self._offline_window = Window()
        self._lost_at = 0.0  # begin of an outage that is not reported yet
        self._sent: deque[float] = deque(maxlen=_MAX_SENT)  # of the last COUNTS_S
        self._uncounted: list[float] = []  # sent without a limit before `apply_rates` set one
        self._durations: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._asked: dict[str, float] = {}
        group.limits.append(self)
        labels = (variable, endpoint)
        metrics.LIMIT_USED.labels(*labels).set_function(lambda: self.record.requests.total(self.now()))
        metrics.LIMIT_WAITING.labels(*labels).set_function(lambda: len(self.counted_queue))
        metrics.LIMIT_PAUSED.labels(*labels).set_function(lambda: self.paused_s)
        metrics.LIMIT_NOT_SHARED.labels(*labels).set_function(lambda: bool(self.outage) and self.limited)

    def apply_rates(self, rates: Rates, *, dry_run: bool) -> None:
        """Apply other limits from now on. What was sent without one counts, but not as running or as tokens."""
        now = self.now()
        if rates.limited and not self.limited:
            self._uncounted = [at for at in self._sent if at > now - COUNTS_S]
        tokens_before = self.rates.tokens
        self.rates = rates
        self.dry_run = dry_run
        if rates.tokens != tokens_before:
            self.tokens_each = self._usual_tokens

    @property
    def _usual_tokens(self) -> int:
        limit = self.rates.tokens
        return 1 if limit is None else min(max(self._min_tokens, _USUAL_TOKENS), limit)

    # What others ask.

    @property
    def usable(self) -> bool:
        """Return whether calls may use the key."""
        if self.key_use in self.keys.blocked:
            return self.trial
        return not self.group.pooled or self.keys.get(self.variable) is not None

    @property
    def limited(self) -> bool:
        """Return whether requests must be counted in the record."""
        return self.rates.limited or self.record.is_observed(self.now()) or self._own_pause_until > self.now()

    @property
    def paused_s(self) -> float:
        """Seconds until a pause after a 429 ends."""
        now = self.now()
        return min(max(0.0, self.record.paused_until - now, self._own_pause_until - now), MAX_PAUSE_S)

    @property
    def running(self) -> int:
        """Number of requests that are sent, and not ended."""
        return sum(attempt.cost is None for attempt in self.attempts.values())

    @property
    def min_request_s(self) -> float:
        """Shortest duration of a recent request in seconds."""
        return min(self._durations, default=_INITIAL_REQUEST_S)

    @property
    def counted_queue(self) -> FairQueue[WaitingCall]:
        """Waiting calls; those of a pool are reported for its first key only."""
        return self.group.waiting if self is self.group.limits[0] else FairQueue()

    @property
    def in_force(self) -> Rates:
        """Limits in force."""
        return self.record.effective(self.rates, self.now())

    def sent_in_window(self) -> int:
        """Return the number of requests of the last 60 s."""
        since = self.now() - COUNTS_S
        return sum(at > since for at in self._sent)

    def wait_s(self, place: int) -> float:
        """Return a lower bound of the seconds until this many requests may be sent, the last of them included."""
        if self._offline is not None:  # each replica has an equal part
            place *= len(self._offline.known_replicas(self.replica))
        rates = self.in_force
        now = self.now()
        self.record.pace(rates, self.tokens_each, now)
        return max(self.paused_s, self.record.wait_s(rates, self.tokens_each, place, self.min_request_s, now))

    def seems_free(self) -> bool:
        """Return whether the key has a permit by the last known record."""
        now = self.now()
        self.record.pace(self.in_force, self.tokens_each, now)
        return not self.paused_s and self.record.has_room(self.in_force, self.tokens_each, self._unstored(), now)

    def _unstored(self) -> int:
        waiting = sum(waiter.preferred is self for waiter in self.group.waiting)
        return waiting + len(self._granted)

    # Requests.

    def send_unlimited(self, wanted: PermitRequest) -> Permit:
        """Return a permit of a key without a limit."""
        permit = KeyPermit(self, None, wanted)
        self._count_sent(permit.sent_at)
        return permit

    def _count_sent(self, at: float) -> None:
        while self._sent and self._sent[0] <= at - COUNTS_S:
            self._sent.popleft()
        self._sent.append(at)

    def sent_late(self, attempt: Attempt) -> None:
        """Count an attempt from now on if it was sent INTERVAL_S or more after its permit."""
        now = self.now()
        if now - attempt.at >= INTERVAL_S:
            attempt.at = now
            self._moved[attempt.id] = attempt
            self.wake()

    def end(self, attempt: Attempt, cost: Amount | None) -> None:
        """Settle an attempt; `cost` None is unknown, NOTHING: it was not sent."""
        if attempt.cost is not None:
            return
        attempt.cost = attempt.need if cost is None else cost
        if cost is not None and cost != NOTHING:
            self._durations.append(self.now() - attempt.at)
            self._count_tokens(attempt, cost.tokens)
        # A place among the concurrent requests, or a permit that is given back, is free for others at once.
        if self.rates.concurrent is not None or cost == NOTHING:
            self.wake()
        else:
            self.wake_soon()

    def _count_tokens(self, attempt: Attempt, tokens: int) -> None:
        limit = self.rates.tokens
        if limit is None or not tokens:
            return
        counted = min(tokens, _MAX_GROWTH * max(self.tokens_each, _USUAL_TOKENS))
        mean = max(self._min_tokens, round(self.tokens_each + _NEWEST_WEIGHT * (counted - self.tokens_each)))
        self.tokens_each = min(mean, limit)  # a larger one would stop all requests, and never fall again
        # The resource of whose limit the request takes the larger part counts. Tokens above the limit stop one minute.
        least = 1 / self.rates.requests if self.rates.requests else 0.0
        paid = max(least, attempt.need.tokens / limit)
        self._charges.append((attempt.project, max(least, min(tokens, limit) / limit) / paid - 1))

    def record_upstream_refusal(self, error: ToolError, wanted: PermitRequest, key: SecretStr, sent_at: float) -> None:
        """Pause the key after a 429, or count its refusal; other replicas get it by the next write."""
        error.key_variable = self.variable
        if error.http_status == HTTPStatus.TOO_MANY_REQUESTS:
            pause_s = max(_PAUSE_S if error.retry_after is None else error.retry_after, _MIN_PAUSE_S)
            until = self.now() + min(pause_s, MAX_PAUSE_S)
            teaches = self.rates.requests is None and not error.is_concurrency
            Context().run(self._log_pause, until)  # without the ids of this call: it concerns all that wait
            self._own_pause_until = max(self._own_pause_until, until)
            self._refusals.append((sent_at, until, teaches))
            if sent_at in self._sent:  # a limit is learned from accepted requests only
                self._sent.remove(sent_at)
            self.wake()
        elif error.upstream_status is not None and error.upstream_status in STATES:
            self.keys.record_refusal(self.key_use, key, error.upstream_status, wanted.call)
        else:
            return
        wanted.refused_by |= {self.variable}
        if any(limit.variable not in wanted.refused_by and not limit.paused_s for limit in self.group.usable()):
            others = len(self.group.limits) - 1  # a retry with each: the next one may be refused, too
            error.max_retries = max(others, error.max_retries)
            error.retry_after = 0.0

    def _log_pause(self, until: float) -> None:
        if until - self._own_pause_until < _POLL_S:
            return  # of the same burst
        log.warning(
            "the upstream answered 429: %s requests with the key of %s wait for %.1f s%s",
            self.endpoint,
            self.variable,
            until - self.now(),
            "" if self.rates.requests else "; no limit is configured: set that of your plan in section limits",
            extra={"action": "limits.paused", "pause_s": round(until - self.now(), 3), **self._log_fields},
        )

    def rate_limited(self, wait_s: float) -> RateLimited:
        """Return the error of a call that gets no permit in time; `wait_s` is how long it would wait."""
        self.calls_refused += 1
        seconds = math.ceil(max(1.0, wait_s))
        metrics.RATE_LIMITED.labels(self.endpoint).inc()
        return RateLimited(
            f"The rate limit of this service is used up. Call again in {seconds} s.",
            detail={"retry_after_s": seconds},
            retry_after=float(seconds),
        )

    # The record.

    def decode(self, value: bytes | None) -> bool:
        """See `SharedRecord`."""
        record = parse(value)
        if record is None and value is not None and not self._unreadable_logged:
            self._unreadable_logged = True
            log.warning(
                "the record of the limit of %s requests with the key of %s cannot be read: it is damaged or of another "
                "version, whose replicas must be stopped; %s",
                self.endpoint,
                self.variable,
                "the last known record replaces it" if self.remembers else "none is known here: its count begins anew",
                extra={"action": "limits.unreadable", "key": self.record_name, **self._log_fields},
            )
        self.record = record or LimitRecord()
        now = self.now()
        self.record.correct(now)
        self.record.pace(self.in_force, self.tokens_each, now)
        return record is not None

    def encode(self) -> bytes:
        """See `SharedRecord`."""
        return encode(self.record)

    def apply(self, now: float) -> bool:
        """See `SharedRecord`."""
        record = self.record
        record.drop_expired(self.rates, now)
        rates = self.in_force
        record.pace(rates, self.tokens_each, now)
        changed = self._report_outage(now)
        changed |= self._count_earlier(now)
        changed |= self._store_attempts(rates, now)
        for sent_at, until, teaches in self._refusals:
            record.refuse(sent_at, until, now, teaches=teaches)
            changed = True
        self._applied_refusals = len(self._refusals)
        for project, cost in self._charges:
            record.turns.charge(project_key(project), cost / self.group.waiting.weight(project))
        self._applied_charges = len(self._charges)
        changed |= self._grant(now)
        changed |= self._report(now, written=changed)
        return changed

    def confirm(self) -> None:
        """See `SharedRecord`."""
        granted = self._granted
        self._granted = []
        for attempt in self.attempts.values():
            attempt.stored |= attempt.id in self.record.open
        for attempt in self._settled:
            self.attempts.pop(attempt.id, None)
        self._settled = []
        for name in [name for name, attempt in self._moved.items() if self._is_counted(name, attempt)]:
            del self._moved[name]
        del self._refusals[: self._applied_refusals], self._charges[: self._applied_charges]
        self._applied_refusals = self._applied_charges = 0
        self._uncounted = []
        if self._offline is not None:
            self._offline = None
            self._lost_at = 0.0
            log.info("limits are shared again", extra={"action": "limits.shared", **self._log_fields})
        for waiter, attempt in granted:
            attempt.stored = attempt.id in self.record.open
            self._give(waiter, attempt)
        self._review()

    def abort(self) -> None:
        """See `SharedRecord`."""
        for waiter, _ in reversed(self._granted):
            self.group.waiting.put_back(*waiter.wanted.agent, waiter)
        self._granted, self._settled = [], []
        self._applied_refusals = self._applied_charges = 0

    def next_s(self) -> float | None:
        """See `SharedRecord`."""
        if self._refusals or self._moved or any(attempt.cost is not None for attempt in self.attempts.values()):
            return SETTLE_S
        if not self.limited:
            return None
        if len(self.group.waiting):
            # 0: others must go first, or end; they wake this task, unless their notice is lost.
            return max(_MIN_POLL_S, min(self.wait_s(1) or SETTLE_S, _POLL_S))
        return _REPORT_S

    def _report_outage(self, now: float) -> bool:
        recovery = self.record.recovery
        is_missing = recovery is not None and self.replica in recovery.missing
        if recovery is not None and is_missing:
            recovery.missing.remove(self.replica)
        if self._lost_at:
            self.record.recover(self.replica, self.in_force, self._lost_at, now)
        return is_missing or self._lost_at > 0

    def _count_earlier(self, now: float) -> bool:
        """Count what was sent before a limit was set, or before the requests of a key without one were observed."""
        record = self.record
        for at in self._uncounted:
            record.requests.add(at, 1, paced=False)
        if self._uncounted:
            return True
        mine = record.replicas.get(self.replica) or Replica()
        if not record.observed or mine.counted == record.observed or self.rates.requests is not None:
            return False
        record.replicas[self.replica] = mine
        mine.counted = record.observed
        for at in self._sent:
            if now - COUNTS_S < at <= record.observed:
                record.requests.add(at, 1, paced=False)
        return True

    def _store_attempts(self, rates: Rates, now: float) -> bool:
        """Reserve what the record does not contain, settle what it contains and ended."""
        record = self.record
        changed = False
        missing: list[Attempt] = []
        self._settled = []
        for attempt in self.attempts.values():
            in_record = attempt.id in record.open
            if in_record and attempt.id in self._moved:
                record.move(attempt)
                changed = True
            if attempt.stored and attempt.cost is not None:
                if in_record:
                    record.settle(attempt.id, *attempt.cost, rates)
                    changed = True
                self._settled.append(attempt)
            elif in_record:
                continue
            elif attempt.until > now and attempt.cost != NOTHING:
                missing.append(attempt)
            else:
                self._settled.append(attempt)
        prefix = f"{self.replica}."
        for name in [name for name in record.open if name.startswith(prefix) and name not in self.attempts]:
            record.settle(name, 0, 0, rates)  # of a write that was believed to have failed: it was never sent
            changed = True
        for attempt in missing[: record.room]:  # the others once there is room
            record.reserve(attempt, rates)
            changed = True
        return changed

    def _is_counted(self, name: str, attempt: Attempt) -> bool:
        found = self.record.open.get(name)
        return found is None or abs(found.at - attempt.at) < INTERVAL_S / 2

    def _grant(self, now: float) -> bool:
        """Give permits to the calls whose turn it is among those of all replicas."""
        self._granted = []
        record = self.record
        waiting = self.group.waiting
        changed = False
        elsewhere = record.waiting_elsewhere(self.replica, now).items()
        able = {key: calls for key, calls in elsewhere if self._may_hold_more(key, now)}
        rivals = _Rivals(able, record.turns)
        while self.usable and not (self._granted and self.key_use in self.keys.blocked):  # one call tries a blocked key
            mine = {project_key(name): name for name in waiting.projects() if self._may_send(name)}
            since = {key: waiting.first(name).since for key, name in mine.items()}
            key = rivals.next(since, lambda before: record.has_room(self.in_force, self.tokens_each, before, now))
            if key is None:
                if self.dry_run and mine:
                    key = next(iter(mine))
                    self.would_have_waited += 1
                elif mine and record.probe(now):
                    changed = True
                    continue
                else:
                    break
            name = mine[key]
            waiter = waiting.pop(name)
            cost = 1 / waiting.weight(name)
            rivals.order.serve(key, cost)
            record.turns.serve(key, cost)
            attempt = self._attempt(waiter, now)
            self._granted.append((waiter, attempt))
            if record.room:  # not in a full one, by `dry_run`
                record.reserve(attempt, self.in_force)
        return changed or bool(self._granted)

    def _attempt(self, waiter: WaitingCall, now: float) -> Attempt:
        until = now + max(0.0, waiter.wanted.deadline.remaining()) + _END_MARGIN_S
        tokens = 0 if self.rates.tokens is None else self.tokens_each
        return Attempt(self.new_id(), now, Amount(1, tokens), until, waiter.wanted.agent.project)

    def _give(self, waiter: WaitingCall, attempt: Attempt) -> None:
        self.attempts[attempt.id] = attempt
        self._count_sent(attempt.at)
        if waiter.permit.done():  # cancelled meanwhile
            self.end(attempt, NOTHING)
            return
        if self.group.pooled:
            self.group.count_request(self)
        waiter.permit.set_result(KeyPermit(self, attempt, waiter.wanted))

    def note_asking(self, project: str) -> None:
        """Record that a project has asked for a permit."""
        self._asked.pop(project, None)
        self._asked[project] = self.now()
        if len(self._asked) > 2:  # noqa: PLR2004 - enough to know whether another one asked
            del self._asked[next(iter(self._asked))]

    def _may_send(self, project: str) -> bool:
        """Return whether a project may send its next call with this key."""
        waiter = self.group.waiting.first(project)
        if waiter.preferred not in (None, self) or not self._is_fresh(waiter.wanted):
            return False
        return self._may_hold_more(project_key(project), self.now())

    def _may_hold_more(self, key: str, now: float) -> bool:
        """Return whether a project may have one more concurrent request.

        If others have asked here within `_ACTIVE_S`, or run or wait anywhere, each leaves an eighth, at least one, to
        them: otherwise the slow requests of one project can hold all.
        """
        limit = self.rates.concurrent
        record = self.record
        if limit is None or limit <= 1:
            return True
        held = sum(one.project == key for one in record.open.values())
        if held < limit - max(1, limit // 8):
            return True
        known = {project_key(name) for name, at in self._asked.items() if now - at < _ACTIVE_S}
        known |= {one.project for one in record.open.values()} | record.waiting_elsewhere(self.replica, now).keys()
        return known <= {key, ""}

    def _is_fresh(self, wanted: PermitRequest) -> bool:
        """Return whether the key has not refused the request, or no other one is left."""
        if self.variable not in wanted.refused_by:
            return True
        return all(limit.variable in wanted.refused_by for limit in self.group.usable())

    def _report(self, now: float, *, written: bool) -> bool:
        """Report what waits here, if others do not know it or the report is old; return whether to write."""
        record = self.record
        mine = record.replicas.get(self.replica)
        waiting = dict(self._announced())
        before = mine.waiting if mine is not None else {}
        age_s = math.inf if mine is None else now - mine.seen
        is_alone = all(name == self.replica for name in record.replicas)
        news = waiting.keys() != before.keys() or any(
            calls.since != before[key].since for key, calls in waiting.items()
        )
        due = (
            written
            or bool(self._granted)
            or (self.limited and age_s >= _REPORT_S)
            or (not is_alone and bool(waiting) and age_s >= _ANNOUNCE_S)
            or (news and age_s >= _ANNOUNCE_NEW_S and (not is_alone or bool(before)))
        )
        if due and self.limited:
            record.replicas[self.replica] = Replica(
                seen=round(now, 3), waiting=waiting, counted=mine.counted if mine is not None else 0.0
            )
        return due and (self.limited or written)

    def _announced(self) -> Iterator[tuple[str, WaitingCalls]]:
        """Return the projects that wait here, those whose turn is next first."""
        queue = self.group.waiting
        counts = self.group.waiting.counts()
        turns = self.record.turns
        names = sorted(counts, key=lambda name: turns.start(project_key(name)))
        most = max(1, min(_ANNOUNCED, MAX_REPLICAS // max(1, len(self.record.replicas))))
        for name in names[:most]:
            yield project_key(name), WaitingCalls(counts[name], queue.first(name).since)

    # Calls that get no permit in time.

    def place_of(self, project: str, number: int, *, newest: bool = False) -> int:
        """Return the place, among those of all replicas, of the call that is number `number` of its project here.

        All that wait elsewhere have waited longer than the `newest`, of the others at least as many as here. A project
        that has waited for `_BACKLOG_S` is expected to send more calls.
        """
        turns = self.record.turns
        queue = self.group.waiting
        now = self.now()
        waiting: dict[str, float] = {}  # calls that are expected to compete, by project

        def add(key: str, calls: WaitingCalls) -> None:
            lasts = now - calls.since >= _BACKLOG_S
            waiting[key] = waiting.get(key, 0) + (math.inf if lasts else calls.number)

        elsewhere = self.record.waiting_elsewhere(self.replica, now)
        own = project_key(project)
        same = sum(calls.number for calls in elsewhere.pop(own, ()))
        place = before = number + (same if newest else min(same, number - 1))
        weights = {}
        for name, count in queue.counts().items():
            weights[project_key(name)] = queue.weight(name)
            add(project_key(name), WaitingCalls(count, queue.first(name).since))
        for key, found in elsewhere.items():
            for calls in found:
                add(key, calls)
        waiting.pop(own, None)
        end = turns.start(own) + before / queue.weight(project)
        for key, number_of in waiting.items():
            place += int(min(number_of, max(0, math.floor((end - turns.start(key)) * weights.get(key, 1.0)))))
        return place

    def _review(self) -> None:
        """End the wait of calls that certainly get no permit in time, and of all if the key is blocked."""
        queue = self.group.waiting
        now = self.now()
        if self.key_use in self.keys.blocked and not self.group.usable():
            for waiter in list(queue):
                self.group.fail(waiter, self.keys.error(self.key_use))
            return
        self._open_to_others()
        if now - self._reviewed_at < _REVIEW_S:
            return
        self._reviewed_at = now
        for project in queue.projects():
            number = 1
            for waiter in list(queue.of(project)):
                wait_s = self.group.wait_s(self.place_of(project, number))
                if now + wait_s > waiter.latest:
                    self.group.fail(waiter, self.rate_limited(wait_s))
                else:
                    number += 1

    def _open_to_others(self) -> None:
        """Let the other keys of the pool serve the calls that this one has not served at once."""
        left = [waiter for waiter in self.group.waiting if waiter.preferred is self] if self.group.pooled else []
        for waiter in left:
            waiter.preferred = None
        if left:
            asyncio.get_running_loop().call_soon(self.group.wake)

    # Without the store.

    def begin_outage(self) -> None:
        """See `SharedRecord`."""
        if not self.limited:
            return
        now = self.now()
        self.decode(self._readable)
        self.record.drop_expired(self.rates, now)
        self._offline = self.record
        self._offline_window = Window()
        self._lost_at = self._lost_at or now
        parts = len(self.record.known_replicas(self.replica))
        log.warning(
            "cannot share the limit of %s requests with the key of %s: %s; this replica uses 1/%s of it",
            self.endpoint,
            self.variable,
            self.outage,
            parts,
            extra={"action": "limits.not_shared", "replicas": parts, **self._log_fields},
        )

    def decide_offline(self) -> None:
        """See `SharedRecord`: an equal part of what was left of the limit, at an equal part of its pace."""
        now = self.now()
        record = self._offline
        while self.usable and (name := self.group.waiting.next(self._may_send)) is not None:
            if record is not None and not self._has_offline_room(record, now):
                break
            waiter = self.group.waiting.pop(name)
            self.group.waiting.turns.serve(name, 1 / self.group.waiting.weight(name))
            attempt = self._attempt(waiter, now)
            self._offline_window.add(now, 1)
            self._give(waiter, attempt)
        self._review()

    def _has_offline_room(self, record: LimitRecord, now: float) -> bool:
        if self.paused_s:
            return False
        parts = len(record.known_replicas(self.replica))
        rates = self.in_force
        window = self._offline_window
        window.drop_expired(now)
        own = [attempt for attempt in self.attempts.values() if not attempt.stored and attempt.at > now - COUNTS_S]
        if rates.requests is not None:
            free = max(0, rates.requests - record.requests.total(now)) // parts
            limit = max(1, rates.requests // parts)
            window.pace(limit, 1, now)
            if window.total(now) >= free or not window.has_room(limit, 1, 0, now):
                return False
        if rates.tokens is not None:
            free = max(0, rates.tokens - record.tokens.total(now)) // parts
            used = sum((attempt.cost or attempt.need).tokens for attempt in own)
            if used + self.tokens_each > free:
                return False
        return rates.concurrent is None or self.running < rates.concurrent // parts


class KeyPermit(Permit):
    """Permit of a limited key, or the trial of a blocked one."""

    __slots__ = ("_attempt", "_ended", "_limit", "_trial", "_wanted", "sent_at")

    def __init__(self, limit: KeyLimit, attempt: Attempt | None, wanted: PermitRequest) -> None:
        super().__init__(limit.variable, limit.keys.get(limit.variable) or wanted.key)
        self._limit = limit
        self._attempt = attempt
        self._wanted = wanted
        self._ended = False
        self.sent_at = limit.now()
        self._trial = limit.trial
        limit.trial = False

    def connected(self) -> None:
        """Record that the request is sent only now, so that the window of the limit counts it from now on."""
        super().connected()
        if self._attempt is not None and not self._ended:
            self._limit.sent_late(self._attempt)

    def done(self, tokens: int) -> None:
        """Settle the request."""
        self._end(Amount(1, tokens))
        self._limit.keys.record_success(self._limit.key_use, trial=self._trial)

    def failed(self, error: ToolError) -> None:
        """Settle the request; a refusal pauses or blocks its key."""
        limit = self._limit
        # A limit is learned from accepted requests only.
        was_refused = error.http_status == HTTPStatus.TOO_MANY_REQUESTS and limit.rates.requests is None
        self._end(Amount(0 if was_refused else 1, error.tokens))
        if error.http_status in _KEY_STATUSES:
            limit.record_upstream_refusal(error, self._wanted, self.key, self.sent_at)
        if self._trial and error.upstream_status not in STATES:
            limit.keys.end_trial(limit.key_use)

    def cancelled(self) -> None:
        """Settle the request."""
        self._end(None)
        if self._trial:
            self._limit.keys.end_trial(self._limit.key_use)

    def unsent(self) -> None:
        """Give the permit back: the request is not sent."""
        self._end(NOTHING)
        if self._trial:
            self._limit.keys.end_trial(self._limit.key_use)

    def _end(self, cost: Amount | None) -> None:
        if not self._ended:
            self._ended = True
            if self._attempt is not None:
                self._limit.end(self._attempt, cost)
