"""Doorbells that the stream refuses temporarily or permanently, and doorbells that are no longer needed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from nats.js.api import StreamConfig
from prometheus_client import REGISTRY

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.bus import connection
from openapi_tool.bus.connection import connected
from openapi_tool.local.caller import STREAM
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.command import Wakeup
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from tests.requirements import requirement
from tests.wire.test_bus import DSN, server
from tests.wire.test_intake import until
from tests.wire.world import World

TOOL_COMMANDS = "cg.v1r4.*.*.cmd.tool.*.>"
ALL_COMMANDS = "cg.v1r4.*.*.cmd.*.*.>"
SHORT_TIMEOUTS: dict[str, Any] = {"worker_timeout_s": 3, "commit_margin_s": 0.5, "requeue_delay_s": 0.05}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(connection, "_RETRY_LIMIT_S", 0.2)


async def capture(world: World, subjects: str) -> None:
    """Let the stream capture only these subjects."""
    jetstream = world.caller.client.jetstream()
    await jetstream.update_stream(StreamConfig(name=STREAM, subjects=[subjects], max_age=24 * 3600))


async def doorbells_in(world: World) -> int:
    info = await world.caller.client.jetstream().stream_info(STREAM, subjects_filter="cg.v1r4.*.*.cmd.agent.*.wakeup")
    return sum((info.state.subjects or {}).values())


def missed() -> float:
    return REGISTRY.get_sample_value("openapi_tool_doorbells_missed_total") or 0.0


def settings(world: World) -> dict[str, Any]:
    return {"nats": {"servers": world.stack.nats.url, "ack_wait_s": 0.5}, "executor": SHORT_TIMEOUTS}


@requirement("answer.doorbell")
async def test_a_doorbell_is_retried_while_the_stream_is_unavailable(
    idle_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world, before = idle_world, missed()
    caplog.set_level(logging.INFO, "openapi_tool")
    await capture(world, TOOL_COMMANDS)
    async with world.executor(**settings(world)):
        call = await world.place()
        await world.caller.publish(call)
        await until(lambda: requeued(caplog))
        await capture(world, ALL_COMMANDS)
        outcome = await world.outcome(call)
    assert await doorbells_in(world) == 1
    assert outcome.deliveries > 1
    assert len(outcome.upstream_requests) == 1
    assert missed() == before
    line = requeued(caplog)[0]
    assert (line["project_id"], line["tool_call_id"]) == (call.project_id, call.tool_call_id)
    assert line["message"].startswith("command requeued: NATS")


def requeued(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        vars(record) | {"message": record.getMessage()}
        for record in caplog.records
        if getattr(record, "action", "") == "command.requeued"
    ]


@requirement("answer.doorbell")
async def test_no_responders_is_an_outage_not_a_refusal(stack: EmbeddedStack) -> None:
    """While a stream elects a leader, its subjects have no responders."""
    with server(stack, "") as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url}), {})
        async with connected(bootstrap.bus) as client:
            with pytest.raises(Unavailable, match="NoStreamResponseError"):
                await connection.WakeupPublisher(client).publish(
                    Wakeup("cg.v1r4.proj.public.cmd.agent.worker.wakeup", {}, b"{}")
                )


@requirement("answer.doorbell")
async def test_a_doorbell_is_given_up_logged_and_counted_once_no_worker_waits(
    idle_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world, before = idle_world, missed()
    await capture(world, TOOL_COMMANDS)
    async with world.executor(**settings(world)):
        outcome = await world.send(await world.place())
    await capture(world, ALL_COMMANDS)
    assert outcome.rows.inbox_row["payload"]["status"] == "success"
    assert len(outcome.upstream_requests) == 1
    assert missed() == before + 1
    found = [record for record in caplog.records if getattr(record, "action", "") == "doorbell.missed"]
    assert [record.levelno for record in found] == [logging.ERROR]


@pytest.mark.parametrize(("status", "doorbells"), [("pending", 2), ("deferred", 2), ("consumed", 1), ("processing", 1)])
@requirement("answer.doorbell")
async def test_a_redelivered_command_sends_a_doorbell_only_while_its_row_is_unclaimed(
    world: World, status: str, doorbells: int
) -> None:
    """A recreated durable redelivers a day of commands; without this check each gets a doorbell again."""
    call = await world.place()
    await world.send(call)
    await world.caller.database.execute(
        "update state.agent_inbox set status = $1 where inbox_id like 'inbox_%'", status
    )
    await world.send(call)
    assert await doorbells_in(world) == doorbells
