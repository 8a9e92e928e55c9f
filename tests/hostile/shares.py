"""Attacks on shared resources: slots, the store of budgets, the subject of statistics."""

from __future__ import annotations

import asyncio
import secrets
import time

from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from openapi_tool.bus.stats import SUBJECT as STATISTICS
from openapi_tool.bus.storage import BUDGETS
from tests.hostile.case import Cases
from tests.hostile.scene import ANSWER_S, Scene, assert_failed, assert_succeeded

CASES = Cases()
_SLOTS = 64
_ANSWERS_A_SECOND = 20


@CASES.case("own", latency_s=1.2)  # less than the attacker's calls take
async def slow_calls_in_every_slot(scene: Scene) -> None:
    """More calls than slots; a running call is not interrupted."""
    tool = await scene.define({"jina": {"mode": "search"}, "suspend_timeout_seconds": 60})
    for answer in await scene.calls(_SLOTS + 6, tool, {"query": "victim-1000 {n}"}):
        assert_succeeded(answer)


@CASES.case("own", log_bytes=1_000_000)  # lines of each call
async def endless_sessions_without_budget(scene: Scene) -> None:
    """Each session has an account, at no cost to the attacker; the store is shared by all projects."""
    tool = await scene.define({"jina": {"mode": "search"}, "budget": {"session_requests": 0}})
    for answer in await scene.calls(scene.scaled(400), tool, {"query": "never billed", "session_id": "session {n}"}):
        assert_failed(answer, "budget_exceeded")
    assert b"never billed" not in scene.sent()
    try:
        stored = await scene.caller.client.jetstream().stream_info(f"KV_{BUDGETS.bucket}")
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
