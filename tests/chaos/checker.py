"""Looks at what a run left behind: tables, streams, the upstream's log. Imports nothing of the package.

The journal has one JSON object a line: `{"call": …}` for a command that was sent, `{"crash": seconds}`
for a process that was stopped dead (with `dead_s` for one that wakes up again), `{"fault": kind, "began":
seconds, "ended": seconds}` for whatever was done. A call is lost when its command reached the stream and it has not
exactly one result card, one inbox row and one report edge that belong together; it is doubled when it
has more than one of any.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import asyncpg
import nats
from nats.js.api import AckPolicy, ConsumerConfig

COMMANDS, DEAD_LETTERS = "cg_cmd_v1r4", "openapi_tool_dead_letters"
_BATCH = 500
_OK = 200
_SLOWEST = 3


@dataclass(frozen=True, slots=True)
class Journal:
    """What a run wrote down: calls by their id, processes that stopped dead (from, to), faults."""

    calls: Mapping[str, Mapping[str, Any]]
    crashes: Sequence[tuple[float, float]]
    faults: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Delay:
    """How long after the first of some crashes a call was answered, and what happened meanwhile (seconds).

    The call's own upstream time is taken off, and so is the time that a never-answering upstream held it.
    """

    tool_call_id: str
    delay_s: float
    upstream_s: float
    held_s: float
    crashes: int
    meanwhile: list[str]


async def check(dsn: str, nats_url: str, path: Path, requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The findings of a run; `lost` and `doubled` name the calls."""
    journal, requests = _read(path), list(requests)
    calls = journal.calls
    rows = await _rows(dsn)
    doorbells = {headers.get("CG-Turn-Id") for headers, _ in await _messages(nats_url, COMMANDS, "cmd.agent")}
    letters = [json.loads(data) for _, data in await _messages(nats_url, DEAD_LETTERS, "")]
    answered = {call_id for call_id in calls if _whole(rows[call_id])}
    sent = {call_id for call_id, call in calls.items() if call["published"]}
    waited = sorted(delays(journal, rows, _held(requests)), key=lambda delay: -delay.delay_s)
    one, several = [delay for delay in waited if delay.crashes == 1], [delay for delay in waited if delay.crashes > 1]
    return {
        "calls": len(sent),
        "answered": len(answered),
        "lost": sorted(sent - answered),
        "doubled": sorted(call_id for call_id in calls if any(len(found) > 1 for found in rows[call_id].values())),
        "statuses": dict(Counter(rows[call_id]["cards"][0]["status"] for call_id in answered)),
        "upstream_2xx_per_call": _per_call(calls, sent, requests),
        "max_delay_after_crash_s": _longest(delay.delay_s for delay in one),
        "slowest_after_crash": [asdict(delay) for delay in one[:_SLOWEST]],
        "max_delay_after_several_crashes_s": _longest(delay.delay_s for delay in several),
        "max_delay_s": _longest(_latency(calls[call_id], rows[call_id]) for call_id in answered),
        "doorbells_missing": sum(calls[call_id]["agent_turn_id"] not in doorbells for call_id in answered),
        "dead_letters": dict(Counter(letter["reason"] for letter in letters)),
    }


def _read(path: Path) -> Journal:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Journal(
        {line["call"]["tool_call_id"]: line["call"] for line in lines if "call" in line},
        [(line["crash"], line["crash"] + line.get("dead_s", 0)) for line in lines if "crash" in line],
        [line for line in lines if "fault" in line],
    )


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


async def _messages(url: str, stream: str, part: str) -> list[tuple[dict[str, str], bytes]]:
    """Headers and data of every message of a stream whose subject holds `part`; none where there is no stream."""
    client = await nats.connect(url)
    try:
        jetstream = client.jetstream()
        if stream not in {info.config.name for info in await jetstream.streams_info()}:
            return []
        subscription = await jetstream.pull_subscribe(
            "", stream=stream, config=ConsumerConfig(ack_policy=AckPolicy.NONE)
        )
        found, left = [], (await jetstream.stream_info(stream)).state.messages
        while left > 0:
            batch = await subscription.fetch(min(_BATCH, left), timeout=10)
            left -= len(batch)
            found += [(message.headers or {}, message.data) for message in batch if part in message.subject]
        return found
    finally:
        await client.close()


def _whole(rows: Mapping[str, list[dict[str, Any]]]) -> bool:
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
        if not _whole(rows[call_id]) or call["kind"] == "killer":
            continue
        placed_at, answered_at = call["placed_at"], rows[call_id]["rows"][0]["at"]
        crashes = [crash for crash in journal.crashes if placed_at <= crash[0] < answered_at]
        if not crashes:
            continue
        first, dead_until = min(at for at, _ in crashes), max(until for _, until in crashes)
        held_s = _covered(held.get(call["query"], ()), dead_until, answered_at)
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
            found[json.loads(request["body"])["q"]].append((request["at"], request["ended_at"]))
    return found


def _covered(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Seconds between `since` and `until` that any of the spans covers."""
    covered = 0.0
    for began, ended in sorted(spans):
        covered += max(0.0, min(ended, until) - max(began, since))
        since = max(since, ended)
    return covered


def _per_call(calls: Mapping[str, Any], sent: set[str], requests: Iterable[Mapping[str, Any]]) -> float:
    good = sum(request.get("status") == _OK and request["whole"] for request in requests)
    asked = sum(calls[call_id]["kind"] in ("call", "duplicate") for call_id in sent)
    return round(good / asked, 4) if asked else 0.0
