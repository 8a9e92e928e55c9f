"""Attacks by the bytes of commands, and on shares of slots and connections."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any

import orjson
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.nats_records.record_store import BUDGETS
from openapi_tool.nats_records.replica_statistics import STATS_SUBJECT as STATISTICS
from tests.hostile.case import Cases
from tests.hostile.scene import (
    AGENT,
    ANSWER_S,
    PROJECT,
    Scene,
    assert_failed,
    assert_succeeded,
    hpub,
)

CASES = Cases()
LARGE_BYTES = 790_000
LARGEST_HEADERS = 65_000
"""JetStream's limit of headers is 64 KiB."""

LARGE_COMMANDS = 90
RECORDED_BYTES = 64 * 1024

ODD_BLOCKS = (
    b"NATS/1.0\r\n",
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0\r\n: \r\n\r\n",
    b"NATS/1.0\r\nno colon\r\n\r\n",
    b"NATS/1.0\r\nCG-Agent-Id\r\n\r\n",
    b"NATS/1.0 \r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\n\r\n",
    b"NATS/1.0 100 FlowControl Request\r\n\r\n",
    b"NATS/1.0 404 No Messages\r\n\r\n",
    b"NATS/1.0 409 Consumer Deleted\r\nNats-Pending-Messages: 99\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0 200 \xff\xfe\r\n\r\n",
    b"NATS/1.0 999999999999 x\r\nA: b\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: x\r\n\r\n",
    b"NATS/1.0\r\nCG-Agent-Id: \xff\xfe\r\n\r\n",
    b"NATS/1.0\r\n\r\n\r\n\r\n",
    b"NATS/9.9\r\nA: b\r\n\r\n",
    b"X",
    b"\r\n",
    b"\xff" * 12,
)
"""Blocks of headers. A server may refuse some; commands with the others must be settled."""

FORGED_STATUS = {"Status": "409", "Description": "Consumer Deleted", "Nats-Pending-Messages": "99"}
"""Names of headers in which the client library passes on texts of the server."""


def _block(call: PlacedCall, *more: bytes) -> bytes:
    """Return the headers of a call, followed by others."""
    lines = [f"{name}: {value}".encode() for name, value in call.headers.items()]
    return b"\r\n".join([b"NATS/1.0", *lines, *more, b"", b""])


async def _publish_valid_call(scene: Scene, *changed: bytes, **changes: Any) -> PlacedCall:
    """Publish a valid call with additional headers."""
    call = await scene.place(await scene.define(), {"query": "hello world"}, publish=False, **changes)
    output = await scene.publish_raw(hpub(call.subject.encode(), _block(call, *changed), orjson.dumps(call.body)))
    assert b"-ERR" not in output, output
    return call


@CASES.case("1")
async def subject_without_utf8(scene: Scene) -> None:
    output = await scene.publish_raw(hpub(scene.subject.encode()[:-2] + b"\xff", None))
    assert b"-ERR" not in output
    letters = await scene.letters()
    assert {letter["reason"] for letter in letters} <= {"bad_subject", "no_identity"}, letters


@CASES.case("1")
async def subjects_without_utf8_in_each_token(scene: Scene) -> None:
    version, project, channel = scene.caller.version.encode(), PROJECT.encode(), b"public"
    tokens = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80", b"a\x80b", b"\x01\x7f\xfe", b"\x1b[2J\xff"]
    subjects = [
        *(b"cg.%b.%b.public.cmd.tool.jina.search" % (version, token) for token in tokens),
        *(b"cg.%b.%b.%b.cmd.tool.jina.search" % (version, project, token) for token in tokens),
        *(b"cg.%b.%b.%b.cmd.tool.jina.%b" % (version, project, channel, token) for token in tokens),
        *(b"cg.%b.%b.%b.cmd.tool.jina.x.%b" % (version, project, channel, token) for token in tokens),
    ]
    assert b"-ERR" not in await scene.publish_raw(*(hpub(subject, None) for subject in subjects))
    assert len(await scene.letters(len(subjects))) == len(subjects)


@CASES.case("1")
async def flood_of_subjects_without_utf8(scene: Scene) -> None:
    frame = hpub(scene.subject.encode()[:-2] + b"\xff", None)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * LARGE_COMMANDS))
    await scene.letters(LARGE_COMMANDS)


@CASES.case("1")
async def subject_of_control_characters(scene: Scene) -> None:
    """Without DEL (0x7f): NATS 2.15.1 may never deliver a message whose subject has it to a filtered consumer."""
    odd = b"".join(bytes([byte]) for byte in range(1, 32) if byte not in b"\t\n\r\v\f") + "\u202eab".encode()
    assert b"-ERR" not in await scene.publish_raw(hpub(scene.subject.encode() + odd, None))
    await scene.letters()


@CASES.case("own")
async def subjects_with_white_space(scene: Scene) -> None:
    """The server accepts characters that the client library reads as the end of the subject; a number follows."""
    ends = [b"\vx", b"\fx", b"\rx", b"\v1\v2", b"\f1\f$JS.ACK.x\f3", b"\v", b"\f"]
    assert b"-ERR" not in await scene.publish_raw(*(hpub(scene.subject.encode() + end, None) for end in ends))
    await scene.settled()
    assert len(await scene.letters(len(ends))) == len(ends)


@CASES.case("1")
async def subject_of_four_thousand_bytes(scene: Scene) -> None:
    assert b"-ERR" not in await scene.publish_raw(hpub(scene.subject.encode() + b"x" * 3_900, None))
    await scene.letters()


@CASES.case("1")
async def malformed_header_blocks(scene: Scene) -> None:
    for block in ODD_BLOCKS:  # one connection for each: the server closes it if it refuses one
        await scene.publish_raw(hpub(scene.subject.encode(), block))
    await scene.settled()
    await scene.letters()


@CASES.case("1")
async def header_without_utf8(scene: Scene) -> None:
    call = await _publish_valid_call(scene, b"X-\xff: \xfe", b"X-Note: \xff\xc3(")
    assert_succeeded(await scene.caller.result(call, ANSWER_S))


@CASES.case("1")
async def headers_that_imitate_the_server(scene: Scene) -> None:
    call = await _publish_valid_call(scene, *(f"{name}: {value}".encode() for name, value in FORGED_STATUS.items()))
    assert_succeeded(await scene.caller.result(call, ANSWER_S))


@CASES.case("1")
async def repeated_headers_and_odd_case(scene: Scene) -> None:
    more = [f"{name.upper()}: somebody-else".encode() for name in ("CG-Agent-Id", "CG-Project-Id", "CG-Tool-Call-Id")]
    call = await _publish_valid_call(scene, *more)
    assert_succeeded(await scene.caller.result(call, ANSWER_S))


@CASES.case("1")
async def thousands_of_headers(scene: Scene) -> None:
    call = await _publish_valid_call(scene, *(b"X-%d: x" % number for number in range(5_000)))
    assert_failed(await scene.caller.result(call, ANSWER_S), "bad_request")


@CASES.case("2")
async def large_commands_without_identity(scene: Scene) -> None:
    frame = hpub(scene.subject.encode(), None, b"x" * LARGE_BYTES)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * LARGE_COMMANDS))
    await scene.settled()
    for letter in await scene.letters(LARGE_COMMANDS):
        assert len(orjson.dumps(letter)) < 2 * RECORDED_BYTES, "the record is nearly as large as the command"


@CASES.case("2")
async def large_headers_without_identity(scene: Scene) -> None:
    block = b"NATS/1.0\r\nX-Large: " + b"x" * LARGEST_HEADERS + b"\r\n\r\n"
    frame = hpub(scene.subject.encode(), block, b"x" * LARGE_BYTES)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * LARGE_COMMANDS))
    await scene.settled()
    for letter in await scene.letters(LARGE_COMMANDS):
        assert len(orjson.dumps(letter)) < 2 * RECORDED_BYTES, "the record is nearly as large as the command"


@CASES.case("2")
async def large_headers_that_grow_in_json(scene: Scene) -> None:
    """Bytes that take six in JSON, so that their record exceeds the server's limit."""
    block = b"NATS/1.0\r\nX-Large: " + b"\x01" * LARGEST_HEADERS + b"\r\n\r\n"
    frame = hpub(scene.subject.encode(), block, b"\xff" * RECORDED_BYTES)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * 8))
    await scene.settled()
    await scene.letters(8)


@CASES.case("2", versions=["v1r4"])
async def large_bodies_of_valid_calls(scene: Scene) -> None:
    tool = await scene.define()
    calls = [await scene.place(tool, {"query": "x"}, publish=False) for _ in range(20)]
    for call in calls:
        await scene.caller.publish(call, data=b"[" * LARGE_BYTES)
    for call in calls:
        assert_failed(await scene.caller.result(call, ANSWER_S), "bad_request")


@CASES.case("2")
async def dead_letters_of_one_project_leave_space_for_others(scene: Scene) -> None:
    frame = hpub(scene.subject.encode(), None, b"{}")
    await scene.publish_raw(*([frame] * (1_000 + scene.scaled(2_000))))
    await scene.settled()
    await scene.letters()
    other = scene.subject.replace(PROJECT, "proj_other").encode()
    await scene.publish_raw(hpub(other, None, b"{}"))
    await scene.settled()
    assert any("proj_other" in letter["subject"] for letter in await scene.letters()), "pushed out"


@CASES.case("3", versions=["v1r4"])  # for v1r3 see tests/kernel/test_store.py
async def inbox_row_without_its_card(scene: Scene) -> None:
    tool = await scene.define()
    call = await scene.place(tool, {"query": "stray row"}, publish=False)
    await scene.caller.database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, channel_id, message_type, correlation_id, "
        "agent_turn_id, turn_epoch, context_headers, payload, status) "
        "values ($1, $2, $3, 'public', 'tool_result', $4, $5, 1, '{}', '{}', 'pending')",
        f"inbox_{call.tool_call_id}",
        PROJECT,
        AGENT,
        call.tool_call_id,
        call.agent_turn_id,
    )
    await scene.caller.publish(call)
    await scene.settled()
    assert b"stray row" not in scene.sent(), "it was billed"
    assert "already_reported" in {letter["reason"] for letter in await scene.letters()}


HARD_BODIES = (b"[" * 60_000, b'{"a":' * 10_000, b"9" * 60_000, b'"\\ud800' * 8_000, b"\xff" * 60_000, b"\x00" * 60_000)


@CASES.case("1", versions=["v1r3"])
async def bodies_hard_to_parse_without_identity(scene: Scene) -> None:
    call = await scene.place(await scene.define(), {"query": "x"}, publish=False)
    bodies = [*HARD_BODIES, b"[" * LARGE_BYTES]
    await asyncio.gather(*(scene.caller.publish(call, data=body) for body in bodies))
    assert {letter["reason"] for letter in await scene.letters(len(bodies))} == {"no_identity"}


@CASES.case("1", versions=["v1r4"])
async def bodies_hard_to_parse(scene: Scene) -> None:
    tool, bodies = await scene.define(), HARD_BODIES
    calls = [await scene.place(tool, {"query": "x"}, publish=False) for _ in bodies]
    await asyncio.gather(*(scene.caller.publish(call, data=body) for call, body in zip(calls, bodies, strict=True)))
    for call in calls:
        assert_failed(await scene.caller.result(call, ANSWER_S), "bad_request")


@CASES.case("own")
async def ids_of_sixty_kilobytes(scene: Scene) -> None:
    """The ids of a call are in every log line about it."""
    long = b"x" * (LARGEST_HEADERS - 100)
    for name in (b"CG-Tool-Call-Id", b"CG-Agent-Id", b"CG-Turn-Id", b"CG-Step-Id", b"traceparent", b"tracestate"):
        fields = {b"CG-Agent-Id": AGENT.encode(), b"CG-Turn-Id": b"t", b"CG-Tool-Call-Id": b"c", name: long}
        lines = [b"%b: %b" % field for field in fields.items()]
        await scene.publish_raw(hpub(scene.subject.encode(), b"\r\n".join([b"NATS/1.0", *lines, b"", b""])))
    await scene.settled()
    await scene.letters(5)


@CASES.case("own", versions=["v1r3"])
async def invalid_ids_in_the_body(scene: Scene) -> None:
    """Each causes a dead letter, or a result as the call card permits; no upstream request."""
    tool = await scene.define()
    values: list[Any] = [None, True, [], {"a": 1}, "", " ", "\x00", "a\x00b", "\ud800", "x" * 60_000, 1e308, -1, 2**70]
    for name in ("tool_call_id", "agent_id", "agent_turn_id", "turn_epoch"):
        for value in values:
            call = await scene.place(tool, {"query": "never billed"}, publish=False)
            await scene.caller.publish(call, data=json.dumps({**call.body, name: value}).encode())
    await scene.settled()
    assert b"never billed" not in scene.sent()


@CASES.case("own", versions=["v1r3"])
async def identity_in_headers_contradicts_the_body(scene: Scene) -> None:
    """Headers of the other version name another agent, turn and project; only the body counts."""
    forged = {"CG-Project-Id": "proj_other", "CG-Agent-Id": "other", "CG-Turn-Id": "other", "CG-Tool-Call-Id": "other"}
    call = await scene.place(await scene.define(), {"query": "hello world"}, publish=False)
    await scene.caller.publish(call, headers={**call.headers, **forged})
    answer = await scene.caller.result(call, ANSWER_S)
    assert_succeeded(answer)
    assert answer.inbox_row["agent_id"] == AGENT
    assert answer.doorbell is not None
    assert not forged.keys() & answer.doorbell["headers"].keys()


@CASES.case("14")
async def forged_status_messages_for_doorbells(scene: Scene) -> None:
    """Derive inboxes from doorbells, and send forged server messages there: no responders, request again."""
    replies: list[str] = []

    async def hear(message: Msg) -> None:
        replies.append(message.reply)

    subscription = await scene.caller.client.subscribe(scene.doorbells, cb=hear)
    for _ in range(3):
        await scene.search("{n}")
    await subscription.unsubscribe()
    inboxes = {inbox for reply in replies for inbox in (reply, reply.rpartition(".")[0])}
    assert inboxes
    blocks = [b"NATS/1.0 %d\r\n\r\n" % status for status in (503, 408, 409)]
    frames = [hpub(inbox.encode(), block, b"") for inbox in inboxes for block in blocks]
    await scene.publish_raw(*frames * 20)
    await scene.search("{n}")
    assert "consumer.lost" not in scene.log()


_SLOTS = 64
_ANSWERS_A_SECOND = 20


@CASES.case("own", latency_s=1.2)  # less than the attacker's calls take
async def slow_calls_in_every_slot(scene: Scene) -> None:
    """More calls than slots; a running call is not interrupted."""
    tool = await scene.define({"jina": {"mode": "search"}, "suspend_timeout_seconds": 60})
    for answer in await scene.calls(_SLOTS + 6, tool, {"query": "victim-1000 {n}"}):
        assert_succeeded(answer)


@CASES.case("own", log_bytes=400_000)  # the final line of each call
async def endless_sessions_without_budget(scene: Scene) -> None:
    """Each session has an account, at no cost to the attacker; the store is shared by all projects."""
    tool = await scene.define({"jina": {"mode": "search"}, "budget": {"session_requests": 0}})
    for answer in await scene.calls(scene.scaled(400), tool, {"query": "never billed", "session_id": "session {n}"}):
        assert_failed(answer, "budget_exceeded")
    assert b"never billed" not in scene.sent()
    try:
        stored = await scene.caller.client.jetstream().stream_info(f"KV_{BUDGETS.bucket.name}")
    except NotFoundError:
        return
    assert not stored.state.messages


@CASES.case("own")
async def endless_requests_for_statistics(scene: Scene) -> None:
    """From a client that may publish there; each reply has tens of kilobytes."""
    answers: list[float] = []

    async def hear(message: Msg) -> None:
        answers.append(len(message.data))

    inbox = f"{STATISTICS}.{secrets.token_hex(8)}"
    began = time.monotonic()
    subscription = await scene.caller.client.subscribe(inbox, cb=hear)
    question = f"PUB {STATISTICS} {inbox} 0\r\n\r\n".encode()
    await scene.publish_raw(*[question * 500] * scene.scaled(80))
    await scene.search("{n}")  # its command arrives after all requests
    await scene.caller.client.flush()
    assert len(answers) <= _ANSWERS_A_SECOND * (time.monotonic() - began + 2)  # full and started seconds
    answers.clear()
    async with asyncio.timeout(ANSWER_S):
        while not answers:  # a second later it replies again
            await scene.caller.client.publish(STATISTICS, b"", inbox)
            await asyncio.sleep(0.1)
    await subscription.unsubscribe()
