"""Take over the durable from the kernel's own executor, and hand it back."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from typer.testing import CliRunner, Result

from openapi_tool.bus.stats import INSTANCE
from openapi_tool.cli import app
from openapi_tool.local.caller import STREAM
from tests.requirements import requirement
from tests.wire.world import DURABLE, World

KERNEL_FILTER = "cg.v1r4.*.*.cmd.tool.jina.*"


async def durable(world: World, *arguments: str) -> Result:
    """Run `openapi-tool nats durable` in a thread."""
    environment = {"NATS_SERVERS": world.stack.nats.url}
    return await asyncio.to_thread(CliRunner().invoke, app, ["nats", "durable", *arguments], env=environment)


async def settings_of(world: World) -> tuple[float, int]:
    config = (await world.caller.client.jetstream().consumer_info(STREAM, DURABLE)).config
    return config.ack_wait or 0, config.max_deliver or 0


async def until_busy(world: World) -> None:
    """Wait until the only slot of the executor is taken."""
    async with asyncio.timeout(10):
        while True:
            info = await world.caller.client.jetstream().consumer_info(STREAM, DURABLE)
            if info.num_ack_pending and not info.num_waiting:
                return
            await asyncio.sleep(0.01)


@requirement("handover")
async def test_the_durable_is_taken_over_and_handed_back_with_the_settings_of_each_executor(world: World) -> None:
    kernels = ConsumerConfig(
        durable_name=DURABLE, filter_subject=KERNEL_FILTER, ack_policy=AckPolicy.EXPLICIT, ack_wait=30, max_deliver=3
    )
    await world.caller.client.jetstream().add_consumer(STREAM, kernels)
    async with world.executor():
        assert (await world.send(await world.place())).content["status"] == "success"
        assert await settings_of(world) == (6, -1)
        refused = await durable(world, "--restore")
        assert refused.exit_code == 1
        assert "still has open pull requests (1): stop every replica of the executor first" in refused.stderr
        assert await settings_of(world) == (6, -1)
    async with world.executor(executor={"concurrency": 1}):
        world.stack.upstream.rules({"answer": "s-post-json", "delay_s": 30})
        busy = await world.place()
        await world.caller.publish(busy)
        await until_busy(world)
        refused = await durable(world, "--restore")
        assert refused.exit_code == 1
        assert f"the durable {DURABLE!r} still has 1 running replica ({INSTANCE}): stop every replica" in refused.stderr
        assert await settings_of(world) == (6, -1)
        world.stack.upstream.rules()
    unsettled = await world.place()
    await world.caller.publish(unsettled)
    restored = await durable(world, "--restore", "--json")
    assert restored.exit_code == 0, restored.output
    printed = json.loads(restored.stdout)
    assert [printed[when]["max_deliver"] for when in ("before", "after")] == [-1, 3]
    assert await settings_of(world) == (30, 3)
    subscription = await world.caller.client.jetstream().pull_subscribe_bind(DURABLE, STREAM)
    messages = await subscription.fetch(2, timeout=5)
    given = {(message.headers or {})["CG-Tool-Call-Id"] for message in messages}
    assert given == {busy.tool_call_id, unsettled.tool_call_id}, "the first was handed back, the second never delivered"
    for message in messages:
        await message.ack_sync()


@requirement("handover")
async def test_the_command_without_restore_changes_nothing(world: World) -> None:
    missing = await durable(world)
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
    assert "no executor has used it yet, or nats.durable names another" in missing.stderr
    async with world.executor():
        await world.settled()
    shown = await durable(world)
    assert (shown.exit_code, shown.stdout.splitlines()[3:5]) == (0, ["ack_wait_s: 6.0", "max_deliver: -1"])
    assert await settings_of(world) == (6, -1)


@contextmanager
def silent() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"nats://127.0.0.1:{server.getsockname()[1]}"


@requirement("cli.ends")
@pytest.mark.parametrize("command", [["nats", "durable"], ["deadletters", "list"]], ids=" ".join)
def test_a_silent_server_is_reported_in_one_line(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openapi_tool.cli.kernels.CONNECT_S", 0.2)
    with silent() as url:
        found = CliRunner().invoke(app, command, env={"NATS_SERVERS": url, "PG_DSN": "postgresql://nobody/x"})
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1)
    assert "no answer within 0.2 s: is it a NATS server? check nats.servers (NATS_SERVERS)" in found.stderr
