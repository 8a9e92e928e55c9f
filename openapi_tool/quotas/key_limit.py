"""The limit of one key and endpoint in this process: it counts the requests, and grants permits to waiting calls.

All replicas share the limit by its record (`limit_record`). `KeyLimit` writes it as `shared_record` describes: one
write stores the costs of ended requests, 429s, what waits here, and the permits that it grants. Its parts:

- `key_group`: the calls that wait, and the other keys of the pool;
- `replica_turns`: which calls come before those of other replicas, and how long a call waits;
- `key_permit`: what a call does with its permit, and how the request's outcome is settled;
- `outage_share`: what may be sent while the store is unavailable;
- `token_estimate`, `sent_requests`, `replica_report`, `pending`: see there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from contextvars import Context
from http import HTTPStatus

from pydantic import SecretStr

from openapi_tool.fair_queue import FairQueue, project_key
from openapi_tool.protocol.errors import RateLimited, ToolError
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.key_group import KeyGroup, WaitingCall
from openapi_tool.quotas.key_permit import KeyPermit
from openapi_tool.quotas.key_record import STATES, KeyUse
from openapi_tool.quotas.keys import Keys
from openapi_tool.quotas.limit_record import MAX_PAUSE_S, LimitRecord, RateRefusal, parse
from openapi_tool.quotas.outage_share import OutageShare
from openapi_tool.quotas.pending import Pending
from openapi_tool.quotas.permits import Permit, PermitRequest
from openapi_tool.quotas.rates import Rates
from openapi_tool.quotas.replica_report import REPORT_S, report
from openapi_tool.quotas.replica_turns import CallsElsewhere, may_hold_one_more, place_among_all
from openapi_tool.quotas.sent_requests import SentRequests
from openapi_tool.quotas.shared_record import SETTLE_S, SharedRecord
from openapi_tool.quotas.token_estimate import TokenEstimate, turns_beyond_paid
from openapi_tool.quotas.window import COUNTS_S, INTERVAL_S
from openapi_tool.state.port import Records
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_MIN_POLL_S, _MAX_POLL_S = 0.01, 0.25  # range of the time between two looks at the record while calls wait
_REVIEW_S = 1.0  # between searches for calls that get no permit in time
_PAUSE_S = 2.0  # after a 429 without Retry-After
_MIN_PAUSE_S = 0.5  # also after a Retry-After of 0: else the calls that wait would cause one 429 each
_SAME_PAUSE_S = 0.25  # a 429 that extends the pause by less belongs to the same burst, and is not logged again
_INITIAL_REQUEST_S = 1.0  # assumed duration of a request before any has ended
_MAX_DURATIONS = 16  # of the last requests, whose shortest is used


class KeyLimit(SharedRecord):
    """Limit of one key and endpoint; each key of a pool has a limit of its own.

    `rates` are the configured limits; `in_force` are those or the one that 429s have taught. With `dry_run` requests
    are counted, and none waits. `trial` is set by the `Limiter` once a blocked key may be tried by one call.
    """

    record: LimitRecord
    restores = True

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
        self.key_use = KeyUse(variable, endpoint)
        self.keys = keys
        self.group = group
        self.rates = rates
        self.dry_run = dry_run
        self.trial = False
        self.record = LimitRecord()
        self._outage_share: OutageShare | None = None  # set during an outage that began while the key was limited
        # For the record, until a write contains them.
        self._granted: list[tuple[WaitingCall, Attempt]] = []  # by the last `apply`
        self._refusals: Pending[RateRefusal] = Pending()
        self._extra_turns: Pending[tuple[str, float]] = Pending()  # project, and turns that its request cost beyond one
        self._uncounted: Pending[float] = Pending()  # times of requests that were sent before `apply_rates` set a limit
        # What this process knows of its requests.
        self._sent = SentRequests()
        self._durations: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._tokens = TokenEstimate(rates.tokens, min_tokens)
        self._own_pause_until = 0.0  # the latest of the 429s that this process got
        self._reviewed_at = 0.0
        # For statistics and logs.
        self.calls_refused = 0
        self.would_have_waited = 0  # calls that got a permit by `dry_run` only
        self._log_fields = {"variable": variable, "endpoint": endpoint}
        self._unreadable_logged = False
        group.add(self)
        self._set_gauges()

    def _set_gauges(self) -> None:
        metrics.LIMIT_USED.labels(*self.key_use).set_function(lambda: self.record.requests.total(self.now()))
        metrics.LIMIT_WAITING.labels(*self.key_use).set_function(lambda: len(self.counted_queue))
        metrics.LIMIT_PAUSED.labels(*self.key_use).set_function(lambda: self.paused_s)
        metrics.LIMIT_NOT_SHARED.labels(*self.key_use).set_function(lambda: bool(self.outage) and self.limited)

    def apply_rates(self, rates: Rates, *, dry_run: bool) -> None:
        """Apply other limits from now on.

        Requests that were sent before the first limit was set count as requests, but not as tokens or as running ones.
        """
        if rates.limited and not self.limited:
            self._uncounted.replace(self._sent.counting(self.now()))
        if rates.tokens != self.rates.tokens:
            self._tokens.set_limit(rates.tokens)
        self.rates = rates
        self.dry_run = dry_run

    # What others ask.

    @property
    def usable(self) -> bool:
        """Return whether calls may use the key: a blocked one only as a trial, and one of a pool only if it is set.

        A key that is in no pool is set, as the call brings it (`PermitRequest.key`).
        """
        if self.key_use in self.keys.blocked:
            return self.trial
        return not self.group.pooled or self.keys.get(self.variable) is not None

    @property
    def limited(self) -> bool:
        """Return whether requests must be counted in the record: also after a 429, to learn a limit."""
        now = self.now()
        return self.rates.limited or self.record.is_observed(now) or self._own_pause_until > now

    @property
    def in_force(self) -> Rates:
        """Limits in force: configured or learned."""
        return self.record.effective(self.rates, self.now())

    @property
    def paused_s(self) -> float:
        """Seconds until a pause after a 429 ends, whichever replica got it."""
        now = self.now()
        paused_until = max(self.record.paused_until, self._own_pause_until)
        return min(max(0.0, paused_until - now), MAX_PAUSE_S)

    @property
    def tokens_each(self) -> int:
        """Tokens that a request is expected to use, and reserves; 1 if tokens are not limited."""
        return self._tokens.each

    @property
    def running(self) -> int:
        """Number of requests of this process that have a permit and have not ended."""
        return sum(attempt.cost is None for attempt in self.attempts.values())

    @property
    def min_request_s(self) -> float:
        """Shortest duration of a recent request in seconds."""
        return min(self._durations, default=_INITIAL_REQUEST_S)

    @property
    def counted_queue(self) -> FairQueue[WaitingCall]:
        """The calls that statistics count here: those of a pool are counted at its first key only."""
        return self.group.waiting if self is self.group.limits[0] else FairQueue()

    def sent_in_window(self) -> int:
        """Return the number of requests that this process sent in the last 60 s, with those that wait to be sent."""
        return len(self._sent.counting(self.now()))

    def wait_s(self, place: int) -> float:
        """Return a lower bound of the seconds until this key grants the permit number `place` from now on."""
        if self._outage_share is not None:
            place *= self._outage_share.parts  # as if each replica granted as many as this one
        now = self.now()
        rates = self.in_force
        self.record.pace(rates, self.tokens_each, now)
        return max(self.paused_s, self.record.wait_s(rates, self.tokens_each, place, self.min_request_s, now))

    def seems_free(self) -> bool:
        """Return whether the key has a permit for one more call by the last known record."""
        now = self.now()
        rates = self.in_force
        self.record.pace(rates, self.tokens_each, now)
        calls_to_serve = sum(call.preferred is self for call in self.group.waiting)
        calls_before = calls_to_serve + len(self._granted)  # the granted ones are not in the known record yet
        return not self.paused_s and self.record.has_room(rates, self.tokens_each, calls_before, now)

    def place_of(self, project: str, number: int, *, newest: bool = False) -> int:
        """Return the place, among all calls at all replicas, of the call that is number `number` of its project here.

        `newest` says that no call has waited for a shorter time.
        """
        queue = self.group.waiting
        return place_among_all(self.record, self.replica, queue, project, number, newest=newest, now=self.now())

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

    # Requests of this process.

    def send_unlimited(self, wanted: PermitRequest) -> Permit:
        """Return a permit of a key without a limit."""
        permit = KeyPermit(self, None, wanted)
        self._sent.add(permit.sent_at)
        return permit

    def take_trial(self) -> bool:
        """Return whether the request that gets a permit now is the trial of a blocked key: no other one is."""
        is_trial = self.trial
        self.trial = False
        return is_trial

    def not_sent(self, at: float) -> None:
        """Do not count the request of a permit that was given at the time `at`, and is given back."""
        self._sent.forget(at)

    def sent_late(self, attempt: Attempt) -> None:
        """Count an attempt, which is sent now, from now on if its permit is `INTERVAL_S` old or older."""
        now = self.now()
        if now - attempt.at >= INTERVAL_S:
            attempt.at = now
            self.wake()

    def end(self, attempt: Attempt, cost: Amount | None) -> None:
        """Settle an attempt, once. A `cost` of None is unknown; NOTHING: the attempt was not sent."""
        if attempt.cost is not None:
            return
        attempt.cost = attempt.need if cost is None else cost
        if cost == NOTHING:
            self.not_sent(attempt.at)
        if cost is not None and cost != NOTHING:
            self._durations.append(self.now() - attempt.at)
            self._learn_tokens(attempt, cost.tokens)
        # A place among the concurrent requests, or a permit that is given back, is free for others at once.
        if self.rates.concurrent is not None or cost == NOTHING:
            self.wake()
        else:
            self.wake_soon()

    def _learn_tokens(self, attempt: Attempt, tokens: int) -> None:
        """Use the cost of an attempt for the next estimate, and for the turns of its project."""
        limit = self.rates.tokens
        if limit is not None and tokens:
            self._tokens.learn(tokens)
            extra = turns_beyond_paid(self.rates.requests, limit, reserved=attempt.need.tokens, used=tokens)
            self._extra_turns.add((attempt.project, extra))

    def record_upstream_refusal(self, error: ToolError, wanted: PermitRequest, key: SecretStr, sent_at: float) -> int:
        """Pause the key after a 429, or count a refusal of the `key`; other replicas get it by the next write.

        Return how often the request may be sent again at once, with other keys of the pool (`Permit.failed`).
        """
        if error.http_status == HTTPStatus.TOO_MANY_REQUESTS:
            self._pause(error, sent_at)
        elif error.upstream_status is not None and error.upstream_status in STATES:
            self.keys.record_refusal(self.key_use, key, error.upstream_status, wanted.call)
        else:
            return 0
        wanted.refused_by |= {self.variable}
        others = [limit for limit in self.group.usable() if limit.variable not in wanted.refused_by]
        if all(limit.paused_s for limit in others):
            return 0
        return len(self.group.limits) - 1  # once with each other key: the next one may refuse it, too

    def _pause(self, error: ToolError, sent_at: float) -> None:
        """Pause the key after a 429 of a request that was sent at `sent_at`."""
        pause_s = max(_PAUSE_S if error.retry_after is None else error.retry_after, _MIN_PAUSE_S)
        until = self.now() + min(pause_s, MAX_PAUSE_S)
        if until - self._own_pause_until >= _SAME_PAUSE_S:
            Context().run(self._log_pause, until)  # without the ids of this call: it concerns all that wait
        self._own_pause_until = max(self._own_pause_until, until)
        teaches = self.rates.requests is None and not error.is_concurrency
        self._refusals.add(RateRefusal(sent_at, until, teaches))
        self._sent.forget(sent_at)  # a limit is learned from accepted requests only
        self.wake()

    def _log_pause(self, until: float) -> None:
        log.warning(
            "the upstream answered 429: %s requests with the key of %s wait for %.1f s%s",
            self.endpoint,
            self.variable,
            until - self.now(),
            "" if self.rates.requests else "; no limit is configured: set that of your plan in section limits",
            extra={"action": "limits.paused", "pause_s": round(until - self.now(), 3), **self._log_fields},
        )

    # The record (`SharedRecord`).

    def decode(self, value: bytes | None) -> bool:
        """Use a stored record of the limit."""
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

    def apply(self, now: float) -> bool:
        """Count the requests and 429s of this process, grant permits, and report what still waits."""
        record = self.record
        record.drop_expired(self.rates, now)
        record.pace(self.in_force, self.tokens_each, now)
        changed = self._report_outage(now)
        changed |= self._count_earlier(now)
        changed |= self._move_late()
        changed |= self.store_attempts(now)
        for refusal in self._refusals.take():
            record.refuse(refusal, now)
            changed = True
        for project, turns in self._extra_turns.take():
            record.turns.charge(project_key(project), turns / self.group.waiting.weight(project))
        changed |= self._grant(now)
        if self.limited:
            changed |= report(record, self.replica, self.group.waiting, now, is_written=changed)
        return changed

    def reserve_attempt(self, attempt: Attempt) -> None:
        """Count what the attempt is expected to cost as used."""
        self.record.reserve(attempt, self.in_force)

    def settle_attempt(self, name: str, cost: Amount) -> None:
        """Count the attempt's cost as used, instead of the expected one."""
        self.record.settle(name, *cost, self.in_force)

    def confirm(self) -> None:
        """Give the permits to the calls, as the record now contains them."""
        granted = self._granted
        self._granted = []
        self._refusals.written()
        self._extra_turns.written()
        self._uncounted.written()
        if self._outage_share is not None:
            self._outage_share = None
            log.info("limits are shared again", extra={"action": "limits.shared", **self._log_fields})
        for call, attempt in granted:
            attempt.stored = attempt.id in self.record.open
            self._give(call, attempt)
        self._review()

    def abort(self) -> None:
        """Let the calls wait on that `apply` has taken from the queue, in their order."""
        for call, _ in reversed(self._granted):
            self.group.waiting.put_back(*call.wanted.agent, call)
        self._granted = []

    def next_s(self) -> float | None:
        """Return the seconds until the task looks at the record again: few while calls wait, else until a report."""
        if not self.limited:
            return None
        if not self.group.waiting:
            return REPORT_S
        # With a wait of 0, the calls wait until calls elsewhere have been served, or until a request has ended. Both
        # change the record, which wakes this task. As the notice of a change may be lost, it looks again soon.
        wait_s = self.wait_s(1) or SETTLE_S
        return max(_MIN_POLL_S, min(wait_s, _MAX_POLL_S))

    def _report_outage(self, now: float) -> bool:
        """Report that this replica is back after an outage; return whether the record must be written."""
        was_missing = self.record.report_back(self.replica)
        if self._outage_share is None:
            return was_missing
        self.record.recover(self.replica, self.in_force, self._outage_share.began, now)
        return True

    def _count_earlier(self, now: float) -> bool:
        """Count what was sent while requests did not have to be counted; return whether the record changed."""
        uncounted = self._uncounted.take()
        for at in uncounted:
            self.record.requests.add(at, 1, paced=False)
        if uncounted:
            return True
        return self.rates.requests is None and self.record.count_observed(self.replica, self._sent, now)

    def _move_late(self) -> bool:
        """Count attempts that were sent later than they were granted from the time at which they were sent."""
        has_moved = False
        for attempt in self.attempts.values():
            in_record = self.record.open.get(attempt.id)
            # `sent_late` changes the time by INTERVAL_S or more. Half of that: times in the record are rounded.
            if in_record is not None and attempt.at - in_record.at >= INTERVAL_S / 2:
                self.record.move(attempt)
                has_moved = True
        return has_moved

    # Permits for the calls that wait.

    def _grant(self, now: float) -> bool:
        """Take the calls whose turn it is from the queue, and reserve; return whether the record changed."""
        queue = self.group.waiting
        if not queue:
            return False
        record = self.record
        elsewhere = record.waiting_elsewhere(self.replica, now)
        able = {name: calls for name, calls in elsewhere.items() if self._may_hold_one_more(name, now)}
        turns = CallsElsewhere(able, record.turns)
        has_probed = False

        def has_room(before: int) -> bool:
            return record.has_room(self.in_force, self.tokens_each, before, now)

        while here := self._projects_to_serve():
            since = {short_name: queue.first(project).since for short_name, project in here.items()}
            short_name = turns.next_here(since, has_room)
            if short_name is None and self.dry_run:
                short_name = next(iter(here))
                self.would_have_waited += 1
            if short_name is not None:
                project = here[short_name]
                turn_cost = 1 / queue.weight(project)
                turns.serve_here(short_name, turn_cost)
                record.turns.serve(short_name, turn_cost)
                self._reserve_for(queue.pop(project), now)
            elif record.probe(now):  # the raised learned limit may have room now
                has_probed = True
            else:
                break
        return has_probed or bool(self._granted)

    def _projects_to_serve(self) -> dict[str, str]:
        """Return the projects whose next call may use the key now, by their short names."""
        is_blocked = self.key_use in self.keys.blocked
        if not self.usable or (is_blocked and self._granted):  # one call tries a blocked key
            return {}
        return {project_key(project): project for project in self.group.waiting.projects() if self._may_send(project)}

    def _reserve_for(self, call: WaitingCall, now: float) -> None:
        """Reserve for a call. It gets its permit once that is stored (`confirm`)."""
        attempt = self._attempt_of(call, now)
        self._granted.append((call, attempt))
        if self.record.room:  # a full record grants permits by `dry_run` only; they are reserved once there is room
            self.reserve_attempt(attempt)

    def _attempt_of(self, call: WaitingCall, now: float) -> Attempt:
        tokens = 0 if self.rates.tokens is None else self.tokens_each
        return self.new_attempt(now, Amount(1, tokens), call.wanted.deadline, call.wanted.agent.project)

    def _give(self, call: WaitingCall, attempt: Attempt) -> None:
        """Give its permit to a call."""
        self.attempts[attempt.id] = attempt
        self._sent.add(attempt.at)
        if call.permit.done():  # the call was cancelled, or its wait has ended
            self.end(attempt, NOTHING)
            return
        if self.group.pooled:
            self.group.count_request(self)
        call.permit.set_result(KeyPermit(self, attempt, call.wanted))

    def _may_send(self, project: str) -> bool:
        """Return whether a project may send its next call with this key."""
        call = self.group.waiting.first(project)
        if call.preferred is not None and call.preferred is not self:
            return False
        if self._is_left_to_other_keys(call.wanted):
            return False
        return self._may_hold_one_more(project_key(project), self.now())

    def _is_left_to_other_keys(self, wanted: PermitRequest) -> bool:
        """Return whether this key has refused the request, and there is another key that has not."""
        if self.variable not in wanted.refused_by:
            return False
        return any(limit.variable not in wanted.refused_by for limit in self.group.usable())

    def _may_hold_one_more(self, short_name: str, now: float) -> bool:
        return may_hold_one_more(short_name, self.rates.concurrent, self.record, self.replica, self.group, now)

    # Calls that get no permit in time, or not from this key.

    def _review(self) -> None:
        """End the wait of calls that certainly get no permit in time, and of all if the key is blocked."""
        if self.key_use in self.keys.blocked and not self.group.usable():
            for call in list(self.group.waiting):
                self.group.fail(call, self.keys.error(self.key_use))
            return
        self._open_to_others()
        now = self.now()
        if now - self._reviewed_at >= _REVIEW_S:
            self._reviewed_at = now
            self._refuse_late(now)

    def _refuse_late(self, now: float) -> None:
        """End the wait of calls that certainly get no permit until their latest time; later ones then move up."""
        queue = self.group.waiting
        for project in queue.projects():
            number = 1
            for call in list(queue.of(project)):
                wait_s = self.group.wait_s(self.place_of(project, number))
                if now + wait_s > call.latest:
                    self.group.fail(call, self.rate_limited(wait_s))
                else:
                    number += 1

    def _open_to_others(self) -> None:
        """Let the other keys of the pool serve the calls that this one was to serve first, and has not."""
        if not self.group.pooled:
            return
        left = [call for call in self.group.waiting if call.preferred is self]
        for call in left:
            call.preferred = None
        if left:
            asyncio.get_running_loop().call_soon(self.group.wake)

    # Without the store (`SharedRecord`).

    def begin_outage(self) -> None:
        """Divide what is left of the limit by the last known record among the replicas."""
        if not self.limited:
            return
        now = self.now()
        record = self.record
        record.drop_expired(self.rates, now)
        parts = len(record.known_replicas(self.replica))
        self._outage_share = OutageShare(now, parts, record.requests, record.tokens)
        log.warning(
            "cannot share the limit of %s requests with the key of %s: %s; this replica uses 1/%s of it",
            self.endpoint,
            self.variable,
            self.outage,
            parts,
            extra={"action": "limits.not_shared", "replicas": parts, **self._log_fields},
        )

    def decide_offline(self) -> None:
        """Give permits within this replica's part of the limit; without a limit, to all calls."""
        now = self.now()
        queue = self.group.waiting
        share = self._outage_share
        while self.usable:
            project = queue.next(self._may_send)
            if project is None or (share is not None and not self._has_outage_room(share, now)):
                break
            call = queue.pop(project)
            queue.turns.serve(project, 1 / queue.weight(project))
            attempt = self._attempt_of(call, now)
            if share is not None:
                share.sent.add(now, 1)
            self._give(call, attempt)
        self._review()

    def _has_outage_room(self, share: OutageShare, now: float) -> bool:
        if self.paused_s:
            return False
        own_tokens = 0  # that the record of before the outage does not contain
        for attempt in self.attempts.values():
            if not attempt.stored and attempt.at > now - COUNTS_S:
                own_tokens += (attempt.cost or attempt.need).tokens
        return share.has_room(
            self.in_force, next_tokens=self.tokens_each, own_tokens=own_tokens, running=self.running, now=now
        )
