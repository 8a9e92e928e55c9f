"""What becomes of commands that nobody answers, and how people get at them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.local.caller import STREAM
from tests.promises import requirement
from tests.wire.world import DURABLE, World


@pytest.fixture
def environment(idle_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", idle_world.dsn)
    monkeypatch.setenv("NATS_SERVERS", idle_world.stack.nats.url)


async def deadletters(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["deadletters", *arguments])


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.usefixtures("environment")
@requirement("deadletters.cli")
async def test_a_dead_letter_is_listed_shown_and_sent_again(idle_world: World) -> None:
    world = idle_world
    call = await world.place()
    async with world.executor():
        await world.send(call, headers={"CG-Turn-Id": "an-old-turn"})
    [listed] = lines(await deadletters("list", "--json"))
    assert (listed["reason"], listed["subject"], listed["attempt"]) == ("stale_turn", call.subject, 1)
    assert json.loads((await deadletters("show", listed["id"])).stdout)["headers"]["CG-Turn-Id"] == "an-old-turn"
    assert "stale_turn" in (await deadletters("list")).stdout

    dry = await deadletters("replay", listed["id"])
    assert dry.stdout == f"would send {listed['id']} to {call.subject}\n"
    assert len(lines(await deadletters("list", "--json"))) == 1

    await world.caller.database.execute("update state.agent_inbox set agent_turn_id = 'an-old-turn'")
    assert lines(await deadletters("replay", listed["id"], "--yes", "--json"))[0]["sent"] is True
    async with world.executor():
        outcome = await world.outcome(call)
    assert outcome.content["status"] == "success"
    assert lines(await deadletters("list", "--json")) == []


@pytest.mark.usefixtures("environment")
@requirement("deadletters.cli")
async def test_an_unknown_dead_letter_is_named(idle_world: World) -> None:
    del idle_world
    for command in (("show", "7"), ("replay", "7", "--yes")):
        refused = await deadletters(*command)
        assert refused.exit_code == 2
        assert "'7'" in refused.stderr


@requirement("deadletters.cli")
async def test_a_server_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/unused")
    monkeypatch.setenv("NATS_SERVERS", "nats://127.0.0.1:1")
    monkeypatch.setattr("openapi_tool.cli.deadletters._CONNECT_S", 0.2)
    refused = await deadletters("list")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "NATS" in refused.stderr


@pytest.mark.usefixtures("environment")
@requirement("handover")
async def test_another_executors_durable_is_taken_over_and_what_it_gave_up_on_is_found(idle_world: World) -> None:
    """The kernel's own executor refuses redelivered commands and stops after a few (protocol section 10)."""
    world, jetstream = idle_world, idle_world.caller.client.jetstream()
    filter_subject = "cg.v1r4.*.*.cmd.tool.jina.>"
    await jetstream.add_consumer(
        STREAM,
        ConsumerConfig(
            durable_name=DURABLE,
            filter_subject=filter_subject,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=0.2,
            max_deliver=1,
        ),
    )
    subscription = await jetstream.pull_subscribe_bind(DURABLE, STREAM)
    answered, given_up, waiting = [await world.place() for _ in range(3)]
    for call in (answered, given_up):
        await world.caller.publish(call)
    first, _ = await subscription.fetch(2, timeout=2)
    await first.ack_sync()
    await asyncio.sleep(0.5)  # longer than that durable's AckWait
    with pytest.raises(TimeoutError):
        await subscription.fetch(1, timeout=0.3)

    stale = await world.place()
    async with world.executor():
        await world.send(stale, headers={"CG-Turn-Id": "an-old-turn"})
        outcome = await world.send(waiting)
        assert outcome.content["status"] == "success"
        settings = (await jetstream.consumer_info(STREAM, DURABLE)).config
        assert (settings.max_deliver, settings.ack_wait) == (-1, 6)
        assert (await world.caller.read_answer(given_up)).card == {}
        listed = lines(await deadletters("list", "--abandoned", "--json"))
        assert given_up.tool_call_id in [letter["headers"]["CG-Tool-Call-Id"] for letter in listed]
        named = [letter["reason"] for letter in listed if letter["headers"]["CG-Tool-Call-Id"] == stale.tool_call_id]
        assert named == ["stale_turn"]
        chosen = next(letter for letter in listed if letter["headers"]["CG-Tool-Call-Id"] == given_up.tool_call_id)
        lines(await deadletters("replay", chosen["id"], "--yes", "--json"))
        assert (await world.caller.answer(given_up, 5)).card["content"]["status"] == "success"
    assert given_up.tool_call_id not in (await deadletters("list", "--abandoned", "--json")).stdout
