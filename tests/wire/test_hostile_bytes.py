"""Bytes that no well-behaved client publishes and no server sends: none ends a connection or keeps a call waiting."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from nats.aio.msg import Msg

from openapi_tool.bus import connection
from openapi_tool.local.caller import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.prepared import prepare
from openapi_tool.settings import Settings
from tests.promises import requirement
from tests.wire.sockets import fake_server, header_block, publish
from tests.wire.test_bus import DSN
from tests.wire.world import SETTLED_S, Outcome, World

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
    """Publish raw bytes, then a well-formed call, which must be answered; what is there afterwards."""
    await publish(world.stack.nats.url, subject, body, headers)
    await world.caller.publish(call)
    outcome = await world.outcome(call)
    assert outcome.content["status"] == "success"
    assert len(outcome.upstream_requests) == 1
    return outcome


@pytest.mark.parametrize("subject", BAD_SUBJECTS)
@requirement("wire.hostile_bytes")
async def test_a_subject_of_any_bytes_is_dead_lettered_and_keeps_nobody_waiting(
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
@requirement("wire.hostile_bytes")
async def test_a_header_block_of_any_bytes_is_dead_lettered_and_keeps_nobody_waiting(
    world: World, caplog: pytest.LogCaptureFixture, block: bytes
) -> None:
    outcome = await published(world, await world.place(), PREFIX + b"search", block, b"{}")
    assert len(outcome.dead_letters) == 1
    assert (outcome.terminated, outcome.deliveries) == (1, 2)
    assert disconnects(caplog) == []


@requirement("wire.hostile_bytes", "wire.header_case")
async def test_odd_lines_between_good_headers_do_not_hide_them(world: World) -> None:
    call = await world.place()
    headers = {name.upper(): value for name, value in call.headers.items()}
    block = header_block(headers, b"x-odd: \xff", b"no colon", b"\xffname: v", b"a: 1", b"a: 2")
    await publish(world.stack.nats.url, call.subject.encode(), json.dumps(call.body).encode(), block)
    world.caller.last_sequence = 1
    assert (await world.outcome(call)).content["status"] == "success"


@requirement("wire.headers_too_large")
async def test_more_headers_than_are_read_are_answered_with_what_is_wrong(world: World) -> None:
    call = await world.place()
    block = header_block(call.headers, *[b"a:"] * 300)
    await publish(world.stack.nats.url, call.subject.encode(), json.dumps(call.body).encode(), block)
    world.caller.last_sequence = 1
    outcome = await world.outcome(call)
    assert outcome.content["error"]["code"] == "bad_request"
    assert "the headers have more than 256 lines or 65,536 bytes" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []


@requirement("wire.doorbell_impossible")
async def test_a_doorbell_that_the_server_would_hang_up_on_is_not_rung(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    call = await world.place()
    await world.caller.database.execute("update resource.project_agents set worker_target = repeat('w', 5000)")
    outcome = await world.send(call, headers={"traceparent": None})
    assert (outcome.content["status"], outcome.doorbells, outcome.deliveries) == ("success", [], 1)
    assert [record for record in caplog.records if getattr(record, "action", "") == "doorbell.failed"]
    assert disconnects(caplog) == []


# A server, or somebody on the way.


@pytest.fixture
def no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings would find a deaf connection after half a minute; here only the end of the read loop can."""
    monkeypatch.setattr(connection, "_PING_S", 3600)


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
@requirement("bus.reconnects")
async def test_whatever_the_server_sends_the_client_listens_again_at_once(sent: bytes) -> None:
    async with fake_server() as server:
        settings = Settings(postgres=DSN, nats={"servers": server.url})
        arrived: asyncio.Queue[Msg] = asyncio.Queue()
        async with asyncio.timeout(SETTLED_S), connection.connected(prepare(settings, {}).bus) as client:
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
@requirement("bus.reconnects")
async def test_whatever_the_server_greets_with_the_client_tries_again(greeting: bytes) -> None:
    async with fake_server() as server:
        settings = Settings(postgres=DSN, nats={"servers": server.url})
        async with asyncio.timeout(SETTLED_S), connection.connected(prepare(settings, {}).bus) as client:
            first = await server.accepted.get()
            usual, server.greeting = server.greeting, greeting
            first.drop()
            await server.accepted.get()
            server.greeting = usual
            again = await server.accepted.get()
            await again.logged_in.wait()
            await client.flush()


@requirement("wire.hostile_bytes")
async def test_a_message_to_our_inbox_that_jetstream_did_not_send_is_ignored(
    world: World, stack: EmbeddedStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may publish to `_INBOX.>` can find the pull's inbox."""
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    await world.caller.client.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=heard.put)
    await world.send(await world.place())
    inbox = (await heard.get()).reply
    replies = (b"", b"x", b"\xff", b"x\x0b1")  # the server lets nobody reply to $JS.ACK
    for reply in replies:
        await publish(stack.nats.url, inbox.encode() + (b" " + reply if reply else b""), b"{}")
    outcome = await world.send(await world.place())
    assert outcome.content["status"] == "success"
    ignored = [record for record in caplog.records if getattr(record, "action", "") == "pull.foreign"]
    assert len(ignored) == len(replies)
    assert (outcome.dead_letters, disconnects(caplog)) == ([], [])
