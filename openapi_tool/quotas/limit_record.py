"""Shared record of one key and endpoint (ADR 9): what was used, what runs, who waits, and what 429s have taught.

`KeyLimit` of each replica reads, changes and writes it. No I/O; every time is the server's, in seconds since the epoch.

Any client that may write the bucket may store anything. So `parse` checks types, `correct` caps times in the
future, and `drop_expired` drops what no replica can have written: a forged record has no effect for longer than a real
one.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.fair_queue import Turns, project_key
from openapi_tool.quotas.amounts import Attempt, Number, Time
from openapi_tool.quotas.learned_limit import MIN_LEARNED, LearnedLimit
from openapi_tool.quotas.rates import Rates
from openapi_tool.quotas.sent_requests import SentRequests
from openapi_tool.quotas.window import COUNTS_S, MARGIN_S, Window

REPLICA_S = 60.0  # from its last report until a replica is removed
WAITING_S = 2.0  # for which the calls of a report count: a replica that runs reports more often while calls wait
MAX_REPLICAS = 1_000
MAX_ENTRIES = 2_400  # attempts and replicas; so the record stays below the 256 KiB that its bucket accepts
MAX_CALL_S = 86_400.0 + 600.0  # longest time for which an attempt may run: the longest deadline, and a margin
MAX_PAUSE_S = 120.0  # after a 429, whatever its Retry-After says
RECOVERY_S = 5.0  # after an outage, until the part of a replica that has not reported counts as used
OBSERVED_S = 60.0  # after a pause, in which another 429 teaches a limit
_ALONE = 3  # requests after a pause that are sent one after another

Name = Annotated[str, Field(max_length=100)]


class RateRefusal(NamedTuple):
    """A 429: when its request was sent, and until when the key is paused.

    `teaches` says whether a limit of requests may be learned from it: none is configured, and the upstream did not
    refuse the number of concurrent requests.
    """

    sent_at: float
    pause_until: float
    teaches: bool


class OpenAttempt(NamedTuple):
    """Attempt whose cost is not known yet: it was sent `at`, reserves `tokens`, and has ended at `until` for certain.

    `project` is the short name of its project, and empty if the number of concurrent requests is not limited.
    """

    at: Time
    tokens: Number
    until: Time
    project: Name = ""


class ReportedCalls(NamedTuple):
    """Calls of a project that wait at a replica: their number, and since when the next of them has waited."""

    number: Number
    since: Time


class Replica(BaseModel):
    """Last report of a replica, of the time `seen`; `waiting` has the calls at it by the short name of their project.

    `counted` is the start of the observation (`LimitRecord.observed`) for which the replica has added what it sent
    before: it does so once for each.
    """

    seen: Time = 0.0
    waiting: dict[Name, ReportedCalls] = Field(default_factory=dict)
    counted: Time = 0.0


class Recovery(BaseModel):
    """End of an outage of the store, in which each replica used its part of the limit on its own.

    No permit is granted while the report of a replica is `missing`, until `until` at the latest. Then the part of each
    replica that is still missing counts as used: `requests` and `tokens`.
    """

    until: Time
    missing: list[Name]
    requests: Number
    tokens: Number


class LimitRecord(BaseModel):
    """State of one key and endpoint, shared by all replicas.

    `requests` and `tokens` are what was used in the last 60 s. `open` has the attempts that run, by their ids.
    `replicas` has the last report of each replica, by its name. `turns` are those of projects, by their short names.

    `paused_until` is the end of the pause after the last 429. `refused_at` is when the last 429 was counted.
    `observed` is when a 429 began an observation, in which requests are counted although no limit is set; 0: there is
    none.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[3] = 3
    requests: Window = Field(default_factory=Window)
    tokens: Window = Field(default_factory=Window)
    open: dict[Name, OpenAttempt] = Field(default_factory=dict)
    replicas: dict[Name, Replica] = Field(default_factory=dict)
    turns: Turns = Field(default_factory=Turns)
    paused_until: Time = 0.0
    refused_at: Time = 0.0
    observed: Time = 0.0
    learned: LearnedLimit | None = None
    recovery: Recovery | None = None

    # Limits in force.

    def effective(self, rates: Rates, now: float) -> Rates:
        """Return the limits in force: the configured `rates`, with the learned limit if they have none of requests."""
        if rates.requests is None and self.learned is not None and self.learned.until > now:
            return Rates(max(MIN_LEARNED, self.learned.limit), rates.tokens, rates.concurrent)
        return rates

    def paused_s(self, now: float) -> float:
        """Return the seconds until a pause after a 429, or after an outage, ends."""
        recovering_s = 0.0
        if self.recovery is not None and self.recovery.missing:
            recovering_s = self.recovery.until - now
        return max(0.0, self.paused_until - now, recovering_s)

    @property
    def room(self) -> int:
        """How many more attempts the record can hold."""
        return max(0, MAX_ENTRIES - len(self.open) - len(self.replicas))

    def has_room(self, rates: Rates, unit: int, before: int, now: float) -> bool:
        """Return whether a request of `unit` tokens may be sent now, after `before` others of the same size."""
        if self.paused_s(now) or before >= self.room:
            return False
        if rates.requests is None and self.is_observed(now) and not self._may_follow(before):
            return False
        if rates.requests is not None and not self.requests.has_room(rates.requests, 1, before, now):
            return False
        if rates.tokens is not None and not self.tokens.has_room(rates.tokens, unit, before, now):
            return False
        return rates.concurrent is None or len(self.open) + before < rates.concurrent

    def _may_follow(self, before: int) -> bool:
        """Return whether a request may be sent after a pause, without a known limit, after `before` others.

        The first `_ALONE` requests run one after another. From then on, each answer lets one more run at the same time.
        If all that waited were sent at once, all would get 429s.
        """
        # A request that was sent when the pause ended may have a time before its end, as times are rounded.
        running = sum(attempt.at > self.paused_until - MARGIN_S for attempt in self.open.values())
        answered = self.requests.since(self.paused_until) - running
        at_once = 1 + max(0, answered - _ALONE)
        return running + before < at_once

    def wait_s(self, rates: Rates, unit: int, place: int, request_s: float, now: float) -> float:
        """Return a lower bound of the seconds until `place` requests of `unit` tokens may be sent, the last included.

        One request takes at least `request_s` seconds.
        """
        waits = [self.paused_s(now)]
        if rates.requests is not None:
            waits.append(self.requests.wait_s(rates.requests, 1, place, now))
        if rates.tokens is not None:
            waits.append(self.tokens.wait_s(rates.tokens, unit, place, now))
        if rates.concurrent is not None:
            free = max(0, rates.concurrent - len(self.open))
            # The running requests may all end now, so the next `concurrent` ones need not wait for each other either.
            full_rounds = max(0, place - 1 - free) // rates.concurrent
            waits.append(full_rounds * request_s)
        return max(waits)

    def pace(self, rates: Rates, unit: int, now: float) -> None:
        """Bring the pace of both windows up to now; a request takes `unit` tokens."""
        if rates.requests is not None:
            self.requests.pace(rates.requests, 1, now)
        if rates.tokens is not None:
            self.tokens.pace(rates.tokens, unit, now)

    # Attempts.

    def reserve(self, attempt: Attempt, rates: Rates) -> None:
        """Count an attempt as used, from the time at which it is sent."""
        project = project_key(attempt.project) if rates.concurrent is not None else ""
        self.open[attempt.id] = OpenAttempt(
            at=round(attempt.at, 3), tokens=attempt.need.tokens, until=round(attempt.until, 1), project=project
        )
        self.requests.add(attempt.at, attempt.need.requests, paced=rates.requests is not None)
        self.tokens.add(attempt.at, attempt.need.tokens, paced=rates.tokens is not None)

    def move(self, attempt: Attempt) -> None:
        """Count an open attempt from the later time at which it was really sent."""
        before = self.open[attempt.id]
        self.open[attempt.id] = before._replace(at=round(attempt.at, 3))
        for window, amount in ((self.requests, 1), (self.tokens, before.tokens)):
            window.add(before.at, -amount, paced=False)
            window.add(attempt.at, amount, paced=False)

    def settle(self, name: str, requests: int, tokens: int, rates: Rates) -> None:
        """Replace the estimate of the open attempt with the id `name` by its cost.

        A request that was not sent gives its credit of requests back. Fewer tokens than estimated give none back: else
        the large requests of one project would follow the small ones of another at once, whatever they cost.
        """
        settled = self.open.pop(name)
        if requests != 1:
            self.requests.add(settled.at, requests - 1, paced=rates.requests is not None)
        if tokens != settled.tokens:
            is_more = tokens > settled.tokens
            self.tokens.add(settled.at, tokens - settled.tokens, paced=is_more and rates.tokens is not None)

    # What 429s teach.

    def refuse(self, refusal: RateRefusal, now: float) -> None:
        """Pause the key after a 429, and lower or learn its limit.

        A first 429 begins an observation. A 429 during that teaches a limit: the number of requests that the upstream
        accepted in the last 60 s. Requests that were sent before the last counted 429 belong to its burst, and teach
        nothing.
        """
        last_pause_ended = self.paused_until
        self.paused_until = max(self.paused_until, refusal.pause_until)
        if not refusal.teaches or refusal.sent_at <= self.refused_at:
            return
        self.refused_at = now
        # The upstream has counted the requests that came before the refused one, also those that still run.
        later = sum(attempt.at >= refusal.sent_at for attempt in self.open.values())
        accepted = self.requests.total(now) - later
        if self.learned is not None:
            self.learned.lower(accepted, now)
        elif self.observed and now <= last_pause_ended + OBSERVED_S:
            self.learned = LearnedLimit.of(accepted, now)
        else:
            self.observed = now

    def probe(self, now: float) -> bool:
        """Raise a learned limit by a step if that is due; return whether it was raised."""
        return self.learned is not None and self.learned.probe(now)

    def is_observed(self, now: float) -> bool:
        """Return whether requests must be counted although no limit is set."""
        is_learned = self.learned is not None and self.learned.until > now
        return is_learned or (self.observed > 0 and now <= self.paused_until + OBSERVED_S)

    # Replicas.

    def known_replicas(self, name: str) -> list[str]:
        """Return the replicas that reported in the 60 s before the newest report, and `name`.

        The last 60 s do not count: in an outage of the store, replicas run on but cannot report.
        """
        newest = max((replica.seen for replica in self.replicas.values()), default=0.0)
        reported = [key for key, replica in self.replicas.items() if replica.seen > newest - REPLICA_S]
        return sorted({name, *reported})

    def waiting_elsewhere(self, name: str, now: float) -> dict[str, list[ReportedCalls]]:
        """Return what waits at other replicas than `name` by project, those that have waited longest last."""
        found: dict[str, list[ReportedCalls]] = {}
        for key, replica in self.replicas.items():
            if key != name and replica.seen > now - WAITING_S:
                for project, calls in replica.waiting.items():
                    found.setdefault(project, []).append(calls)
        return {project: sorted(calls, key=lambda one: -one.since) for project, calls in found.items()}

    def count_observed(self, name: str, sent: SentRequests, now: float) -> bool:
        """Count, once for each observation, what the replica `name` sent in the 60 s before it began.

        A limit is learned from these requests, too. Return whether the record changed.
        """
        replica = self.replicas.get(name) or Replica()
        if not self.observed or replica.counted == self.observed:
            return False
        replica.counted = self.observed
        self.replicas[name] = replica
        for at in sent.counting(now):
            if at <= self.observed:
                self.requests.add(at, 1, paced=False)
        return True

    def report_back(self, name: str) -> bool:
        """Record that a replica is back after an outage; return whether its report was missing."""
        if self.recovery is None or name not in self.recovery.missing:
            return False
        self.recovery.missing.remove(name)
        return True

    def recover(self, name: str, rates: Rates, lost_at: float, now: float) -> None:
        """End an outage that the replica `name` has seen since `lost_at`: wait until the others have reported, too.

        The first replica that is back calculates the part of each: an equal part of what was left of the limits.
        """
        silent = [other for other in self.known_replicas(name) if other != name and self.replicas[other].seen < lost_at]
        if not silent or self.recovery is not None:
            return
        parts = len(silent) + 1

        def part(limit: int | None, window: Window) -> int:
            return 0 if limit is None else max(0, limit - window.total(now)) // parts

        self.recovery = Recovery(
            until=now + RECOVERY_S,
            missing=silent,
            requests=part(rates.requests, self.requests),
            tokens=part(rates.tokens, self.tokens),
        )

    # Times.

    def correct(self, now: float) -> None:
        """Correct what no replica can have written."""
        self.paused_until = min(self.paused_until, now + MAX_PAUSE_S)
        self.refused_at = min(self.refused_at, now + MARGIN_S)
        self.observed = min(self.observed, now + MARGIN_S)
        for replica in self.replicas.values():
            replica.seen = min(replica.seen, now + MARGIN_S)
        if self.learned is not None:
            self.learned.correct(now)
        if self.recovery is not None:
            self.recovery.until = min(self.recovery.until, now + RECOVERY_S)

    def drop_expired(self, rates: Rates, now: float) -> None:
        """Drop what no longer counts. An attempt that nobody has settled in time stays counted as used."""
        self.requests.drop_expired(now)
        self.tokens.drop_expired(now)
        self.open = {name: attempt for name, attempt in self.open.items() if now < attempt.until < now + MAX_CALL_S}
        newest = sorted(self.replicas.items(), key=lambda item: item[1].seen)[-MAX_REPLICAS:]
        self.replicas = {name: replica for name, replica in newest if replica.seen > now - REPLICA_S}
        # A project can be ahead of others by as many turns as the key may send in the window.
        self.turns.limit_ahead(float(self.effective(rates, now).requests or COUNTS_S))
        self._end_observation(now)
        self._end_recovery(now)

    def _end_observation(self, now: float) -> None:
        if self.learned is not None and self.learned.until <= now:
            self.learned = None
            self.observed = 0.0
        if self.observed and not self.is_observed(now):
            self.observed = 0.0

    def _end_recovery(self, now: float) -> None:
        recovery = self.recovery
        if recovery is None or (recovery.missing and recovery.until > now):
            return
        for _ in recovery.missing:
            self.requests.add(now, recovery.requests, paced=False)
            self.tokens.add(now, recovery.tokens, paced=False)
        self.recovery = None


def parse(stored: bytes | None) -> LimitRecord | None:
    """Return a stored record; None for anything else, also for another version."""
    try:
        return LimitRecord.model_validate_json(stored or b"")
    except ValidationError:
        return None
