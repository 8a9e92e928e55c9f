"""`tools disable`, `enable` and `disabled`, and their effect on a running executor, with a real NATS."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from openapi_tool.bus.kv_stores import BUCKET, SWITCHES_KEY, change_switches, load_switches
from openapi_tool.cli import app
from openapi_tool.tools.policy import Switch, Switches
from tests.conftest import PROJECT
from tests.requirements import requirement
from tests.wire.world import World

WHY = ("--reason", "it costs too much", "--by", "an operator")


async def run(world: World, *arguments: str) -> Any:
    environment = {"NATS_SERVERS": world.stack.nats.url}
    return await asyncio.to_thread(CliRunner().invoke, app, ["tools", *arguments], env=environment)


async def run_ok(world: World, *arguments: str) -> str:
    result = await run(world, *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


async def error_of_call(world: World) -> Any:
    """Read the switches, make a call, and return its error code and message; None if it succeeds."""
    assert world.components is not None
    await world.components.switches.check()
    outcome = await world.send(await world.place())
    error = outcome.content["error"]
    return error and (error["code"], error["message"])


def requests(world: World) -> int:
    return len(world.stack.upstream.requests())


def logged(caplog: pytest.LogCaptureFixture, action: str) -> list[Any]:
    return [line for line in caplog.records if getattr(line, "action", "") == action]


@requirement("switches")
async def test_a_disabled_tool_is_refused_at_no_cost_until_it_is_enabled(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    before = requests(world)
    await run_ok(world, "disable", "jina_search", "--project", PROJECT, *WHY)
    assert await error_of_call(world) == (
        "tool_not_available",
        "An operator disabled this tool: it costs too much. Do not call it again; continue without it.",
    )
    assert requests(world) == before
    await run_ok(world, "enable", "jina_search", "--project", PROJECT, "--reason", "cheap again", "--by", "another")
    assert await error_of_call(world) is None
    [off], [on] = logged(caplog, "tool.disabled"), logged(caplog, "tool.enabled")
    assert (off.project_id, off.tool_name, off.reason, off.by) == (
        PROJECT,
        "jina_search",
        "it costs too much.",
        "an operator",
    )
    assert (on.reason, on.by) == ("cheap again.", "another")


@requirement("switches")
@pytest.mark.parametrize("scope", [("--project", PROJECT), ("--all-projects",), ("jina_search", "--all-projects")])
async def test_a_project_or_all_tools_can_be_disabled(world: World, scope: tuple[str, ...]) -> None:
    await run_ok(world, "disable", *scope, *WHY)
    code, _ = await error_of_call(world)
    assert code == "tool_not_available"


@requirement("switches")
async def test_other_tools_and_projects_stay_enabled(world: World) -> None:
    await run_ok(world, "disable", "jina_search", "--project", "another", *WHY)
    await run_ok(world, "disable", "jina_read", "--project", PROJECT, *WHY)
    assert await error_of_call(world) is None


@requirement("switches")
async def test_a_call_that_waits_sends_no_further_request_once_its_tool_is_disabled(world: World) -> None:
    """A request may wait long for a permit or before a retry."""
    world.stack.upstream.rules({"statuses": [429], "retry_after": "2"})
    before = requests(world)
    running = asyncio.create_task(_send(world))
    while await asyncio.to_thread(requests, world) == before:  # noqa: ASYNC110 - the double is another process
        await asyncio.sleep(0.02)
    await run_ok(world, "disable", "jina_search", "--project", PROJECT, *WHY)
    assert world.components is not None
    await world.components.switches.check()
    outcome = await running
    assert outcome.content["error"]["code"] == "tool_not_available"
    assert requests(world) == before + 1


async def _send(world: World) -> Any:
    return await world.send(await world.place())


@requirement("switches")
async def test_an_executor_that_starts_knows_what_is_disabled(idle_world: World) -> None:
    await run_ok(idle_world, "disable", "--all-projects", *WHY)
    call = await idle_world.place()
    await idle_world.caller.publish(call)
    async with idle_world.executor():
        outcome = await idle_world.outcome(call)
    assert outcome.content["error"]["code"] == "tool_not_available"


@requirement("switches")
@pytest.mark.parametrize("stored", ["deleted bucket", "another record"])
async def test_the_last_known_switches_apply_while_the_record_cannot_be_read(
    world: World, caplog: pytest.LogCaptureFixture, stored: str
) -> None:
    await run_ok(world, "disable", "jina_search", "--project", PROJECT, *WHY)
    assert await error_of_call(world) is not None
    jetstream = world.caller.client.jetstream()
    if stored == "deleted bucket":
        await jetstream.delete_key_value(BUCKET)
    else:
        await (await jetstream.key_value(BUCKET)).put(SWITCHES_KEY, b"[]")
    assert await error_of_call(world) is not None
    assert await error_of_call(world) is not None
    assert len(logged(caplog, "switches.not_read")) == 1


@requirement("switches")
async def test_deleting_the_record_enables_all_tools(world: World) -> None:
    await run_ok(world, "disable", "--all-projects", *WHY)
    assert await error_of_call(world) is not None
    await (await world.caller.client.jetstream().key_value(BUCKET)).delete(SWITCHES_KEY)
    assert await error_of_call(world) is None
    await run_ok(world, "disable", "--all-projects", *WHY)
    assert await error_of_call(world) is not None


@requirement("switches")
async def test_the_monitor_reads_the_record_periodically(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openapi_tool.bus.kv_stores.READ_INTERVAL_S", 0.01)
    assert world.components is not None
    changed = asyncio.Event()
    monkeypatch.setattr(world.components.switches, "_use", lambda _: changed.set())
    monitoring = asyncio.create_task(world.components.switches.run())
    await run_ok(world, "disable", "--all-projects", *WHY)
    async with asyncio.timeout(10):
        await changed.wait()
    monitoring.cancel()


@requirement("switches")
async def test_concurrent_changes_are_all_stored(world: World) -> None:
    def disable(number: int) -> Any:
        switch = Switch(str(number), "t", "x", "y", "z")
        return change_switches(world.caller.client, lambda found: found.disabled(switch))

    await asyncio.gather(*map(disable, range(4)))
    stored = await load_switches(world.caller.client)
    assert [each.project_id for each in stored.switches.all] == ["0", "1", "2", "3"]


@requirement("switches")
async def test_what_is_disabled_is_listed(world: World) -> None:
    assert "nothing is disabled" in (await run(world, "disabled")).stderr
    await run_ok(world, "disable", "jina_search", "--project", PROJECT, "--reason", "[bold]\N{SNOWMAN}?", "--by", "me")
    [row] = json.loads(await run_ok(world, "disabled", "--json"))
    assert {**row, "at": ""} == {
        "project_id": PROJECT,
        "tool_name": "jina_search",
        "reason": "[bold]\N{SNOWMAN}?",
        "by": "me",
        "at": "",
    }
    assert "[bold]" in await run_ok(world, "disabled")
    printed = json.loads(await run_ok(world, "enable", "jina_search", "--project", PROJECT, "--reason", "x", "--json"))
    assert printed["reason"] == "x."
    assert printed["by"]


@requirement("switches")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("disable", "t", "--reason", "x"), 2, "name either --project P or --all-projects"),
        (("disable", "t", "--project", "p", "--all-projects", "--reason", "x"), 2, "name either --project P or"),
        (("disable", "t", "--project", "p"), 2, "--reason"),
        (
            ("disable", "t", "--project", "*", "--reason", "x"),
            2,
            "--project: '*' is no project; all projects are --all-pro",
        ),
        (("disable", "t", "--project", "p", "--reason", " "), 2, "--reason must have 1 to 300 printable characters"),
        (("disable", "t", "--project", "p", "--reason", "x" * 301), 2, "--reason must have 1 to 300 printable"),
        (("disable", "t", "--project", "p", "--reason", "a\x1b[2J"), 2, "--reason must have 1 to 300 printable"),
        (("disable", "t", "--project", "p", "--reason", "x", "--by", ""), 2, "--by must have 1 to 300 printable"),
        (("enable", "t", "--project", "p", "--reason", "x"), 1, "tool 't' of project 'p' is not disabled"),
    ],
)
async def test_an_invalid_change_is_refused_with_its_reason(
    world: World, arguments: tuple[str, ...], code: int, says: str
) -> None:
    result = await run(world, *arguments)
    assert (result.exit_code, says in result.stderr) == (code, True), result.output


@requirement("switches")
async def test_a_full_record_accepts_no_further_switch(world: World) -> None:
    many = Switches(Switch(str(number), "t", "x", "y", "z") for number in range(1_000))
    await change_switches(world.caller.client, lambda _: many)
    full = await run(world, "disable", "t", "--project", "p", *WHY)
    assert (full.exit_code, "1,000 tools are disabled already" in full.stderr) == (2, True)
    assert "disabled" in (await run(world, "disable", "t", "--project", "7", *WHY)).stderr


@requirement("switches")
async def test_an_invalid_record_is_reported_with_the_remedy(world: World) -> None:
    await (await world.caller.client.jetstream().key_value(BUCKET)).put(SWITCHES_KEY, b"[]")
    result = await run(world, "disabled")
    assert (result.exit_code, "nats kv del openapi_tool switches" in result.stderr) == (2, True)
