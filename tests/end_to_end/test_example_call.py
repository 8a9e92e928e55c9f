"""The recorded example calls: the same rows in, the same rows, card and doorbell out (protocol section 9)."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from openapi_tool.local.caller import Caller, PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from tests.conftest import StartExecutor, reader_tool, search_tool
from tests.promises import requirement

EXAMPLE = json.loads((Path(__file__).parent.parent / "data" / "example-call.json").read_text(encoding="utf-8"))
TIMES = {"created_at", "next_retry_at", "CG-Timestamp"}


@pytest.mark.parametrize("name", ["jina_search", "jina_reader"])
@requirement("answer.example", "answer.doorbell", "card.result", "answer.trace")
async def test_the_example_call_is_answered_with_the_same_rows(
    name: str, stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    example = EXAMPLE[name]
    call = placed(example)
    await caller.add_project(call.project_id)
    await caller.add_agent(call.project_id, call.agent_id, "worker_generic")
    await caller.add_tool(call.project_id, search_tool() if name == "jina_search" else reader_tool())
    await _insert(caller, "cards", example["call_card"])
    await _insert(caller, "state.agent_inbox", example["anchor_row"])
    request_edge = next(edge for edge in example["edges"] if edge["edge_phase"] == "request")
    await _insert(caller, "state.execution_edges", request_edge)
    stack.upstream.rules({"match": "hello", "answer": "s-post-json"}, {"match": "example.org", "answer": "r-post-json"})
    start_executor()

    await caller.publish(call)
    answer = await caller.answer(call, 10)

    result, row, doorbell = example["result_card"], example["inbox_row"], example["doorbells"][0]
    response_edge = next(edge for edge in example["edges"] if edge["edge_phase"] == "response")
    assert same(answer.card, result) == same(result, result)
    assert same(answer.inbox_row, row) == same(row, row)
    assert same(answer.edge, response_edge) == same(response_edge, response_edge)
    assert same(answer.doorbell, doorbell) == same(doorbell, doorbell)
    _ids_fit_together(answer, call)


def _ids_fit_together(answer: Any, call: PlacedCall) -> None:
    assert answer.inbox_row["payload"]["tool_result_card_id"] == answer.card["card_id"]
    assert answer.edge["metadata"]["inbox_id"] == answer.inbox_row["inbox_id"]
    traceparent = answer.inbox_row["context_headers"]["traceparent"]
    assert answer.doorbell["headers"]["traceparent"] == traceparent
    assert traceparent != call.headers["traceparent"]
    assert isinstance(answer.card["content"]["result"], str)
    assert answer.card["metadata"]["tool_output"]["usage"]["requests"] == 1


def placed(example: Mapping[str, Any]) -> PlacedCall:
    command, anchor = example["command"], example["anchor_row"]
    return PlacedCall(
        project_id=anchor["project_id"],
        channel_id=anchor["channel_id"],
        agent_id=anchor["agent_id"],
        agent_turn_id=anchor["agent_turn_id"],
        turn_epoch=anchor["turn_epoch"],
        step_id=command["headers"]["CG-Step-Id"],
        tool_call_id=anchor["correlation_id"],
        card_id=command["body"]["tool_call_card_id"],
        trace_id=command["headers"]["traceparent"].split("-")[1],
        subject=command["subject"],
        headers=command["headers"],
        body=command["body"],
    )


async def _insert(caller: Caller, table: str, row: Mapping[str, Any]) -> None:
    values = [
        datetime.fromisoformat(value) if isinstance(value, str) and name.endswith(("_at", "_retry_at")) else value
        for name, value in row.items()
    ]
    places = ", ".join(f"${number}" for number in range(1, len(values) + 1))
    query = f"insert into {table} ({', '.join(row)}) values ({places})"  # noqa: S608 - texts of this file
    await caller.database.execute(query, *values)


def same(value: Any, example: Any) -> Any:
    """`value` with everything that may differ replaced by its kind; what the example lacks stays visible."""
    return _same("", json.loads(json.dumps(value, default=lambda moment: moment.isoformat())), example)


def _same(name: str, value: Any, example: Any) -> Any:
    if name == "result":
        return "result"
    if name == "CG-Sender":
        return "sender"
    if name in TIMES:
        assert value, name
        return "time"
    if isinstance(value, dict):
        known = example if isinstance(example, dict) else {}
        return {key: _same(key, item, known.get(key)) for key, item in value.items() if key != "tool_output"}
    if isinstance(value, str):
        return _without_fresh_ids(name, value)
    return value


def _without_fresh_ids(name: str, value: str) -> str:
    if name in ("card_id", "inbox_id", "edge_id", "tool_result_card_id"):
        prefix, _, digits = value.rpartition("_")
        assert uuid.UUID(hex=digits).version == 7, value
        return prefix
    if name == "traceparent":
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", value)
        version, trace_id, _, flags = value.split("-")
        return f"{version}-{trace_id}-span-{flags}"
    return value
