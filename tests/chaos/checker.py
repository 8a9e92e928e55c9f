"""Periods of faults, and the check of every call of a run.

The journal has one JSON object per line, with times in seconds since the epoch:

- `{"call": …}`: a command that was sent;
- `{"crash": time}`: a process was killed, or, with `dead_s`, frozen for as long;
- `{"fault": kind, "began": time, "ended": time}`: a fault was injected;
- `{"discarded": sequence, "cause": word, "at": time}`: an executor logged that it discarded a dead letter;
- `{"dead_letter": call id, "at": time}`: a fault removed a dead letter that was written at this time;
- `{"outage": why, "began": time, "since": time, "until": time, "over": time, "deliveries": number}`: see `Outage`;
- `{"probe": replica, "at": time, "ready": bool}`: a response of `/readyz`.

A call is

- answered if it has one result card, one inbox row and one report edge that belong together, or a dead letter. If the
  stream of dead letters was full, the log line about the discarded dead letter counts as one: a full stream must not
  prevent the settlement of a command;
- lost if its command reached the stream, but it was not answered within `deadline_s` of its placement, outages not
  counted; `late` lists those that were answered later;
- doubled if it has more than one card, row or edge;
- refused if it got only a dead letter although a turn waited, or a failure although it had time left. Profiles with
  upstream errors or limits cause such failures, and do not judge this finding;
- requested too late if the upstream received a request for it after `DEADLINE_S`.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import nats
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import ServiceUnavailableError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from openapi_tool.protocol.dialect import DEFAULT_VERSION

DEADLINE_S = 30.0
"""Seconds for which the kernel's worker waits for a turn's results; then its watchdog reports a timeout."""

JUDGED_FROM_S = 10.0
REACTION_S = 6.0
"""`/readyz` must show the start and the end of an outage longer than `JUDGED_FROM_S` within `REACTION_S`."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Outage:
    """A period in which no call could be finished.

    A fault needs time to take effect and to be undone: calls certainly fail from `since` to `until`, and may fail from
    `began` to `over`. `deliveries` counts deliveries of the durable meanwhile, None if NATS did not respond.
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


COMMANDS, DEAD_LETTERS = f"cg_cmd_{DEFAULT_VERSION}", "openapi_tool_dead_letters"
_BATCH, _MINUTE_S = 500, 60.0
_READ_AGAIN_S, _READ_WITHIN_S = 0.5, 20.0
_OK = 200
_SLOWEST = 3
_EARLY_FAILURE_S = 25.0
"""A call that fails earlier is refused: it had time left, as the executor's own deadline is 27 s."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Parsed journal of a run: `calls` by id, `crashes` as (from, to), faults, outages, responses of `/readyz`.

    `letters`: by call, the time at which a dead letter was written that a fault removed later. `discarded`: executors'
    log lines about dead letters that they could not store.
    """

    calls: Mapping[str, Mapping[str, Any]]
    crashes: Sequence[tuple[float, float]]
    faults: Sequence[Mapping[str, Any]]
    outages: Sequence[Outage] = ()
    probes: Sequence[Probe] = ()
    letters: Mapping[str, float] = field(default_factory=dict)
    discarded: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Delay:
    """Seconds from the first crash during a call to its result, and the faults during this time.

    `delay_s` excludes `upstream_s` and `held_s`, for which the upstream held a request without ever responding.
    """

    tool_call_id: str
    delay_s: float
    upstream_s: float
    held_s: float
    crashes: int
    faults: list[str]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a stream; `at` is when the server stored it, in seconds since the epoch."""

    headers: Mapping[str, str]
    data: bytes
    at: float


async def check(
    dsn: str,
    nats_urls: Sequence[str],
    path: Path,
    requests: Iterable[Mapping[str, Any]],
    deadline_s: float = math.inf,
    version: str = DEFAULT_VERSION,
    per_minute: float = math.inf,
) -> dict[str, Any]:
    """Return the findings about one kernel of a run; lists contain ids of calls."""
    journal = read_journal(path)
    calls = journal.calls
    queries = {call["query"] for call in calls.values()}
    requests = list(requests)
    most = most_in_a_minute(request["at"] for request in requests)
    requests = [request for request in requests if _query(request) in queries]
    rows = await _rows(dsn)
    doorbells = await messages(nats_urls, f"cg_cmd_{version}", "cmd.agent")
    turns = Counter(_doorbell_key(doorbell, version) for doorbell in doorbells)
    letters = await messages(nats_urls, DEAD_LETTERS, "")
    answered = {call_id for call_id in calls if is_complete(rows[call_id])}
    sent = {call_id for call_id, call in calls.items() if call["published"]}
    discarded = discarded_letters(journal)
    dead_lettered_at = {**discarded, **dead_lettered(letters), **journal.letters}
    answered_at = {call_id: at for call_id, at in dead_lettered_at.items() if call_id in calls}
    answered_at |= {call_id: rows[call_id]["rows"][0]["at"] for call_id in answered}
    late = late_calls(journal, answered_at, deadline_s)
    return {
        "calls": len(sent),
        "answered": len(answered),
        "lost": sorted((sent - set(answered_at)) | late),
        "late": sorted(late),
        "faults_during_lost_calls": dict(faults_during(journal, (sent - set(answered_at)) | late)),
        "doubled": sorted(call_id for call_id in calls if any(len(found) > 1 for found in rows[call_id].values())),
        "refused": sorted(call_id for call_id in answered_at if refused(calls[call_id], rows[call_id])),
        "most_requests_in_60_s": most,
        "over_limit": max(0, most - per_minute),
        "requested_too_late": sorted(requested_too_late(calls, requests)),
        "statuses": dict(Counter(rows[call_id]["cards"][0]["status"] for call_id in answered)),
        "upstream_2xx_per_call": _per_call(calls, sent, requests, whole_only=True),
        "upstream_requests_per_call": _per_call(calls, sent, requests, whole_only=False),
        **_delays_after_crashes(delays(journal, rows, _held(requests))),
        "max_delay_s": _longest(_latency(calls[call_id], rows[call_id]) for call_id in answered),
        "doorbells_missing": sum(calls[call_id]["doorbell"] not in turns for call_id in answered),
        "doorbells_repeated": turns.total() - len(turns),
        "dead_letters": dict(Counter(json.loads(letter.data)["reason"] for letter in letters)),
        "dead_letters_discarded": len(discarded),
        "outages": [_in_outage(outage, requests) for outage in journal.outages],
        "readiness": readiness(reactions(journal.outages, journal.probes)),
        "unready_otherwise_s": unready_otherwise(journal.outages, journal.probes),
    }


def _doorbell_key(doorbell: Message, version: str) -> str | None:
    """Return the turn of a doorbell; in v1r3, whose doorbells name none, its trace."""
    if version == DEFAULT_VERSION:
        return doorbell.headers.get("CG-Turn-Id")
    return doorbell.headers.get("traceparent", "--").split("-")[1]


def read_journal(path: Path) -> Journal:
    """Parse a journal."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Journal(
        {line["call"]["tool_call_id"]: line["call"] for line in lines if "call" in line},
        [(line["crash"], line["crash"] + line.get("dead_s", 0)) for line in lines if "crash" in line],
        [line for line in lines if "fault" in line],
        outages(lines),
        probes(lines),
        {line["dead_letter"]: line["at"] for line in lines if "dead_letter" in line},
        [line for line in lines if "discarded" in line],
    )


def discarded_letters(journal: Journal) -> dict[str, float]:
    """Return, by call, the time at which an executor discarded the dead letter of an unanswerable command.

    A discarded dead letter counts only if its cause is a full stream, and a fault kept the stream full at that time.
    """
    full = [outage for outage in journal.outages if outage.why == f"{DEAD_LETTERS} full"]
    at = {
        line["discarded"]: line["at"]
        for line in journal.discarded
        if line["cause"] == "full" and any(outage.began <= line["at"] <= outage.over for outage in full)
    }
    return {
        call_id: at[call["sequence"]]
        for call_id, call in journal.calls.items()
        if call["kind"] == "unanswerable" and call["sequence"] in at
    }


def late_calls(journal: Journal, answered_at: Mapping[str, float], deadline_s: float) -> set[str]:
    """Return the calls that were answered after `deadline_s`."""
    return {
        call_id
        for call_id, call in journal.calls.items()
        if call_id in answered_at and waited(journal.outages, call["placed_at"], answered_at[call_id]) > deadline_s
    }


def faults_during(journal: Journal, call_ids: Iterable[str]) -> Counter[str]:
    """Return for each kind of fault the number of calls in whose time, up to the deadline, it was injected."""
    return Counter(
        fault["fault"]
        for placed_at in (journal.calls[call_id]["placed_at"] for call_id in call_ids)
        for fault in journal.faults
        if fault["began"] < placed_at + DEADLINE_S and fault["ended"] > placed_at
    )


def most_in_a_minute(times: Iterable[float]) -> int:
    """Return the largest number of `times` (in seconds) in any window of 60 s."""
    ordered, most, first = sorted(times), 0, 0
    for last, at in enumerate(ordered):
        while at - ordered[first] >= _MINUTE_S:
            first += 1
        most = max(most, last - first + 1)
    return most


def requested_too_late(calls: Mapping[str, Mapping[str, Any]], requests: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the calls with an upstream request after the watchdog reported a timeout to their turn."""
    by_query = {call["query"]: call_id for call_id, call in calls.items() if call["published"]}
    sent = [(by_query.get(_query(request)), request["at"]) for request in requests]
    return {call_id for call_id, at in sent if call_id and at - calls[call_id]["placed_at"] > DEADLINE_S}


def _query(request: Mapping[str, Any]) -> Any:
    return json.loads(request["body"])["q"]


def dead_lettered(letters: Iterable[Message]) -> dict[str, float]:
    """Return the time of each dead letter by call id, which a command without headers has in its body."""
    found = {}
    for letter in letters:
        record = json.loads(letter.data)
        body = base64.b64decode(record["data_base64"]).decode(errors="replace")
        found[record.get("tool_call_id") or body.strip('[]"')] = letter.at
    return found


def refused(call: Mapping[str, Any], rows: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Return whether an answerable call got only a dead letter, or a failure before its deadline."""
    if call["kind"] not in ("call", "duplicate"):
        return False
    if not is_complete(rows):
        return True
    return bool(rows["cards"][0]["status"] != "success" and _latency(call, rows) < _EARLY_FAILURE_S)


def _in_outage(outage: Outage, requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the deliveries of the durable and the upstream requests during an outage."""
    sent = sum(outage.since <= request["at"] < outage.until for request in requests)
    return {
        "why": outage.why,
        "seconds": round(outage.seconds, 1),
        "deliveries": outage.deliveries,
        "upstream_requests": sent,
    }


def _delays_after_crashes(found: Iterable[Delay]) -> dict[str, Any]:
    ordered = sorted(found, key=lambda delay: -delay.delay_s)
    one = [delay for delay in ordered if delay.crashes == 1]
    return {
        "max_delay_after_crash_s": _longest(delay.delay_s for delay in one),
        "slowest_after_crash": [asdict(delay) for delay in one[:_SLOWEST]],
        "max_delay_after_several_crashes_s": _longest(delay.delay_s for delay in ordered if delay.crashes > 1),
    }


async def _rows(dsn: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return `cards`, inbox `rows` and `edges` of results, by call id."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: {"cards": [], "rows": [], "edges": []})
    connection = await asyncpg.connect(dsn)
    try:
        for row in await connection.fetch(
            "select tool_call_id, card_id, content ->> 'status' as status from cards "
            "where metadata ->> 'type' = 'tool.result' and deleted_at is null"
        ):
            found[row["tool_call_id"]]["cards"].append(dict(row))
        for row in await connection.fetch(
            "select correlation_id, payload ->> 'tool_result_card_id' as card_id, "
            "extract(epoch from created_at)::float8 as at from state.agent_inbox where message_type = 'tool_result'"
        ):
            found[row["correlation_id"]]["rows"].append(dict(row))
        for row in await connection.fetch(
            "select correlation_id from state.execution_edges where primitive = 'report' and edge_phase = 'response'"
        ):
            found[row["correlation_id"]]["edges"].append(dict(row))
    finally:
        await connection.close()
    return found


async def messages(urls: Sequence[str], stream: str, part: str) -> list[Message]:
    """Return all messages of a stream whose subject contains `part`; none if the stream does not exist."""
    client = await nats.connect(list(urls))
    try:
        jetstream = client.jetstream()
        if stream not in {info.config.name for info in await jetstream.streams_info()}:
            return []
        found = await _read_all(jetstream, stream)
    finally:
        await client.close()
    return [
        Message(message.headers or {}, message.data, message.metadata.timestamp.timestamp())
        for message in found
        if part in message.subject
    ]


@retry(
    retry=retry_if_exception_type(ServiceUnavailableError),  # a new consumer in a cluster has no leader for a moment
    stop=stop_after_delay(_READ_WITHIN_S),
    wait=wait_fixed(_READ_AGAIN_S),
    reraise=True,
)
async def _read_all(jetstream: JetStreamContext, stream: str) -> list[Msg]:
    config = ConsumerConfig(ack_policy=AckPolicy.NONE)
    subscription = await jetstream.pull_subscribe("", stream=stream, config=config)
    found: list[Msg] = []
    wanted = (await jetstream.stream_info(stream)).state.messages
    while len(found) < wanted:
        found += await subscription.fetch(min(_BATCH, wanted - len(found)), timeout=10)
    return found


def is_complete(rows: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Return whether a call has one card, one row that refers to it, and one edge."""
    return all(len(found) == 1 for found in rows.values()) and rows["rows"][0]["card_id"] == rows["cards"][0]["card_id"]


def _longest(seconds: Iterable[float]) -> float:
    return round(max(seconds, default=0.0), 2)


def _latency(call: Mapping[str, Any], rows: Mapping[str, list[dict[str, Any]]]) -> float:
    return float(rows["rows"][0]["at"]) - float(call["placed_at"])


def delays(
    journal: Journal, rows: Mapping[str, Any], held: Mapping[str, Sequence[tuple[float, float]]]
) -> Iterable[Delay]:
    """Yield the delay of every call that waited during a crash; `held` has spans (from, to) by query."""
    for call_id, call in journal.calls.items():
        if not is_complete(rows[call_id]) or call["kind"] == "poison":
            continue
        placed_at, answered_at = call["placed_at"], rows[call_id]["rows"][0]["at"]
        crashes = [crash for crash in journal.crashes if placed_at <= crash[0] < answered_at]
        if not crashes:
            continue
        first, dead_until = min(at for at, _ in crashes), max(until for _, until in crashes)
        held_s = covered(held.get(call["query"], ()), dead_until, answered_at)
        delay_s = answered_at - first - call["upstream_s"] - held_s
        during = [
            f"{fault['fault']} {fault['began'] - first:+.1f} s"
            for fault in journal.faults
            if fault["began"] < answered_at and fault["ended"] > placed_at
        ]
        yield Delay(call_id, round(delay_s, 2), call["upstream_s"], round(held_s, 2), len(crashes), during)


def _held(requests: Iterable[Mapping[str, Any]]) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Return the spans in which the upstream held requests without ever responding, by query."""
    found = defaultdict(list)
    for request in requests:
        if request.get("hung") and "ended_at" in request:
            found[_query(request)].append((request["at"], request["ended_at"]))
    return found


def _per_call(
    calls: Mapping[str, Any], sent: set[str], requests: Iterable[Mapping[str, Any]], *, whole_only: bool
) -> float:
    counted = sum(not whole_only or (request.get("status") == _OK and request["whole"]) for request in requests)
    expected = sum(calls[call_id]["kind"] in ("call", "duplicate") for call_id in sent)
    return round(counted / expected, 4) if expected else 0.0
