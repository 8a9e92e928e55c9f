"""Hostile bytes of commands, and hostile definitions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from typer.testing import CliRunner

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.jina.definition_checks import definition_problems
from openapi_tool.kernel.jetstream.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.local.caller import STREAM
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client import connection
from openapi_tool.settings import Settings
from openapi_tool.telemetry.logs import JsonFormatter
from openapi_tool.telemetry.redact import Redactor
from tests.conftest import AGENT, PROJECT, search_tool
from tests.requirements import requirement
from tests.support import peak_growth
from tests.waiting import WAIT_S
from tests.wire.conftest import RECORDED_ARGUMENTS, Outcome, World, fake_server, header_block, publish
from tests.wire.test_bus import DSN

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
    assert (outcome.term_acks, outcome.deliveries) == (1, 2)
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
    assert (outcome.term_acks, outcome.deliveries) == (1, 2)
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
        async with asyncio.timeout(WAIT_S), connection.connected(build_bootstrap(settings, {}).bus) as client:
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
        async with asyncio.timeout(WAIT_S), connection.connected(build_bootstrap(settings, {}).bus) as client:
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
    arguments=st.just(RECORDED_ARGUMENTS) | values,
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


LARGE_TEXT = "x" * 250_000
MAX_BYTES = 96_000_000
"""Peak memory of one call. The aim is 64 MB; the rest is used by the test in the same process."""

MAX_ANSWER_BYTES = 30_000
"""Limit of an error card: up to 20 problems of 200 characters, three times (message, detail, result)."""


def doubled(levels: int) -> dict[str, Any]:
    """Return a schema of about 100 bytes per level, whose branches double at each level."""
    schemas: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**schemas, f"d{levels}": {"type": "integer"}}, "properties": {"query": {"$ref": "#/$defs/d0"}}}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def of_query(rule: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"query": rule}}


def many(count: int, **member: Any) -> list[Any]:
    return [member] * count


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "references that double": (doubled(13), "$ref: references are not read"),
    "a dynamic reference": (of_query({"$dynamicAnchor": "a", "$dynamicRef": "#a"}), "$dynamicRef: references"),
    "a recursive reference": (of_query({"$recursiveRef": "#"}), "$recursiveRef: references"),
    "a reference deep inside": (of_query({"allOf": [{"items": {"not": {"$ref": "#"}}}]}), "allOf[0].items.not.$ref"),
    "branches": (of_query({"anyOf": many(2_000, type="integer")}), "parameters: holds more than 2,000 values"),
    "nested branches": (of_query({"anyOf": [{"oneOf": many(500, const=1)}] * 3}), "more than 2,000 values"),
    "required names": ({"required": [f"n{n}" for n in range(4_000)]}, "more than 2,000 values"),
    "properties": (
        {"properties": {f"n{n}": {"type": "string"} for n in range(300)}},
        "parameters.properties: has more than 200 names",
    ),
    "choices": (of_query({"enum": list(range(600))}), "parameters.properties.query.enum: has more than 500 values"),
    "patterns": (
        {"properties": {f"n{n}": {"pattern": f"^a{n}"} for n in range(30)}},
        "more than 20 regular expressions",
    ),
    "a long pattern": (of_query({"pattern": "a" * 600}), "pattern: has more than 500 characters"),
    "a pattern that grows": (
        of_query({"pattern": "(a{1000}){60}"}),
        "query.pattern: is no supported regular expression",
    ),
    "a pattern of many classes": (of_query({"pattern": r"\S" * 41}), "query.pattern: uses \\d, \\D, \\s"),
    "patterns of many classes": (
        {"properties": {f"n{n}": {"pattern": r"\w" * 40} for n in range(3)}},
        "\\w and \\W more than 100 times",
    ),
    "a pattern that looks around": (of_query({"pattern": "^((a+)+)\\2(?=c)$"}), "with look-around or back-references"),
    "patterns of names": ({"patternProperties": {"(a{1000}){60}": {}}}, "is no supported regular expression"),
    "unevaluated properties": (
        of_query({"anyOf": [{"unevaluatedProperties": False}]}),
        "unevaluatedProperties: is not",
    ),
    "names as values": ({"propertyNames": {"maxLength": 3}}, "propertyNames: is not read"),
    "another dialect inside": (
        of_query({"$schema": "http://json-schema.org/draft-07/schema#"}),
        "$schema: is read only",
    ),
    "depth": (of_query({"const": nested(40)}), "is nested deeper than 32 levels"),
    "depth that no parser takes": (of_query({"const": nested(400)}), "is nested deeper than 32 levels"),
    "multiples": (of_query({"allOf": many(30, multipleOf=0.1)}), "uses multipleOf more than 20 times"),
    "a huge number": (of_query({"minimum": 10**400}), "query.minimum: is a number beyond 64 bits"),
    "no schema": (of_query({"type": "nope"}), "parameters.properties.query.type"),
    "a row of 300 kB": (of_query({"description": "x" * 300_000}), "it is larger than 262,144 bytes"),
    "a row of 300 kB that does not shrink": (
        of_query({"enum": ["".join(chr(33 + n * 7919 % 90) for n in range(k, k + 700)) for k in range(430)]}),
        "it is larger than 262,144 bytes",
    ),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"too many {name}": ({"jina": {"mode": "search", name: value}}, f"options.jina.{name}: has more than 100 names")
        for name, value in (
            ("params", {f"n{n}": 1 for n in range(150)}),
            ("headers", {f"n{n}": "1" for n in range(150)}),
        )
    },
    "too many defaults": ({"args": {"defaults": {f"n{n}": 1 for n in range(150)}}}, "options.args.defaults: has more"),
    "too many fixed": ({"args": {"fixed": {f"n{n}": 1 for n in range(150)}}}, "options.args.fixed: has more than 100"),
    "too many envs": ({"envs": {f"n{n}": "A" for n in range(150)}}, "options.envs: has more than 100 names"),
    "20,000 envs": ({"envs": {f"n{n}": 1 for n in range(20_000)}}, "options: holds more than 2,000 values"),
    "many values": (
        {"jina": {"mode": "search", "params": {"viewport": {"a": [0] * 4_000}}}},
        "options: holds more than",
    ),
    "depth of options": ({"args": {"fixed": {"site": nested(60)}}}, "is nested deeper than 32 levels"),
    "a huge number in options": ({"args": {"fixed": {"count": 10**400}}}, "fixed.count: is a number beyond 64 bits"),
    "a large row": ({"ui_allowed": "x" * 300_000}, "it is larger than 262,144 bytes"),
}


@pytest.mark.parametrize("column", ["parameters", "options"])
@requirement("definition.bounds")
async def test_an_unparsable_definition_is_refused_not_run_without_a_schema(world: World, column: str) -> None:
    """Such a row counted as empty: the tool ran, and its arguments were not validated."""
    await world.caller.add_tool(PROJECT, search_tool())
    deep = '{"jina": {"mode": "search"}, "const": ' + "[" * 3_000 + "]" * 3_000 + "}"
    await world.caller.database.execute(f"update resource.tools set {column} = $1::text::jsonb", deep)  # noqa: S608
    assert_refused(await world.send(await world.place()), "it is nested too deeply, or contains a number that")


async def store(world: World, row: dict[str, Any]) -> None:
    """Store a row as another client could, with JSON that our encoder may refuse."""
    await world.caller.add_tool(PROJECT, {**row, "parameters": {}, "options": {}})
    await world.caller.database.execute(
        "update resource.tools set parameters = $1::text::jsonb, options = $2::text::jsonb where tool_name = $3",
        json.dumps(row.get("parameters", {})),
        json.dumps(row["options"]),
        row["tool_name"],
    )


async def call_stored(world: World, row: dict[str, Any], arguments: Any = None) -> Outcome:
    """Store a tool and call it; assert the limits of memory and of the result."""
    await store(world, row)
    call = await world.place(arguments)
    with peak_growth() as grown:
        outcome = await world.send(call)
    assert grown() < MAX_BYTES
    assert len(json.dumps(outcome.content)) < MAX_ANSWER_BYTES
    return outcome


def assert_refused(outcome: Outcome, says: str) -> None:
    error = outcome.content["error"]
    assert (error["code"], outcome.upstream_requests) == ("tool_misconfigured", []), error
    assert says in error["message"]
    assert "operator must" in error["message"]


@pytest.mark.parametrize("case", REFUSED)
@requirement("definition.bounds")
async def test_a_schema_beyond_the_bounds_is_tool_misconfigured(world: World, case: str) -> None:
    schema, says = REFUSED[case]
    query = (
        "x" * 1_000 if case == "references that double" else LARGE_TEXT
    )  # 250 kB took all memory before the limit existed
    assert_refused(await call_stored(world, {**search_tool(), "parameters": schema}, {"query": query}), says)


@pytest.mark.parametrize("case", OPTIONS)
@requirement("definition.bounds")
async def test_options_beyond_the_bounds_are_tool_misconfigured(world: World, case: str) -> None:
    options, says = OPTIONS[case]
    assert_refused(await call_stored(world, search_tool(**options)), says)


@pytest.mark.parametrize(
    "rule",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": ["string", "null"]},
        {"oneOf": [{"const": "a"}, {"type": "string", "minLength": 2}]},
        {"allOf": [{"type": "string"}, {"not": {"const": "b"}}]},
        {"if": {"minLength": 5}, "then": {"maxLength": 50}, "else": {"const": "a"}},
        {"type": "string", "pattern": "^[a-z ]+$", "maxLength": 2_000},
        {"enum": ["hello world", *map(str, range(300))]},
        {"anyOf": [*many(800, type="integer"), {"type": "string"}]},
    ],
)
@requirement("definition.bounds")
async def test_schemas_that_only_the_linter_refuses_work_within_the_bounds(world: World, rule: dict[str, Any]) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://tools.example/search",
        "patternProperties": {"^co": {"type": "integer"}},
        "dependentRequired": {"count": ["query"]},
        **of_query(rule),
    }
    outcome = await call_stored(world, {**search_tool(), "parameters": schema})
    assert outcome.content["status"] == "success", outcome.content["error"]


LARGEST: dict[str, dict[str, Any]] = {
    "branches": of_query({"anyOf": many(930, type="integer")}),
    "branches at the root": {"anyOf": many(930, minProperties=9)},
    "all of many": of_query({"allOf": many(930, type="integer")}),
    "required names": {"required": [f"n{n}" for n in range(1_900)]},
    "choices": of_query({"enum": [f"{n}" * 100 for n in range(490)]}),
    "choices of items": {"properties": {"site": {"items": {"enum": [f"{n}" * 70 for n in range(490)]}}}},
    "lengths": of_query({"allOf": many(930, minLength=300_000)}),
    "a constant": of_query({"const": ["y" * 80] * 1_900}),
    "names that do not fit": {"patternProperties": {"a": False}, "additionalProperties": {"type": "integer"}},
}


@pytest.mark.parametrize("case", LARGEST)
@requirement("definition.bounds", "arguments.checked")
async def test_the_largest_schema_and_arguments_give_a_small_error(world: World, case: str) -> None:
    arguments = {"query": "x" * 120_000, "site": ["y" * 100] * 900}
    outcome = await call_stored(world, {**search_tool(), "parameters": LARGEST[case]}, arguments)
    assert (outcome.content["error"]["code"], outcome.upstream_requests) == ("bad_request", [])


@requirement("definition.bounds")
async def test_costly_patterns_are_refused_without_matching(world: World) -> None:
    """20 patterns that expand to large automata took seconds for one text."""
    rules = {f"n{n}": {"pattern": f"1[01]{{{150 + n}}}[^01]"} for n in range(20)}
    await world.caller.add_tool(
        PROJECT, {**search_tool(), "parameters": {"allOf": [of_query(one) for one in rules.values()]}}
    )
    began = time.process_time()
    refused = await world.send(await world.place({"query": "".join("01"[n * n % 7 % 2] for n in range(200_000))}))
    assert "more than 2,500 bytes together" in refused.content["error"]["message"]
    assert time.process_time() - began < 2.0  # took seconds before the limit, 50 ms with it


@requirement("definition.bounds")
async def test_numbers_that_cannot_be_held_exactly_are_refused(world: World) -> None:
    schema = {"properties": {"count": {"allOf": many(19, multipleOf=1)}}}
    outcome = await call_stored(world, {**search_tool(), "parameters": schema}, {**RECORDED_ARGUMENTS, "count": 3.0})
    assert outcome.content["status"] == "success", outcome.content["error"]
    for number, problem in (
        ("9" * 4_000, "count: contains a number beyond 64 bits"),
        ("1e999", "count: contains a number beyond 64 bits"),
    ):
        call = await world.place({"query": "x"})
        await world.caller.database.execute(
            "update cards set content = jsonb_set(content, '{arguments,count}', $1::text::jsonb) where card_id = $2",
            number,
            call.card_id,
        )
        refused = await world.send(call)
        assert refused.content["result"]["error_detail"]["problems"] == [problem]


@requirement("arguments.checked")
async def test_long_names_and_values_are_cut_in_error_messages(world: World) -> None:
    for arguments in (
        {LARGE_TEXT: 1},  # beside a query an open schema drops unknown arguments
        {f"{n}{'z' * 200}": 1 for n in range(900)},
        {"query": "x", "count": LARGE_TEXT},
        {"query": "x", "country": LARGE_TEXT},
    ):
        for schema in ({}, {"additionalProperties": False, "properties": {"query": {}, "count": {"type": "integer"}}}):
            outcome = await call_stored(world, {**search_tool(), "parameters": schema}, arguments)
            error = outcome.content["error"]
            assert error["code"] == "bad_request"
            problems = outcome.content["result"]["error_detail"]["problems"]
            assert len(problems) <= 21
            assert all(len(problem) <= 200 for problem in problems)
            assert ("more" in error["message"]) is (len(arguments) > 100)


@requirement("terminal.text")
async def test_a_bad_definition_is_logged_in_one_short_line_a_call(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(JsonFormatter(Redactor()))
    unknown = {f"unknown_{n}": n for n in range(90)}
    rows = [
        search_tool(jina={"mode": "search", "params": unknown}, args={"defaults": {f"a_{n}": 1 for n in range(90)}}),
        search_tool(jina={"tool": "jina.search_many", "params": unknown}),
        search_tool(envs={"locale": "JINA_API_KEY"}),
        {**search_tool(), "parameters": doubled(3)},
    ]
    for row in rows:
        await world.caller.add_tool(PROJECT, row)
        for _ in range(3):
            queries = {"queries": [f"query {n}" for n in range(5)]}
            await world.send(await world.place(queries if "tool" in row["options"]["jina"] else None))
    lines = [line for line in caplog.text.splitlines() if json.loads(line)["level"] == "warning"]
    actions = [json.loads(line)["action"] for line in lines]
    assert actions == [*["parameter.ignored"] * 6, *["tool.misconfigured"] * 6]
    assert max(map(len, lines)) < 1_000


NOT_AS_DOCUMENTED: Mapping[str, tuple[Any, ...]] = {
    "proxy": ("x" * 40, "deu", "de,fr", "++", "http://proxy.example", 7, True, ["de"]),
    "viewport": (
        *("800x600", {}, {"width": "wide"}, {"height": 0}, {"hasTouch": 1}, {"deviceScaleFactor": 0}),
        *({"cookies": LARGE_TEXT[:100_000]}, {"width": 800, "x": 1}, {"width": 10**6}),
    ),
    "engine": ("x" * 40, "browser,curl", 5),
    "markdownChunking": ("h6", "s0", "x" * 20, 1),
    "robotsTxt": ("x" * 201, 5, ["a"]),
}
AS_DOCUMENTED: Mapping[str, tuple[tuple[Any, Any], ...]] = {
    "proxy": (("de", "de"), ("US+", "US+"), ("any", "any"), (" auto+ ", "auto+"), ("none", "none")),
    "viewport": (
        ({"width": "800"}, {"width": 800}),
        ({"deviceScaleFactor": 1.5, "hasTouch": False}, {"deviceScaleFactor": 1.5, "hasTouch": False}),
    ),
    "engine": (("cf-browser-rendering", "cf-browser-rendering"), ("Browser", "browser")),
    "markdownChunking": (("h3", "h3"), (True, "true"), ("structured", "structured")),
    "robotsTxt": (("MyBot", "MyBot"), (True, True)),
}


@requirement("options.jina", "definition.lint", "arguments.checked")
async def test_an_operators_value_that_is_not_as_documented_is_named_and_left_out(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions sent it, so definitions in use may have it: their calls must not fail."""
    monkeypatch.setenv("PG_DSN", world.dsn)
    monkeypatch.setenv("NATS_SERVERS", world.stack.nats.url)
    for name, wrong in NOT_AS_DOCUMENTED.items():
        where = f"options.jina.params.{name}"
        caplog.clear()
        for value in wrong:
            row = search_tool(jina={"mode": "search", "params": {name: value}})
            problems = [str(problem) for problem in definition_problems(row) if str(problem).startswith(where)]
            assert len(problems) == 1, value
            outcome = await call_stored(world, row)
            assert outcome.content["status"] == "success", (name, value)
            assert name not in json.loads(outcome.upstream_requests[-1]["body"]), value
        logged = [line.getMessage() for line in caplog.records if getattr(line, "action", "") == "parameter.ignored"]
        assert logged
        assert all(where in line and len(line) < 1_000 for line in logged)
        found = await asyncio.to_thread(CliRunner().invoke, app, ["check", "--json", "--project", PROJECT])
        details = json.loads(found.stdout)["details"][f"definitions of {PROJECT}"]
        assert len([line for line in details if where in line and "it is not sent" in line]) == 1, details
    for name, right in AS_DOCUMENTED.items():
        for value, sent_as in right:
            row = search_tool(jina={"mode": "search", "params": {name: value}})
            assert [problem for problem in definition_problems(row) if name in problem.where] == []
            outcome = await call_stored(world, row)
            assert json.loads(outcome.upstream_requests[-1]["body"])[name] == sent_as


@requirement("arguments.prepared")
async def test_an_id_of_any_length_is_not_multiplied_by_a_definition(world: World) -> None:
    await world.caller.add_tool(PROJECT, search_tool(args={"fixed": {"site": "{tool_call_id}" * 140}}))
    call = await world.place()
    call_id = "c" * 20_000
    columns = {
        "cards": "tool_call_id",
        "state.agent_inbox": "correlation_id",
        "state.execution_edges": "correlation_id",
    }
    for table, column in columns.items():
        statement = f"update {table} set {column} = $1 where {column} = $2"  # noqa: S608 - constants only
        await world.caller.database.execute(statement, call_id, call.tool_call_id)
    with peak_growth() as grown:
        outcome = await world.send(replace(call, tool_call_id=call_id), headers={"CG-Tool-Call-Id": call_id})
    assert grown() < MAX_BYTES
    assert_refused(outcome, "{tool_call_id} has more than 1,000 characters")


@requirement("definition.bounds")
async def test_a_call_is_answered_beside_every_hostile_definition(world: World) -> None:
    await world.caller.add_tool(PROJECT, {**search_tool(), "tool_name": "victim"})
    for number, (schema, _) in enumerate(REFUSED.values()):
        name = f"attack_{number}"
        await store(world, {**search_tool(), "tool_name": name, "parameters": schema})
        await world.caller.publish(await world.place({"query": "x" * 1_000}, name))
    outcome = await world.send(await world.place(RECORDED_ARGUMENTS, "victim"))
    assert outcome.content["status"] == "success"
