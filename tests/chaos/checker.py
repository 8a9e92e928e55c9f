"""Looks at what a run left behind: tables, streams, the upstream's log. Imports nothing of the package.

The journal has one JSON object a line: `{"call": …}` for a command that was sent, `{"crash": seconds}`
for a process that was stopped dead. A call is lost when its command reached the stream and it has not
exactly one result card, one inbox row and one report edge that belong together; it is doubled when it
has more than one of any.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import nats
from nats.js.api import AckPolicy, ConsumerConfig

COMMANDS, DEAD_LETTERS = "cg_cmd_v1r4", "openapi_tool_dead_letters"
_BATCH = 500
_OK = 200


async def check(dsn: str, nats_url: str, journal: Path, requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The findings of a run; `lost` and `doubled` name the calls."""
    calls, crashes = _read(journal)
    rows = await _rows(dsn)
    doorbells = {headers.get("CG-Turn-Id") for headers, _ in await _messages(nats_url, COMMANDS, "cmd.agent")}
    letters = [json.loads(data) for _, data in await _messages(nats_url, DEAD_LETTERS, "")]
    answered = {call_id for call_id in calls if _whole(rows[call_id])}
    sent = {call_id for call_id, call in calls.items() if call["published"]}
    delays = list(_delays(calls, rows, crashes))
    return {
        "calls": len(sent),
        "answered": len(answered),
        "lost": sorted(sent - answered),
        "doubled": sorted(call_id for call_id in calls if any(len(found) > 1 for found in rows[call_id].values())),
        "statuses": dict(Counter(rows[call_id]["cards"][0]["status"] for call_id in answered)),
        "upstream_2xx_per_call": _per_call(calls, sent, requests),
        "max_delay_after_crash_s": _longest(delay for count, delay in delays if count == 1),
        "max_delay_after_several_crashes_s": _longest(delay for count, delay in delays if count > 1),
        "max_delay_s": _longest(_latency(calls[call_id], rows[call_id]) for call_id in answered),
        "doorbells_missing": sum(calls[call_id]["agent_turn_id"] not in doorbells for call_id in answered),
        "dead_letters": dict(Counter(letter["reason"] for letter in letters)),
    }


def _read(journal: Path) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """Calls by their id, and the moments at which a process was stopped dead."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    calls = {line["call"]["tool_call_id"]: line["call"] for line in lines if "call" in line}
    return calls, [line["crash"] for line in lines if "crash" in line]


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


def _delays(calls: Mapping[str, Any], rows: Mapping[str, Any], crashes: list[float]) -> Iterable[tuple[int, float]]:
    """For every call that waited while processes died: how many, and how long after the first it was answered.

    The call's own upstream time is taken off.
    """
    for call_id, call in calls.items():
        if not _whole(rows[call_id]) or call["kind"] == "killer":
            continue
        answered_at = rows[call_id]["rows"][0]["at"]
        during = [at for at in crashes if call["placed_at"] <= at < answered_at]
        if during:
            yield len(during), answered_at - min(during) - call["upstream_s"]


def _per_call(calls: Mapping[str, Any], sent: set[str], requests: Iterable[Mapping[str, Any]]) -> float:
    good = sum(request.get("status") == _OK and request["whole"] for request in requests)
    asked = sum(calls[call_id]["kind"] in ("call", "duplicate") for call_id in sent)
    return round(good / asked, 4) if asked else 0.0
