"""Whatever arrives: any headers, any body, any state of the database. Answered once or dead-lettered once."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.js.errors import NotFoundError

from openapi_tool.bus.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.local.caller import STREAM, PlacedCall
from tests.conftest import AGENT, PROJECT
from tests.promises import requirement
from tests.wire.world import KNOWN, World

HEADERS = (
    *("CG-Project-Id", "CG-Channel-Id", "CG-Agent-Id", "CG-Turn-Id", "CG-Turn-Epoch", "CG-Step-Id"),
    *("CG-Tool-Call-Id", "CG-Recursion-Depth", "CG-Parent-Step-Id", "traceparent", "tracestate", "CG-Unheard-Of"),
)
IDENTITY_FIELDS = ("project_id", "channel_id", "agent_id", "agent_turn_id", "turn_epoch", "tool_call_id", "step_id")
UNLISTED = "agent_unlisted"

STATES: Mapping[str, str] = {
    "as the kernel left it": "select $1",
    "no card": "delete from cards where card_id = $1",
    "deleted card": "update cards set deleted_at = now() where card_id = $1",
    "card of another project": "update cards set tenant_id = 'another' where card_id = $1",
    "card of another type": """update cards set metadata = metadata || '{"type": "note"}' where card_id = $1""",
    "card without metadata": "update cards set metadata = '{}' where card_id = $1",
    "card with odd metadata": "update cards set metadata = '[1, null]' where card_id = $1",
    "card of another class": """update cards set content = '{"__type__": "TextContent"}' where card_id = $1""",
    "card with odd content": "update cards set content = '[[]]' where card_id = $1",
    "raw arguments": """update cards set content = content || '{"arguments": {"_raw": "{"}}' where card_id = $1""",
    "a huge number": (
        """update cards set content = content || ('{"arguments": {"query": "x", "count": 1'"""
        " || repeat('0', 400) || '}}')::jsonb where card_id = $1"
    ),
    "null arguments": """update cards set content = content || '{"arguments": null}' where card_id = $1""",
    "a card that answers another call": "update cards set tool_call_id = 'tc_another' where card_id = $1",
}
TURNS: Mapping[str, str] = {
    "as the kernel left it": "select $1",
    "no request edge": "delete from state.execution_edges where correlation_id = $1",
    "deep edge": "update state.execution_edges set recursion_depth = 20 where correlation_id = $1",
    "no anchor": "delete from state.agent_inbox where correlation_id = $1",
    "anchor of another epoch": "update state.agent_inbox set turn_epoch = 9 where correlation_id = $1",
    "anchor without headers": "update state.agent_inbox set context_headers = '{}' where correlation_id = $1",
    "anchor with odd headers": "update state.agent_inbox set context_headers = '[7]' where correlation_id = $1",
}

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
header_values = st.sampled_from(
    ("", "-1", "0", "1", "19", "20", "9" * 30, "a b", "a.b", "*", ">", "x" * 300, AGENT)
) | (st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40))
header_changes = st.dictionaries(st.sampled_from(HEADERS), st.none() | header_values, max_size=3)
body_changes = st.dictionaries(
    st.sampled_from(("tool_call_card_id", "tool_name", "after_execution", "arguments", "comment"))
    | st.text(max_size=8),
    values | st.just("terminate"),
    max_size=2,
)
other_bodies = st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode())


@dataclass(frozen=True, slots=True)
class Case:
    """One command and the rows around it."""

    card: str
    turn: str
    agent: str
    tool: str
    arguments: Any
    headers: Mapping[str, str | None]
    body: Mapping[str, Any]
    data: bytes | None


cases = st.builds(
    Case,
    card=st.sampled_from(("as the kernel left it",) * 8 + tuple(STATES)),
    turn=st.sampled_from(("as the kernel left it",) * 8 + tuple(TURNS)),
    agent=st.sampled_from((AGENT, AGENT, UNLISTED)),
    tool=st.sampled_from(("jina_search", "jina_search", "jina_search", "jina_broken", "jina_unknown")),
    arguments=st.just(KNOWN) | values,
    headers=st.just({}) | header_changes,
    body=st.just({}) | body_changes,
    data=st.none() | st.none() | other_bodies,
)


@requirement("wire.any_command")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases)
async def test_any_command_is_answered_once_or_dead_lettered_once(
    world: World, caplog: pytest.LogCaptureFixture, case: Case
) -> None:
    caplog.clear()
    await world.caller.add_tool(PROJECT, {"tool_name": "jina_broken", "options": {"jina": {"mode": 7}}})
    call = await _place(world, case)
    before = await _counts(world)
    await world.caller.publish(call, headers=_headers(call, case), data=_body(call, case))
    after = await _counts(world)
    made = {name: after[name] - before[name] for name in before}
    assert made["deliveries"] == 1
    assert sorted((made["cards"], made["dead_letters"])) == [0, 1], made
    assert made["rows"] == made["edges"] == made["cards"]
    assert _broken(caplog.records) == []


@requirement("wire.body_no_identity")
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    fields=st.sets(st.sampled_from(IDENTITY_FIELDS), min_size=1),
    headers=st.sets(st.sampled_from(HEADERS), max_size=4),
)
async def test_no_field_of_the_body_becomes_identity(world: World, fields: set[str], headers: set[str]) -> None:
    """The body names a call of somebody else in every field; that call must stay without a result."""
    await world.caller.add_agent(PROJECT, "agent_victim")
    victim, call = await world.place(agent="agent_victim", channel_id="private"), await world.place()
    body = {**call.body, **{field: getattr(victim, field) for field in fields}}
    kept = {name: value for name, value in call.headers.items() if name not in headers}
    await world.caller.publish(call, headers=kept, data=json.dumps(body).encode())
    await world.settled()
    untouched = await world.caller.read_answer(victim)
    assert (untouched.card, untouched.inbox_row, untouched.edge) == ({}, {}, {})


async def _place(world: World, case: Case) -> PlacedCall:
    call = await world.place(_storable(case.arguments), case.tool, agent=case.agent)
    await world.caller.database.execute(TURNS[case.turn].replace("select $1", "select $1::text"), call.tool_call_id)
    await world.caller.database.execute(STATES[case.card].replace("select $1", "select $1::text"), call.card_id)
    return call


def _storable(value: Any) -> Any:
    """What jsonb takes: it knows neither U+0000 nor lone surrogates nor NaN."""
    text = json.dumps(value, allow_nan=True).replace("\\u0000", "")
    parsed = json.loads(text, parse_constant=lambda _: None)
    return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))


def _headers(call: PlacedCall, case: Case) -> dict[str, str]:
    changed = {**call.headers, **case.headers}
    return {name: value for name, value in changed.items() if value is not None}


def _body(call: PlacedCall, case: Case) -> bytes:
    return case.data if case.data is not None else json.dumps({**call.body, **case.body}).encode()


async def _counts(world: World) -> dict[str, int]:
    """What there is of everything once nothing is pending."""
    info = await world.settled() if await _messages(world, STREAM) else None
    count = world.caller.database.fetchval
    return {
        "deliveries": info.delivered.consumer_seq if info else 0,
        "cards": await count("select count(*) from cards where metadata ->> 'type' = 'tool.result'"),
        "rows": await count("select count(*) from state.agent_inbox where message_type = 'tool_result'"),
        "edges": await count("select count(*) from state.execution_edges where primitive = 'report'"),
        "dead_letters": await _messages(world, DEAD_LETTERS),
    }


async def _messages(world: World, stream: str) -> int:
    try:
        return (await world.caller.client.jetstream().stream_info(stream)).state.messages
    except NotFoundError:
        return 0


def _broken(records: list[logging.LogRecord]) -> list[str]:
    """Whatever a defect leaves in the log."""
    return [record.getMessage() for record in records if record.exc_info]
