"""Looks at what a run left behind: tables, streams, the upstream's log. Imports nothing of the package.

The journal has one JSON object a line: `{"call": …}` for a command that was sent, `{"crash": seconds}`
for a process that was stopped dead (with `dead_s` for one that wakes up again), `{"fault": kind, "began":
seconds, "ended": seconds}` for whatever was done, `{"given_up": sequence, "cause": word, "at": seconds}` for a dead
letter that an executor logged as given up; outages and answers of `/readyz` are in `periods`.

A call is answered when it has exactly one result card, one inbox row and one report edge that belong together, or a
dead letter. Where nobody could be answered and the stream of dead letters was full, the executor's log line about the
letter that it gave up counts as one: storing a letter never keeps a command from being settled. A call is lost when its
command reached the stream and it is not answered in time: within `deadline_s` seconds from its placement, not counting
those that an outage covers. The late ones of the lost are listed, too. A call is doubled when it has more than one
card, row or edge, refused when it got a dead letter alone although it could be answered, or a failure although its time
was not up, and asked too late when the upstream received a request for it after `DEADLINE_S`. (Calls are refused with
good reason where the upstream fails, and those of a flood by their limit.)
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import nats
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import ServiceUnavailableError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.chaos.periods import (
    DEADLINE_S,
    Outage,
    Probe,
    covered,
    outages,
    probes,
    reactions,
    readiness,
    unready_otherwise,
    waited,
)

MAIN, OLDER = "v1r4", "v1r3"
"""Protocol versions of the kernels of a run."""

COMMANDS, DEAD_LETTERS = f"cg_cmd_{MAIN}", "openapi_tool_dead_letters"
_BATCH, _MINUTE_S = 500, 60.0
_READ_AGAIN_S, _READ_WITHIN_S = 0.5, 20.0
_OK = 200
_SLOWEST = 3
_FULL_TERM_S = 25.0
"""A call that ends in failure earlier than this had time left: the executor's own deadline is 27 s."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Journal of a run: calls by their id, processes that stopped (from, to), faults, outages, `/readyz`.

    `letters` are dead letters that a fault has removed, by their call, with the time at which they were written.
    `discarded` are log lines of executors about dead letters that they could not store.
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
    """Seconds from the first of some crashes to the answer of a call, and the events meanwhile.

    The call's own upstream time is taken off, and so is the time that a never-answering upstream held it.
    """

    tool_call_id: str
    delay_s: float
    upstream_s: float
    held_s: float
    crashes: int
    meanwhile: list[str]


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
    version: str = MAIN,
    per_minute: float = math.inf,
) -> dict[str, Any]:
    """The findings of a run about the kernel of one version; lists of ids name calls."""
    journal = read_journal(path)
    calls = journal.calls
    queries = {call["query"] for call in calls.values()}
    requests = list(requests)
    most = most_in_a_minute(request["at"] for request in requests)
    requests = [request for request in requests if _query(request) in queries]
    rows = await _rows(dsn)
    bells = await messages(nats_urls, f"cg_cmd_{version}", "cmd.agent")
    rung = Counter(_rung_for(bell, version) for bell in bells)
    letters = await messages(nats_urls, DEAD_LETTERS, "")
    answered = {call_id for call_id in calls if whole(rows[call_id])}
    sent = {call_id for call_id, call in calls.items() if call["published"]}
    discarded = given_up(journal)
    lettered = {**discarded, **dead_lettered(letters), **journal.letters}
    answered_at = {call_id: at for call_id, at in lettered.items() if call_id in calls}
    answered_at |= {call_id: rows[call_id]["rows"][0]["at"] for call_id in answered}
    late = late_calls(journal, answered_at, deadline_s)
    return {
        "calls": len(sent),
        "answered": len(answered),
        "lost": sorted((sent - set(answered_at)) | late),
        "late": sorted(late),
        "lost_meanwhile": dict(meanwhile(journal, (sent - set(answered_at)) | late)),
        "doubled": sorted(call_id for call_id in calls if any(len(found) > 1 for found in rows[call_id].values())),
        "refused": sorted(call_id for call_id in answered_at if refused(calls[call_id], rows[call_id])),
        "most_requests_in_60_s": most,
        "over_limit": max(0, most - per_minute),
        "asked_too_late": sorted(asked_too_late(calls, requests)),
        "statuses": dict(Counter(rows[call_id]["cards"][0]["status"] for call_id in answered)),
        "upstream_2xx_per_call": _per_call(calls, sent, requests, whole_only=True),
        "upstream_requests_per_call": _per_call(calls, sent, requests, whole_only=False),
        **_delays_after_crashes(delays(journal, rows, _held(requests))),
        "max_delay_s": _longest(_latency(calls[call_id], rows[call_id]) for call_id in answered),
        "doorbells_missing": sum(calls[call_id]["doorbell"] not in rung for call_id in answered),
        "doorbells_repeated": rung.total() - len(rung),
        "dead_letters": dict(Counter(json.loads(letter.data)["reason"] for letter in letters)),
        "dead_letters_given_up": len(discarded),
        "outages": [_in_outage(outage, requests) for outage in journal.outages],
        "readiness": readiness(reactions(journal.outages, journal.probes)),
        "unready_otherwise_s": unready_otherwise(journal.outages, journal.probes),
    }


def _rung_for(bell: Message, version: str) -> str | None:
    """The turn of a doorbell; in v1r3, whose doorbells name none, its trace."""
    if version == MAIN:
        return bell.headers.get("CG-Turn-Id")
    return bell.headers.get("traceparent", "--").split("-")[1]


def read_journal(path: Path) -> Journal:
    """The lines of a journal, sorted by what they are about."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Journal(
        {line["call"]["tool_call_id"]: line["call"] for line in lines if "call" in line},
        [(line["crash"], line["crash"] + line.get("dead_s", 0)) for line in lines if "crash" in line],
        [line for line in lines if "fault" in line],
        outages(lines),
        probes(lines),
        {line["dead_letter"]: line["at"] for line in lines if "dead_letter" in line},
        [line for line in lines if "given_up" in line],
    )


def given_up(journal: Journal) -> dict[str, float]:
    """Return when executors discarded dead letters, by call: those of commands whose result can reach no turn.

    Only those count that were discarded because the stream was full, while a fault kept it full.
    """
    full = [outage for outage in journal.outages if outage.why == f"{DEAD_LETTERS} full"]
    at = {
        line["given_up"]: line["at"]
        for line in journal.discarded
        if line["cause"] == "full" and any(outage.began <= line["at"] <= outage.over for outage in full)
    }
    return {
        call_id: at[call["sequence"]]
        for call_id, call in journal.calls.items()
        if call["kind"] == "unanswerable" and call["sequence"] in at
    }


def late_calls(journal: Journal, answered_at: Mapping[str, float], deadline_s: float) -> set[str]:
    """Calls that waited too long for the answer that they got."""
    return {
        call_id
        for call_id, call in journal.calls.items()
        if call_id in answered_at and waited(journal.outages, call["placed_at"], answered_at[call_id]) > deadline_s
    }


def meanwhile(journal: Journal, call_ids: Iterable[str]) -> Counter[str]:
    """Return how many calls met each kind of fault before their deadline."""
    return Counter(
        fault["fault"]
        for placed_at in (journal.calls[call_id]["placed_at"] for call_id in call_ids)
        for fault in journal.faults
        if fault["began"] < placed_at + DEADLINE_S and fault["ended"] > placed_at
    )


def most_in_a_minute(times: Iterable[float]) -> int:
    """Return the largest number of times (seconds) in any window of 60 s."""
    ordered, most, first = sorted(times), 0, 0
    for last, at in enumerate(ordered):
        while at - ordered[first] >= _MINUTE_S:
            first += 1
        most = max(most, last - first + 1)
    return most


def asked_too_late(calls: Mapping[str, Mapping[str, Any]], requests: Iterable[Mapping[str, Any]]) -> set[str]:
    """Calls for which the upstream was asked when their turn had been answered by the watchdog."""
    by_query = {call["query"]: call_id for call_id, call in calls.items() if call["published"]}
    asked = [(by_query.get(_query(request)), request["at"]) for request in requests]
    return {call_id for call_id, at in asked if call_id and at - calls[call_id]["placed_at"] > DEADLINE_S}


def _query(request: Mapping[str, Any]) -> Any:
    return json.loads(request["body"])["q"]


def dead_lettered(letters: Iterable[Message]) -> dict[str, float]:
    """Return when dead letters were written, by the id of their call; a command without identity has it as its body."""
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
    return not whole(rows) or (rows["cards"][0]["status"] != "success" and _latency(call, rows) < _FULL_TERM_S)


def _in_outage(outage: Outage, requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the deliveries of the durable and the upstream requests during an outage."""
    asked = sum(outage.since <= request["at"] < outage.until for request in requests)
    return {"why": outage.why, "seconds": round(outage.seconds, 1), "fetched": outage.fetched, "asked": asked}


def _delays_after_crashes(found: Iterable[Delay]) -> dict[str, Any]:
    ordered = sorted(found, key=lambda delay: -delay.delay_s)
    one = [delay for delay in ordered if delay.crashes == 1]
    return {
        "max_delay_after_crash_s": _longest(delay.delay_s for delay in one),
        "slowest_after_crash": [asdict(delay) for delay in one[:_SLOWEST]],
        "max_delay_after_several_crashes_s": _longest(delay.delay_s for delay in ordered if delay.crashes > 1),
    }


async def _rows(dsn: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
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
    """Every message of a stream whose subject holds `part`; none where there is no stream."""
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


def whole(rows: Mapping[str, list[dict[str, Any]]]) -> bool:
    """One card, one row that names it, one edge."""
    return all(len(found) == 1 for found in rows.values()) and rows["rows"][0]["card_id"] == rows["cards"][0]["card_id"]


def _longest(seconds: Iterable[float]) -> float:
    return round(max(seconds, default=0.0), 2)


def _latency(call: Mapping[str, Any], rows: Mapping[str, list[dict[str, Any]]]) -> float:
    return float(rows["rows"][0]["at"]) - float(call["placed_at"])


def delays(
    journal: Journal, rows: Mapping[str, Any], held: Mapping[str, Sequence[tuple[float, float]]]
) -> Iterable[Delay]:
    """For every call that waited while processes died; `held` as from and to, by query."""
    for call_id, call in journal.calls.items():
        if not whole(rows[call_id]) or call["kind"] == "killer":
            continue
        placed_at, answered_at = call["placed_at"], rows[call_id]["rows"][0]["at"]
        crashes = [crash for crash in journal.crashes if placed_at <= crash[0] < answered_at]
        if not crashes:
            continue
        first, dead_until = min(at for at, _ in crashes), max(until for _, until in crashes)
        held_s = covered(held.get(call["query"], ()), dead_until, answered_at)
        delay_s = answered_at - first - call["upstream_s"] - held_s
        meanwhile = [
            f"{fault['fault']} {fault['began'] - first:+.1f} s"
            for fault in journal.faults
            if fault["began"] < answered_at and fault["ended"] > placed_at
        ]
        yield Delay(call_id, round(delay_s, 2), call["upstream_s"], round(held_s, 2), len(crashes), meanwhile)


def _held(requests: Iterable[Mapping[str, Any]]) -> Mapping[str, Sequence[tuple[float, float]]]:
    """From when to when the upstream held requests that it would never answer, by their query."""
    found = defaultdict(list)
    for request in requests:
        if request.get("hung") and "ended_at" in request:
            found[_query(request)].append((request["at"], request["ended_at"]))
    return found


def _per_call(
    calls: Mapping[str, Any], sent: set[str], requests: Iterable[Mapping[str, Any]], *, whole_only: bool
) -> float:
    good = sum(not whole_only or (request.get("status") == _OK and request["whole"]) for request in requests)
    asked = sum(calls[call_id]["kind"] in ("call", "duplicate") for call_id in sent)
    return round(good / asked, 4) if asked else 0.0
