"""Bytes that no correct client publishes and no server sends: none ends a connection or delays another call."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.bus import connection
from openapi_tool.bus.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.local.caller import STREAM, PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.settings import Settings
from tests.conftest import AGENT, PROJECT
from tests.requirements import requirement
from tests.wire.test_bus import DSN
from tests.wire.world import KNOWN, SETTLED_S, Outcome, World, fake_server, header_block, publish

PREFIX = b"cg.v1r4.proj_test.public.cmd.tool.jina."
BAD_SUBJECTS = [
    *(
        PREFIX + suffix
        for suffix in (b"re\xff", b"re\x0bx", b"re\x0b1", b"a\x0c1\x0c2", b"re\x00", b"\x1b[2J", b"\xed\xa0\x80")
    ),
    b"cg.v1r4.p\xfe.public.cmd.tool.jina.search",
    b"cg.v1r4.proj_test.c\x0bx.cmd.tool.jina.search",
]


def disconnects(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "action", "") in ("nats.disconnected", "nats.error")]


async def published(world: World, call: PlacedCall, subject: bytes, headers: bytes | None, body: bytes) -> Outcome:
    """Publish raw bytes, then a correct call, which must succeed; return the outcome of both."""
    await publish(world.stack.nats.url, subject, body, headers)
    await world.caller.publish(call)
    outcome = await world.outcome(call)
    assert outcome.content["status"] == "success"
    assert len(outcome.upstream_requests) == 1
    return outcome


@pytest.mark.parametrize("subject", BAD_SUBJECTS)
@requirement("command.any")
async def test_a_subject_of_any_bytes_is_dead_lettered_and_delays_no_other_command(
    world: World, caplog: pytest.LogCaptureFixture, subject: bytes
) -> None:
    outcome = await published(world, await world.place(), subject, None, b"{}")
    assert [letter["reason"] for letter in outcome.dead_letters] == ["bad_subject"]
    assert (outcome.terminated, outcome.deliveries) == (1, 2)
    assert disconnects(caplog) == []


@pytest.mark.parametrize(
    "block",
    [
        *(
            b"X",
            b"NATS/1.0",
            b"NATS/1.0\r\n",
            b"NATS/1.0\r\n\r\n",
            b"\r\n\r\n",
            b"\xff" * 40,
            b"NATS/1.0 \xff\xfe\xfd\r\n\r\n",
        ),
        *(b"NATS/1.0 404 No Messages\r\n\r\n", b"NATS/1.0 100\r\n\r\n", b"NATS/1.0 \xc2\xb2\xc2\xb2 x\r\n\r\n"),
        header_block({}, b"\xff: a", b": b", b"a b: c", b"no colon", b"CG-Agent-Id: \xff\xfe", b"Status: 503"),
        header_block({}, *[b"a:"] * 16_000),  # JetStream itself takes 64 KiB of headers at most
        header_block({}, *[b"n%d: %s" % (number, b"v" * 1000) for number in range(60)]),
    ],
)
@requirement("command.any")
async def test_a_header_block_of_any_bytes_is_dead_lettered_and_delays_no_other_command(
    world: World, caplog: pytest.LogCaptureFixture, block: bytes
) -> None:
    outcome = await published(world, await world.place(), PREFIX + b"search", block, b"{}")
    assert len(outcome.dead_letters) == 1
    assert (outcome.terminated, outcome.deliveries) == (1, 2)
    assert disconnects(caplog) == []


@requirement("command.any", "identity.headers")
async def test_invalid_header_lines_do_not_hide_valid_ones(world: World) -> None:
    call = await world.place()
    headers = {name.upper(): value for name, value in call.headers.items()}
    block = header_block(headers, b"x-odd: \xff", b"no colon", b"\xffname: v", b"a: 1", b"a: 2")
    await publish(world.stack.nats.url, call.subject.encode(), json.dumps(call.body).encode(), block)
    world.caller.last_sequence = 1
    assert (await world.outcome(call)).content["status"] == "success"


@requirement("command.any")
async def test_too_many_headers_give_a_result_that_names_the_problem(world: World) -> None:
    call = await world.place()
    block = header_block(call.headers, *[b"a:"] * 300)
    await publish(world.stack.nats.url, call.subject.encode(), json.dumps(call.body).encode(), block)
    world.caller.last_sequence = 1
    outcome = await world.outcome(call)
    assert outcome.content["error"]["code"] == "bad_request"
    assert "the headers have more than 256 lines or 65,536 bytes" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []


@requirement("answer.doorbell")
async def test_a_doorbell_that_would_end_the_connection_is_not_sent(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    call = await world.place()
    await world.caller.database.execute("update resource.project_agents set worker_target = repeat('w', 5000)")
    outcome = await world.send(call, headers={"traceparent": None})
    assert (outcome.content["status"], outcome.doorbells, outcome.deliveries) == ("success", [], 1)
    assert [record for record in caplog.records if getattr(record, "action", "") == "doorbell.impossible"]
    assert disconnects(caplog) == []


# Bytes sent by a server, or by a man in the middle.


@pytest.fixture
def no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable pings, which would detect a dead connection after half a minute, to test the end of the read loop."""
    monkeypatch.setattr(connection, "_PING_INTERVAL_S", 3600)


@pytest.mark.parametrize(
    "sent",
    [
        *(
            b"-ERR 'Maximum Payload Violation'\r\n",
            b"-ERR 'Unknown Protocol Operation'\r\n",
            b"-ERR '\xff\xfe'\r\n",
            b"-ERR \r\n",
        ),
        *(
            b"INFO {\r\n",
            b"INFO []\r\n",
            b"INFO \xff\r\n",
            b'INFO {"connect_urls": 7}\r\n',
            b'INFO {"connect_urls": ["[::"]}\r\n',
        ),
        *(
            b"HELLO\r\n",
            b"\xff\xfe\r\n",
            b"MSG\r\n",
            b"MSG a\r\n",
            b"MSG a b 1\r\n",
            b"MSG a 1 1_0\r\n",
            b"x" * 300_000,
        ),
        *(b"HMSG a 1 12 2\r\n", b"MSG a 1 2\r\nabcd", b"MSG a 1 99999999999\r\n", b"MSG a 1 -1\r\n"),
    ],
)
@pytest.mark.usefixtures("no_pings")
@requirement("command.any")
async def test_the_client_reconnects_at_once_after_any_bytes_of_the_server(sent: bytes) -> None:
    async with fake_server() as server:
        settings = Settings(postgres=DSN, nats={"servers": server.url})
        arrived: asyncio.Queue[Msg] = asyncio.Queue()
        async with asyncio.timeout(SETTLED_S), connection.connected(build_bootstrap(settings, {}).bus) as client:
            await client.subscribe("news", cb=arrived.put)
            first = await server.accepted.get()
            await first.subscribed.wait()
            first.writer.write(sent)
            again = await server.accepted.get()
            await again.subscribed.wait()
            again.writer.write(b"MSG news %s 5\r\nhello\r\n" % again.sid)
            assert (await arrived.get()).data == b"hello"


@pytest.mark.parametrize(
    "greeting",
    [
        b"INFO \xff\r\n",
        b"INFO []\r\n",
        b"HELLO\r\n",
        b'INFO {"connect_urls": 7}\r\n',
        b"x" * 70_000,
        b"INFO " + b"x" * 70_000,
    ],
)
@requirement("command.any")
async def test_the_client_reconnects_after_any_greeting_of_the_server(greeting: bytes) -> None:
    async with fake_server() as server:
        settings = Settings(postgres=DSN, nats={"servers": server.url})
        async with asyncio.timeout(SETTLED_S), connection.connected(build_bootstrap(settings, {}).bus) as client:
            first = await server.accepted.get()
            usual, server.greeting = server.greeting, greeting
            first.drop()
            await server.accepted.get()
            server.greeting = usual
            again = await server.accepted.get()
            await again.logged_in.wait()
            await client.flush()


@requirement("command.any")
async def test_a_message_to_our_inbox_that_jetstream_did_not_send_is_ignored(
    world: World, stack: EmbeddedStack, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that may publish to `_INBOX.>` could guess the inbox of the pull request."""
    requests: asyncio.Queue[Msg] = asyncio.Queue()
    await world.caller.client.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=requests.put)
    await world.send(await world.place())
    inbox = (await requests.get()).reply
    replies = (b"", b"x", b"\xff", b"x\x0b1")  # the server refuses replies to $JS.ACK
    for reply in replies:
        await publish(stack.nats.url, inbox.encode() + (b" " + reply if reply else b""), b"{}")
    outcome = await world.send(await world.place())
    assert outcome.content["status"] == "success"
    ignored = [record for record in caplog.records if getattr(record, "action", "") == "pull.foreign"]
    assert len(ignored) == len(replies)
    assert (outcome.dead_letters, disconnects(caplog)) == ([], [])


# Any headers, body and state of the database: one result or one dead letter.


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
    """One command and the state of its rows."""

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


@requirement("command.any")
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


@requirement("identity.headers")
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    fields=st.sets(st.sampled_from(IDENTITY_FIELDS), min_size=1),
    headers=st.sets(st.sampled_from(HEADERS), max_size=4),
)
async def test_body_fields_never_become_identity(world: World, fields: set[str], headers: set[str]) -> None:
    """Each body field names a call of another agent, which must get no result."""
    await world.caller.add_agent(PROJECT, "agent_victim")
    victim, call = await world.place(agent="agent_victim", channel_id="private"), await world.place()
    body = {**call.body, **{field: getattr(victim, field) for field in fields}}
    remaining = {name: value for name, value in call.headers.items() if name not in headers}
    await world.caller.publish(call, headers=remaining, data=json.dumps(body).encode())
    await world.settled()
    untouched = await world.caller.read_result(victim)
    assert (untouched.card, untouched.inbox_row, untouched.edge) == ({}, {}, {})


async def _place(world: World, case: Case) -> PlacedCall:
    call = await world.place(_storable(case.arguments), case.tool, agent=case.agent)
    await world.caller.database.execute(TURNS[case.turn].replace("select $1", "select $1::text"), call.tool_call_id)
    await world.caller.database.execute(STATES[case.card].replace("select $1", "select $1::text"), call.card_id)
    return call


def _storable(value: Any) -> Any:
    """Return a value that jsonb accepts: without U+0000, lone surrogates and NaN."""
    text = json.dumps(value, allow_nan=True).replace("\\u0000", "")
    parsed = json.loads(text, parse_constant=lambda _: None)
    return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))


def _headers(call: PlacedCall, case: Case) -> dict[str, str]:
    changed = {**call.headers, **case.headers}
    return {name: value for name, value in changed.items() if value is not None}


def _body(call: PlacedCall, case: Case) -> bytes:
    return case.data if case.data is not None else json.dumps({**call.body, **case.body}).encode()


async def _counts(world: World) -> dict[str, int]:
    """Return the numbers of deliveries, rows and dead letters once nothing is pending."""
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
    """Return the messages of log records with a traceback."""
    return [record.getMessage() for record in records if record.exc_info]
