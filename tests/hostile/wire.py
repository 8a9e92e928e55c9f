"""Commands as no client library would send them: raw bytes at the NATS socket."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from nats.aio.msg import Msg

from openapi_tool.local.caller import PlacedCall
from tests.hostile.case import Cases
from tests.hostile.scene import (
    AGENT,
    ANSWER_S,
    PROJECT,
    SUBJECT,
    Scene,
    assert_failed,
    assert_succeeded,
    hpub,
)

CASES = Cases()
LARGE_BYTES = 790_000
LARGEST_HEADERS = 65_000
"""JetStream takes 64 KiB of headers and no more."""

MANY = 90
KEPT_BYTES = 64 * 1024

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
"""Blocks of headers, of which a server may refuse some; whatever it takes in has to come to an end."""

FORGED_STATUS = {"Status": "409", "Description": "Consumer Deleted", "Nats-Pending-Messages": "99"}
"""Names under which the client library hands on what a server says."""


def _block(call: PlacedCall, *more: bytes) -> bytes:
    """The headers of a call with others behind them."""
    lines = [f"{name}: {value}".encode() for name, value in call.headers.items()]
    return b"\r\n".join([b"NATS/1.0", *lines, *more, b"", b""])


async def _unanswered(scene: Scene, *changed: bytes, **changes: Any) -> PlacedCall:
    """A good call whose command went out with more headers."""
    call = await scene.place(await scene.define(), {"query": "hello world"}, publish=False, **changes)
    said = await scene.publish_raw(hpub(call.subject.encode(), _block(call, *changed), orjson.dumps(call.body)))
    assert b"-ERR" not in said, said
    return call


@CASES.case("1")
async def subject_that_is_no_utf8(scene: Scene) -> None:
    said = await scene.publish_raw(hpub(SUBJECT.encode()[:-2] + b"\xff", None))
    assert b"-ERR" not in said
    letters = await scene.letters()
    assert {letter["reason"] for letter in letters} <= {"bad_subject", "no_identity"}, letters


@CASES.case("1")
async def subjects_that_are_no_utf8_in_any_token(scene: Scene) -> None:
    project, channel = PROJECT.encode(), b"public"
    tokens = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80", b"a\x80b", b"\x01\x7f\xfe", b"\x1b[2J\xff"]
    subjects = [
        *(b"cg.v1r4.%b.public.cmd.tool.jina.search" % token for token in tokens),
        *(b"cg.v1r4.%b.%b.cmd.tool.jina.search" % (project, token) for token in tokens),
        *(b"cg.v1r4.%b.%b.cmd.tool.jina.%b" % (project, channel, token) for token in tokens),
        *(b"cg.v1r4.%b.%b.cmd.tool.jina.x.%b" % (project, channel, token) for token in tokens),
    ]
    assert b"-ERR" not in await scene.publish_raw(*(hpub(subject, None) for subject in subjects))
    assert len(await scene.letters(len(subjects))) == len(subjects)


@CASES.case("1")
async def subjects_that_are_no_utf8_in_a_flood(scene: Scene) -> None:
    frame = hpub(SUBJECT.encode()[:-2] + b"\xff", None)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * MANY))
    await scene.letters(MANY)


@CASES.case("1")
async def subject_of_control_characters(scene: Scene) -> None:
    odd = b"".join(bytes([byte]) for byte in range(1, 32) if byte not in b"\t\n\r\v\f") + "\u202eab\x7f".encode()
    assert b"-ERR" not in await scene.publish_raw(hpub(SUBJECT.encode() + odd, None))
    await scene.letters()


@CASES.case("own")
async def subjects_that_hold_white_space(scene: Scene) -> None:
    """The server lets through what the client library takes for the end of the subject, with a number behind it."""
    ends = [b"\vx", b"\fx", b"\rx", b"\v1\v2", b"\f1\f$JS.ACK.x\f3", b"\v", b"\f"]
    assert b"-ERR" not in await scene.publish_raw(*(hpub(SUBJECT.encode() + end, None) for end in ends))
    await scene.settled()
    assert len(await scene.letters(len(ends))) == len(ends)


@CASES.case("1")
async def subject_of_four_thousand_bytes(scene: Scene) -> None:
    assert b"-ERR" not in await scene.publish_raw(hpub(SUBJECT.encode() + b"x" * 3_900, None))
    await scene.letters()


@CASES.case("1")
async def header_blocks_that_are_none(scene: Scene) -> None:
    for block in ODD_BLOCKS:  # each alone: the server closes where it refuses one
        await scene.publish_raw(hpub(SUBJECT.encode(), block))
    await scene.settled()
    await scene.letters()


@CASES.case("1")
async def header_that_is_no_utf8(scene: Scene) -> None:
    call = await _unanswered(scene, b"X-\xff: \xfe", b"X-Note: \xff\xc3(")
    assert_succeeded(await scene.caller.answer(call, ANSWER_S))


@CASES.case("1")
async def headers_that_look_like_the_servers_own(scene: Scene) -> None:
    call = await _unanswered(scene, *(f"{name}: {value}".encode() for name, value in FORGED_STATUS.items()))
    assert_succeeded(await scene.caller.answer(call, ANSWER_S))


@CASES.case("1")
async def headers_twice_and_in_odd_case(scene: Scene) -> None:
    more = [f"{name.upper()}: somebody-else".encode() for name in ("CG-Agent-Id", "CG-Project-Id", "CG-Tool-Call-Id")]
    call = await _unanswered(scene, *more)
    assert_succeeded(await scene.caller.answer(call, ANSWER_S))


@CASES.case("1")
async def headers_by_the_thousand(scene: Scene) -> None:
    call = await _unanswered(scene, *(b"X-%d: x" % number for number in range(5_000)))
    assert_failed(await scene.caller.answer(call, ANSWER_S), "bad_request")


@CASES.case("2")
async def large_commands_without_identity(scene: Scene) -> None:
    frame = hpub(SUBJECT.encode(), None, b"x" * LARGE_BYTES)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * MANY))
    await scene.settled()
    for letter in await scene.letters(MANY):
        assert len(orjson.dumps(letter)) < 2 * KEPT_BYTES, "the record is nearly as large as the command"


@CASES.case("2")
async def large_headers_without_identity(scene: Scene) -> None:
    block = b"NATS/1.0\r\nX-Large: " + b"x" * LARGEST_HEADERS + b"\r\n\r\n"
    frame = hpub(SUBJECT.encode(), block, b"x" * LARGE_BYTES)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * MANY))
    await scene.settled()
    for letter in await scene.letters(MANY):
        assert len(orjson.dumps(letter)) < 2 * KEPT_BYTES, "the record is nearly as large as the command"


@CASES.case("2")
async def large_headers_of_bytes_that_grow(scene: Scene) -> None:
    """Bytes that take six in JSON, so that a record of them is larger than the server takes."""
    block = b"NATS/1.0\r\nX-Large: " + b"\x01" * LARGEST_HEADERS + b"\r\n\r\n"
    frame = hpub(SUBJECT.encode(), block, b"\xff" * KEPT_BYTES)
    assert b"-ERR" not in await scene.publish_raw(*([frame] * 8))
    await scene.settled()
    await scene.letters(8)


@CASES.case("2")
async def large_bodies_of_calls_that_can_be_answered(scene: Scene) -> None:
    tool = await scene.define()
    calls = [await scene.place(tool, {"query": "x"}, publish=False) for _ in range(20)]
    for call in calls:
        await scene.caller.publish(call, data=b"[" * LARGE_BYTES)
    for call in calls:
        assert_failed(await scene.caller.answer(call, ANSWER_S), "bad_request")


@CASES.case("2", log_bytes=3_000_000)  # a line for each
async def dead_letters_of_one_project_leave_room_for_others(scene: Scene) -> None:
    frame = hpub(SUBJECT.encode(), None, b"{}")
    await scene.publish_raw(*([frame] * (1_000 + scene.share(2_000))))
    await scene.settled()
    await scene.letters()
    other = SUBJECT.replace(PROJECT, "proj_other").encode()
    await scene.publish_raw(hpub(other, None, b"{}"))
    await scene.settled()
    assert any("proj_other" in letter["subject"] for letter in await scene.letters()), "pushed out"


@CASES.case("3")
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


@CASES.case("1")
async def bodies_that_are_hard_to_parse(scene: Scene) -> None:
    tool = await scene.define()
    bodies = [b"[" * 60_000, b'{"a":' * 10_000, b"9" * 60_000, b'"\\ud800' * 8_000, b"\xff" * 60_000, b"\x00" * 60_000]
    calls = [await scene.place(tool, {"query": "x"}, publish=False) for _ in bodies]
    await asyncio.gather(*(scene.caller.publish(call, data=body) for call, body in zip(calls, bodies, strict=True)))
    for call in calls:
        assert_failed(await scene.caller.answer(call, ANSWER_S), "bad_request")


@CASES.case("own")
async def ids_of_sixty_kilobytes(scene: Scene) -> None:
    """A call's ids stand in every log line about it."""
    long = b"x" * (LARGEST_HEADERS - 100)
    for name in (b"CG-Tool-Call-Id", b"CG-Agent-Id", b"CG-Turn-Id", b"CG-Step-Id", b"traceparent", b"tracestate"):
        fields = {b"CG-Agent-Id": AGENT.encode(), b"CG-Turn-Id": b"t", b"CG-Tool-Call-Id": b"c", name: long}
        lines = [b"%b: %b" % field for field in fields.items()]
        await scene.publish_raw(hpub(SUBJECT.encode(), b"\r\n".join([b"NATS/1.0", *lines, b"", b""])))
    await scene.settled()
    await scene.letters(5)


@CASES.case("14")
async def the_servers_word_where_doorbells_are_acknowledged(scene: Scene) -> None:
    """What doorbells show of the executor's inboxes, and there, in the server's name: nobody listens, ask again."""
    told: list[str] = []

    async def hear(message: Msg) -> None:
        told.append(message.reply)

    heard = await scene.caller.client.subscribe(f"cg.v1r4.{PROJECT}.*.cmd.agent.*.wakeup", cb=hear)
    for _ in range(3):
        await scene.search("{n}")
    await heard.unsubscribe()
    inboxes = {inbox for reply in told for inbox in (reply, reply.rpartition(".")[0])}
    assert inboxes
    blocks = [b"NATS/1.0 %d\r\n\r\n" % status for status in (503, 408, 409)]
    frames = [hpub(inbox.encode(), block, b"") for inbox in inboxes for block in blocks]
    await scene.publish_raw(*frames * 20)
    await scene.search("{n}")
    assert "consumer.lost" not in scene.log()
