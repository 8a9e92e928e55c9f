"""Outages, in which no call can be finished, and the responses of `/readyz` of every replica. Pure.

The journal has `{"outage": why, "began": s, "since": s, "until": s, "over": s, "deliveries": n}` for every outage and
`{"probe": replica, "at": s, "ready": bool}` for every response of `/readyz`, in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

DEADLINE_S = 30.0
"""Seconds for which the kernel's worker waits for a turn's results; then its watchdog reports a timeout."""

JUDGED_FROM_S = 10.0
REACTION_S = 6.0
"""`/readyz` must show the start and the end of an outage longer than `JUDGED_FROM_S` within `REACTION_S`."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Outage:
    """A period in which no call could be finished.

    A fault takes time to take effect and to be undone: calls surely fail from `since` to `until`, and may fail from
    `began` to `over`. `deliveries` counts those of the durable in between, None if NATS did not respond.
    """

    why: str
    began: float
    since: float
    until: float
    over: float
    deliveries: int | None = None

    @property
    def seconds(self) -> float:
        return self.until - self.since


@dataclass(frozen=True, slots=True)
class Probe:
    """Response of a replica's `/readyz` to a request that was sent at `at`; no response counts as not ready."""

    replica: int
    at: float
    ready: bool


@dataclass(frozen=True, slots=True)
class Reaction:
    """Seconds until a replica was unready after the start of an outage, and until it was ready after its end.

    `ready_after_s` is None if it did not become ready before the next outage or the end of the run.
    """

    outage: str
    replica: int
    unready_after_s: float
    ready_after_s: float | None

    @property
    def late(self) -> bool:
        return self.unready_after_s > REACTION_S or self.ready_after_s is None or self.ready_after_s > REACTION_S


def outages(lines: Iterable[Mapping[str, Any]]) -> list[Outage]:
    """Return the outages in a journal's lines, in order."""
    found = [
        Outage(line["outage"], line["began"], line["since"], line["until"], line["over"], line["deliveries"])
        for line in lines
        if "outage" in line
    ]
    return sorted(found, key=lambda outage: outage.began)


def probes(lines: Iterable[Mapping[str, Any]]) -> list[Probe]:
    """Return the responses of `/readyz` in a journal's lines."""
    return [Probe(line["probe"], line["at"], line["ready"]) for line in lines if "probe" in line]


def covered(spans: Iterable[Span], since: float, until: float) -> float:
    """Return the seconds between `since` and `until` that any of the spans covers."""
    seconds = 0.0
    for began, ended in sorted(spans):
        seconds += max(0.0, min(ended, until) - max(began, since))
        since = max(since, ended)
    return seconds


def waited(periods: Sequence[Outage], placed_at: float, answered_at: float) -> float:
    """Return the seconds that a call waited for its result, without those that outages covered.

    A call is late if they exceed `DEADLINE_S`: only outages stop the clock.
    """
    spans = [(outage.began, outage.over) for outage in periods]
    return answered_at - placed_at - covered(spans, placed_at, answered_at)


def reactions(periods: Sequence[Outage], answers: Sequence[Probe]) -> list[Reaction]:
    """Return the reaction of every replica to every outage longer than `JUDGED_FROM_S`."""
    replicas = sorted({probe.replica for probe in answers})
    began = [*(outage.began for outage in periods), float("inf")]
    return [
        _reaction(outage, next_began, replica, [probe for probe in answers if probe.replica == replica])
        for outage, next_began in zip(periods, began[1:], strict=True)
        if outage.seconds > JUDGED_FROM_S
        for replica in replicas
    ]


def _reaction(outage: Outage, next_began: float, replica: int, answers: Sequence[Probe]) -> Reaction:
    """Return a replica's reaction: until the last wrong response in the outage, so that flapping is seen.

    An outage without any response counts as if all of its responses were wrong.
    """
    during = [probe for probe in answers if outage.since <= probe.at < outage.until]
    wrong = [probe.at for probe in during if probe.ready] if during else [outage.until]
    right = [probe.at for probe in answers if probe.ready and outage.over <= probe.at < next_began]
    return Reaction(
        outage.why,
        replica,
        round(max(wrong, default=outage.since) - outage.since, 2),
        round(min(right) - outage.over, 2) if right else None,
    )


def unready_otherwise(periods: Sequence[Outage], answers: Sequence[Probe]) -> float:
    """Return the longest time for which a replica was unready outside of outages, in seconds.

    It includes the restart of a replica that was killed.
    """
    spans = [(outage.began, outage.over + REACTION_S) for outage in periods]
    longest = 0.0
    for replica in {probe.replica for probe in answers}:
        said = sorted((probe.at, probe.ready) for probe in answers if probe.replica == replica)
        unready = [(at, until) for (at, ready), (until, _) in pairwise(said) if not ready]
        longest = max(longest, sum(until - at - covered(spans, at, until) for at, until in unready))
    return round(longest, 2)


def readiness(found: Sequence[Reaction]) -> dict[str, Any]:
    """Return the slowest reaction of each kind; None if a replica never became ready again."""
    ready = [reaction.ready_after_s for reaction in found]
    return {
        "judged": len(found),
        "slowest_unready_s": max((reaction.unready_after_s for reaction in found), default=None),
        "slowest_ready_s": None if None in ready else max((at for at in ready if at is not None), default=None),
        "late": [_described(reaction) for reaction in found if reaction.late],
    }


def _described(reaction: Reaction) -> str:
    ready = "not ready again" if reaction.ready_after_s is None else f"ready after {reaction.ready_after_s} s"
    return f"{reaction.outage}: replica {reaction.replica} unready after {reaction.unready_after_s} s, {ready}"
