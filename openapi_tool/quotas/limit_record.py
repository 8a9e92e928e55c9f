"""Shared record of one key and endpoint (ADR 9): what was used, what runs, who waits, and what 429s have taught.

Any client that may write the bucket may store anything: `decode` checks types, `correct` times in the future, so that a
forged record has no effect for longer than a real one. No I/O; every time is the server's, in seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.fair_queue import Turns, project_key
from openapi_tool.quotas.amounts import Attempt, Number, Time
from openapi_tool.quotas.window import COUNTS_S, MARGIN_S, Window

REPLICA_S = 60.0  # from its last report until a replica is removed
WAITING_S = 2.0  # for which what waits at a replica counts after its last report: then it was killed
MAX_REPLICAS = 1_000
MAX_ENTRIES = 2_400  # attempts and replicas; a record may have 256 KiB
MAX_CALL_S = 86_400.0 + 600.0
MAX_PAUSE_S = 120.0
RECOVERY_S = 5.0  # after an outage, until the part of a silent replica counts as used
OBSERVED_S = 60.0  # after a pause, in which another 429 teaches a limit
LEARNED_S = 3600.0
PROBE_S = 180.0  # until a learned limit is probed; each failure doubles it, up to MAX_FAILURES
MAX_FAILURES = 3
_ALONE = 3  # requests after a pause that are sent one after another
MIN_LEARNED, MAX_LEARNED = 10, 1_000_000
"""Without the lower bound, 429s that other users of the key cause would stop a service that hardly uses it."""

Name = Annotated[str, Field(max_length=100)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits: requests and tokens in any 60 s, concurrent requests; None is unlimited."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None

    @property
    def limited(self) -> bool:
        """Return whether anything is limited."""
        return self.requests is not None or self.tokens is not None or self.concurrent is not None


class OpenAttempt(NamedTuple):
    """Attempt whose cost is not known yet; `project` only if the number of concurrent requests is limited."""

    at: Time
    tokens: Number
    until: Time
    project: Name = ""


class WaitingCalls(NamedTuple):
    """Calls of a project that wait at a replica: their number, and since when the next of them has waited."""

    number: Number
    since: Time


class Replica(BaseModel):
    """What a replica reports. It has counted what it sent before the observation that began at `counted`."""

    seen: Time = 0.0
    waiting: dict[Name, WaitingCalls] = Field(default_factory=dict)
    counted: Time = 0.0


class Learned(BaseModel):
    """Limit of requests that 429s have taught. It is probed upwards by `step`; `probing`: since `changed`.

    `failures` of probes in succession: each doubles the time until the next one.
    """

    limit: Number
    until: Time
    changed: Time
    step: Annotated[int, Field(ge=1, le=MAX_LEARNED)] = 1
    probing: bool = False
    failures: Annotated[int, Field(ge=0, le=MAX_FAILURES)] = 0


class Recovery(BaseModel):
    """End of an outage of the store. Until `until` no permit is granted while the report of a replica is `missing`.

    Then the part of each that is still missing counts as used: `requests` and `tokens`.
    """

    until: Time
    missing: list[Name]
    requests: Number
    tokens: Number


class LimitRecord(BaseModel):
    """State of one key and endpoint.

    `refused_at` is the time of the last 429 that was counted; since `observed` (0: not) requests are counted although
    no limit is set.
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
    learned: Learned | None = None
    recovery: Recovery | None = None

    # Limits in force.

    def effective(self, rates: Rates, now: float) -> Rates:
        """Return the limits in force: configured or learned."""
        if rates.requests is None and self.learned is not None and self.learned.until > now:
            return Rates(max(MIN_LEARNED, self.learned.limit), rates.tokens, rates.concurrent)
        return rates

    def paused_s(self, now: float) -> float:
        """Return the seconds until a pause after a 429, or after an outage, ends."""
        recovering_s = self.recovery.until - now if self.recovery is not None and self.recovery.missing else 0.0
        return max(0.0, self.paused_until - now, recovering_s)

    @property
    def room(self) -> int:
        """How many more attempts the record can hold."""
        return max(0, MAX_ENTRIES - len(self.open) - len(self.replicas))

    def has_room(self, rates: Rates, unit: int, before: int, now: float) -> bool:
        """Return whether a request of `unit` tokens may be sent now, after `before` others."""
        if self.paused_s(now) or before >= self.room:
            return False
        if rates.requests is None and self.is_observed(now) and not self._may_follow(before):
            return False
        return (
            (rates.requests is None or self.requests.has_room(rates.requests, 1, before, now))
            and (rates.tokens is None or self.tokens.has_room(rates.tokens, unit, before, now))
            and (rates.concurrent is None or len(self.open) + before < rates.concurrent)
        )

    def _may_follow(self, before: int) -> bool:
        """Return whether one more request may follow those that were sent since a pause, without a known limit.

        First one at a time, after `_ALONE` answers twice as many after each: all that waited would get 429s at once.
        """
        # Those sent in the moment of its end have a rounded time.
        running = sum(one.at > self.paused_until - MARGIN_S for one in self.open.values())
        sent = self.requests.since(self.paused_until)
        return running + before < 1 + max(0, sent - running - _ALONE)

    def wait_s(self, rates: Rates, unit: int, place: int, request_s: float, now: float) -> float:
        """Return a lower bound of the seconds until `place` requests may be sent, the last of them included.

        One request takes at least `request_s` seconds.
        """
        waits = [self.paused_s(now)]
        if rates.requests is not None:
            waits.append(self.requests.wait_s(rates.requests, 1, place, now))
        if rates.tokens is not None:
            waits.append(self.tokens.wait_s(rates.tokens, unit, place, now))
        if rates.concurrent is not None:  # the running ones may end now
            rounds = max(0, place - 1 - max(0, rates.concurrent - len(self.open))) // rates.concurrent
            waits.append(rounds * request_s)
        return max(waits)

    def pace(self, rates: Rates, unit: int, now: float) -> None:
        """Bring the pace of both windows up to now."""
        if rates.requests is not None:
            self.requests.pace(rates.requests, 1, now)
        if rates.tokens is not None:
            self.tokens.pace(rates.tokens, unit, now)

    # Attempts.

    def reserve(self, attempt: Attempt, rates: Rates) -> None:
        """Count an attempt as used, from the time at which it is sent."""
        project = project_key(attempt.project) if rates.concurrent is not None else ""
        at, until = round(attempt.at, 3), round(attempt.until, 1)
        self.open[attempt.id] = OpenAttempt(at, attempt.need.tokens, until, project)
        self.requests.add(attempt.at, attempt.need.requests, paced=rates.requests is not None)
        self.tokens.add(attempt.at, attempt.need.tokens, paced=rates.tokens is not None)

    def move(self, attempt: Attempt) -> None:
        """Count an open attempt from the later time at which it was really sent."""
        at, tokens, until, project = self.open[attempt.id]
        self.open[attempt.id] = OpenAttempt(round(attempt.at, 3), tokens, until, project)
        for window, amount in ((self.requests, 1), (self.tokens, tokens)):
            window.add(at, -amount, paced=False)
            window.add(attempt.at, amount, paced=False)

    def settle(self, name: str, requests: int, tokens: int, rates: Rates) -> None:
        """Replace the estimate of an open attempt by its cost.

        A lower cost is no credit for the pace: else the large requests of one project would follow the small ones of
        another at once, however much they cost.
        """
        settled = self.open.pop(name)
        if requests != 1:
            self.requests.add(settled.at, requests - 1, paced=rates.requests is not None)
        if tokens != settled.tokens:
            is_more = tokens > settled.tokens and rates.tokens is not None
            self.tokens.add(settled.at, tokens - settled.tokens, paced=is_more)

    # What 429s teach.

    def refuse(self, sent_at: float, pause_until: float, now: float, *, teaches: bool) -> None:
        """Record a 429 of a request that was sent at `sent_at`.

        Those of requests that were sent before the last counted 429 belong to the same burst.
        """
        ended = self.paused_until
        self.paused_until = max(self.paused_until, pause_until)
        if not teaches or sent_at <= self.refused_at:
            return
        # Of those that still run, the upstream has counted the ones that came before the refused one.
        accepted = self.requests.total(now) - sum(one.at >= sent_at for one in self.open.values())
        if self.learned is not None:
            self._lower(self.learned, accepted, now)
        elif self.observed and now <= ended + OBSERVED_S:
            self.learned = Learned(limit=max(MIN_LEARNED, accepted), until=now + LEARNED_S, changed=now)
        else:
            self.observed = now
        self.refused_at = now

    def _lower(self, learned: Learned, accepted: int, now: float) -> None:
        limit = learned.limit - learned.step if learned.probing else min(learned.limit - 1, accepted)
        learned.limit = max(MIN_LEARNED, limit)
        learned.failures = min(MAX_FAILURES, learned.failures + 1) if learned.probing else 0
        learned.step = 1
        learned.probing = False
        learned.changed = now
        learned.until = now + LEARNED_S

    def probe(self, now: float) -> bool:
        """Raise a learned limit by a step if that is due; return whether it did."""
        learned = self.learned
        if learned is None or now - learned.changed < PROBE_S * 2**learned.failures:
            return False
        if learned.probing:
            learned.step = min(MAX_LEARNED, 2 * learned.step)
            learned.failures = 0
        learned.limit = min(MAX_LEARNED, learned.limit + learned.step)
        learned.probing = True
        learned.changed = now
        return True

    def is_observed(self, now: float) -> bool:
        """Return whether requests must be counted although no limit is set."""
        is_learned = self.learned is not None and self.learned.until > now
        return is_learned or (self.observed > 0 and now <= self.paused_until + OBSERVED_S)

    # Replicas.

    def known_replicas(self, name: str) -> list[str]:
        """Return the replicas of the 60 s before the newest report, `name` included.

        Not of the last 60 s: in an outage of the store, replicas run on but cannot report.
        """
        newest = max((replica.seen for replica in self.replicas.values()), default=0.0)
        return sorted({name, *(key for key, replica in self.replicas.items() if replica.seen > newest - REPLICA_S)})

    def waiting_elsewhere(self, name: str, now: float) -> dict[str, list[WaitingCalls]]:
        """Return what waits at the other replicas by project, those that have waited longest last."""
        found: dict[str, list[WaitingCalls]] = {}
        for key, replica in self.replicas.items():
            if key != name and replica.seen > now - WAITING_S:
                for project, calls in replica.waiting.items():
                    found.setdefault(project, []).append(calls)
        return {project: sorted(calls, key=lambda one: -one.since) for project, calls in found.items()}

    def recover(self, name: str, rates: Rates, lost_at: float, now: float) -> None:
        """Report after an outage that began at `lost_at`: wait for the others which the outage concerned, too."""
        silent = [other for other in self.known_replicas(name) if other != name and self.replicas[other].seen < lost_at]
        if silent and self.recovery is None:
            parts = len(silent) + 1
            free = [
                0 if limit is None else max(0, limit - window.total(now)) // parts
                for limit, window in ((rates.requests, self.requests), (rates.tokens, self.tokens))
            ]
            self.recovery = Recovery(until=now + RECOVERY_S, missing=silent, requests=free[0], tokens=free[1])

    # Times.

    def correct(self, now: float) -> None:
        """Correct what no replica can have written."""
        self.paused_until = min(self.paused_until, now + MAX_PAUSE_S)
        self.refused_at, self.observed = min(self.refused_at, now + MARGIN_S), min(self.observed, now + MARGIN_S)
        for replica in self.replicas.values():
            replica.seen = min(replica.seen, now + MARGIN_S)
        if (learned := self.learned) is not None:
            learned.limit = min(learned.limit, MAX_LEARNED)
            learned.changed, learned.until = min(learned.changed, now), min(learned.until, now + LEARNED_S)
        if self.recovery is not None:
            self.recovery.until = min(self.recovery.until, now + RECOVERY_S)

    def drop_expired(self, rates: Rates, now: float) -> None:
        """Drop what no longer counts. An attempt that nobody has settled in time stays counted as used."""
        self.requests.drop_expired(now)
        self.tokens.drop_expired(now)
        self.open = {name: one for name, one in self.open.items() if now < one.until < now + MAX_CALL_S}
        newest = sorted(self.replicas.items(), key=lambda item: item[1].seen)[-MAX_REPLICAS:]
        self.replicas = {name: replica for name, replica in newest if replica.seen > now - REPLICA_S}
        self.turns.limit_ahead(float(self.effective(rates, now).requests or COUNTS_S))
        if self.learned is not None and self.learned.until <= now:
            self.learned = None
            self.observed = 0.0
        if self.observed and not self.is_observed(now):
            self.observed = 0.0
        if (recovery := self.recovery) is not None and (not recovery.missing or recovery.until <= now):
            for _ in recovery.missing:
                self.requests.add(now, recovery.requests, paced=False)
                self.tokens.add(now, recovery.tokens, paced=False)
            self.recovery = None


def parse(stored: bytes | None) -> LimitRecord | None:
    """Return a stored record; None for anything else or another version."""
    try:
        return LimitRecord.model_validate_json(stored or b"")
    except ValidationError:
        return None
