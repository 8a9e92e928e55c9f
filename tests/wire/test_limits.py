"""Limits, budgets and disabled tools on real servers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from unittest import mock

import pytest
from nats.js.errors import NotFoundError
from prometheus_client import REGISTRY
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.cli.output import INTERRUPTED
from openapi_tool.local.caller import ResultRows
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS, RecordStore
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.nats_records.shared_bucket import BUCKET
from openapi_tool.nats_records.switches import SWITCHES_KEY, change_switches, load_switches
from openapi_tool.quotas import account_record, limit_record
from openapi_tool.quotas.limit_record import LimitRecord
from openapi_tool.tools.switches import Switch, Switches
from tests.conftest import PROJECT, search_tool
from tests.requirements import requirement
from tests.waiting import WAIT_S
from tests.wire.conftest import World
from tests.wire.test_inspect import run

LIMIT = 6
_DEADLINE_S = 40.0  # above the time that a call may wait for a permit
RECORD = "limit.JINA_API_KEY.search"


@asynccontextmanager
async def executors(world: World, number: int, **limits: Any) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for _ in range(number):
            await stack.enter_async_context(world.executor(limits=limits))
        try:
            yield
        finally:
            await delete_limits(world)


async def delete_limits(world: World) -> None:
    """Delete the stored limits, which outlive an executor, for the next test."""
    with suppress(NotFoundError):
        await world.caller.client.jetstream().delete_key_value(LIMITS.bucket.name)


async def sent(world: World, calls: int) -> list[ResultRows]:
    placed = [await world.place() for _ in range(calls)]
    for call in placed:
        await world.caller.publish(call)
    await world.settled(_DEADLINE_S)
    return [await world.caller.read_result(call) for call in placed]


def errors(answers: list[ResultRows]) -> list[dict[str, Any]]:
    return [answer.card["content"]["error"] for answer in answers if answer.card["content"]["error"]]


async def upstream(world: World) -> list[dict[str, Any]]:
    return await asyncio.to_thread(world.stack.upstream.requests)


@pytest.mark.parametrize("replicas", [1, 3])
@requirement("limits.window", "limits.waiting", "metrics", "logs.call", "cli.top")
async def test_calls_over_the_rate_limit_are_answered_early_and_not_sent(
    world_without_executor: World, replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "openapi_tool")
    world, phase = world_without_executor, ("openapi_tool_phase_seconds_count", {"phase": "permit"})
    waits = REGISTRY.get_sample_value(*phase) or 0
    world.stack.upstream.rules({"rate_per_minute": LIMIT})
    async with executors(world, replicas, search_requests_per_minute=LIMIT):
        began = time.monotonic()
        answers = await sent(world, 3 * LIMIT)
        took_s = time.monotonic() - began
        [stats] = await gather_stats(world.caller.client, 0.2)  # all have the name of this process
    requests = await upstream(world)
    assert [request["status"] for request in requests] == [200] * len(requests)
    assert LIMIT - 3 <= len(requests) <= LIMIT  # the limit is paced: not all of it may be used at once
    refused = errors(answers)
    assert len(refused) == 3 * LIMIT - len(requests)
    assert {error["code"] for error in refused} == {"rate_limited"}
    assert all(error["retryable"] and error["detail"]["retry_after_s"] >= 1 for error in refused)
    assert took_s < 20, "no call waits for more than half of its 27 s"
    lines = [record for record in caplog.records if getattr(record, "action", "") == "call.finished"]
    waits_ms = [record.permit_ms for record in lines if record.permit_ms is not None]  # type: ignore[attr-defined]
    assert len(refused) <= len(waits_ms) <= len(lines) == 3 * LIMIT
    assert (REGISTRY.get_sample_value(*phase) or 0) == waits + len(waits_ms)
    assert max(waits_ms) < took_s * 1000
    assert stats["phases_p95_ms"]["permit"] > 0


@requirement("limits.shared")
async def test_a_429_pauses_every_replica_until_retry_after(world_without_executor: World) -> None:
    world = world_without_executor
    world.stack.upstream.rules({"statuses": [429], "retry_after": "2"})
    async with executors(world, 2):
        answers = await sent(world, 1)
        first = await upstream(world)
        answers += await sent(world, 6)  # fewer than the minimum learned limit, 10
        requests = await upstream(world)
    assert errors(answers) == []
    assert [request["status"] for request in requests].count(429) == 1
    refused_at = first[0]["answered_at"]
    assert all(request["at"] >= refused_at + 1.9 for request in requests[1:])


@requirement("limits.learned")
async def test_the_second_429_within_a_minute_teaches_a_limit_if_none_is_configured(
    world_without_executor: World,
) -> None:
    world = world_without_executor
    async with executors(world, 2):
        assert errors(await sent(world, 30)) == []
        world.stack.upstream.rules({"statuses": [429], "retry_after": "0"})
        assert errors(await sent(world, 1)) == []
        assert (await stored(world)).learned is None
        world.stack.upstream.rules({"statuses": [429], "retry_after": "0"})
        await sent(world, 1)
        found = (await stored(world)).learned
    assert found is not None
    assert 30 <= found.limit <= 32  # the accepted requests of the last minute


@requirement("keys.blocked", "keys.pools")
async def test_every_request_is_counted_and_settled(world_without_executor: World) -> None:
    world = world_without_executor
    async with world.executor(limits={"search_requests_per_minute": 600}):
        await sent(world, 30)
    record = await stored(world)
    await delete_limits(world)
    now = time.time()
    assert record.requests.total(now) == 30
    assert record.open == {}


@requirement("run.stop", "limits.waiting")
async def test_a_drain_hands_back_calls_that_wait_for_permits(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_without_executor
    monkeypatch.setattr(world, "grace_s", 20.0)
    world.stack.upstream.rules({"delay_s": 1.0, "answer": "s-post-json"})
    calls = [await world.place() for _ in range(4)]
    async with world.executor(limits={"search_concurrent": 1}):
        for call in calls:
            await world.caller.publish(call)
        await asyncio.to_thread(world.stack.upstream.requests, 1)
    assert len(await upstream(world)) == 1, "those that wait for a permit would have sent theirs before the end"
    async with executors(world, 1):
        await world.settled(_DEADLINE_S)
    assert errors([await world.caller.read_result(call) for call in calls]) == []


async def stored(world: World) -> LimitRecord:
    records = RecordStore(LIMITS)
    async with records.connected(mock.Mock(aclose=mock.AsyncMock()), world.caller.client, 1):
        found = limit_record.parse((await records.read(RECORD)).value)
    assert found is not None
    return found


@requirement("limits.window")
async def test_without_a_limit_nothing_is_stored(world: World) -> None:
    assert errors(await sent(world, 5)) == []
    with pytest.raises(NotFoundError):
        await world.caller.client.jetstream().stream_info(f"KV_{LIMITS.bucket.name}")


@requirement("keys.blocked", "keys.pools")
async def test_every_replica_skips_a_refused_key_and_uses_the_other_key_of_its_pool(
    world_without_executor: World, caplog: pytest.LogCaptureFixture
) -> None:
    world, name = world_without_executor, "openapi_tool_keys_refused_total"
    labels = [{"variable": variable, "endpoint": "search"} for variable in ("SEARCH_API_KEY", "JINA_API_KEY")]
    before = [REGISTRY.get_sample_value(name, label) or 0 for label in labels]
    world.stack.upstream.rules({"key": "SEARCH_API_KEY", "statuses": [401] * 9})
    pools = {"JINA_API_KEY": {"keys": ["JINA_API_KEY", "SEARCH_API_KEY"]}}
    async with executors(world, 2, pools=pools):
        answers: list[Any] = []
        async with asyncio.timeout(WAIT_S):
            while _replicas_that_know(caplog) < 2:
                answers += await sent(world, 3)
        refused = await _requests_with_refused_key(world)
        answers += [answer for _ in range(3) for answer in await sent(world, 3)]
        assert await _requests_with_refused_key(world) == refused >= 2
        [stats] = await gather_stats(world.caller.client, 0.2)  # both have the name of this process
    assert errors(answers) == []  # the requests of the first calls are repeated with the other key
    assert [key["variable"] for key in stats["upstream_keys"]] == ["SEARCH_API_KEY"]
    assert _replicas_that_know(caplog) == 2
    assert not any(value in caplog.text for value in world.stack.upstream.keys.values())
    world.stack.upstream.rules({"statuses": [401] * 9})
    await asyncio.to_thread(world.stack.upstream.clear_requests)
    async with executors(world, 2):
        answers = [answer for _ in range(4) for answer in await sent(world, 1)]
        assert len(await upstream(world)) == 2
    assert [error["code"] for error in errors(answers)] == ["auth_failed"] * 4
    assert {error["http_status"] for error in errors(answers)} == {401}
    counts = [REGISTRY.get_sample_value(name, label) or 0 for label in labels]
    assert counts == [before[0] + refused, before[1] + 2], "only requests count, not calls whose key is blocked"
    assert sum(getattr(record, "action", "") == "key.refused" for record in caplog.records) >= 2


def _replicas_that_know(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many replicas have logged that the key is invalid."""
    return sum("the key of SEARCH_API_KEY is invalid" in line for line in caplog.messages)


async def _requests_with_refused_key(world: World) -> int:
    return sum(request["key"] == "SEARCH_API_KEY" for request in await upstream(world))


async def watched(world: World, *words: str, until: bytes) -> str:
    """Return the output of a command on a terminal until it contains `until`; then end it by SIGTERM."""
    terminal, other_end = pty.openpty()
    environment = {**os.environ, "PG_DSN": world.dsn, "NATS_SERVERS": world.stack.nats.url}
    environment |= {"TERM": "xterm", "COLUMNS": "120", "LINES": "60"}
    command = (sys.executable, "-m", "openapi_tool", *words)
    watching = await asyncio.create_subprocess_exec(*command, env=environment, stdout=other_end)
    os.close(other_end)
    async with asyncio.timeout(WAIT_S):
        drawn = await asyncio.to_thread(os.read, terminal, 65_536)
        while until not in drawn:
            drawn += await asyncio.to_thread(os.read, terminal, 65_536)
        watching.terminate()
        assert await watching.wait() == INTERRUPTED
    os.close(terminal)
    return drawn.decode("utf-8", "replace")


@requirement("cli.limits")
async def test_the_command_shows_limits_waiting_calls_and_refused_keys(world_without_executor: World) -> None:
    world = world_without_executor
    world.stack.upstream.rules({"match": "hello", "statuses": [200, 401, 401]})
    assert "no replica answers" in await run(world, "limits", code=1)
    async with executors(world, 1, search_requests_per_minute=LIMIT, keys={"SEARCH_API_KEY": {"reader_concurrent": 2}}):
        assert "no key with a limit was used since the processes started" in await run(world, "limits")
        for _ in range(3):
            await sent(world, 1)
        found = json.loads(await run(world, "limits", "--json"))
        drawn = await watched(world, "limits", "--watch", until=b"40102")
        assert "1 replica, the last minute" in await watched(world, "top", until=b"1 replica")
    [limit], [key] = found["limits"], found["keys"]
    assert [(one["variable"], one["endpoint"]) for one in found["configured"]] == [
        (None, "search"), ("SEARCH_API_KEY", "search"), ("SEARCH_API_KEY", "reader"),
    ]  # fmt: skip
    assert (limit["variable"], limit["endpoint"], limit["requests_per_minute"]) == ("JINA_API_KEY", "search", LIMIT)
    [replica] = limit["replicas"].values()
    assert (limit["used"], limit["running"], limit["waiting"]) == (3, 0, 0)
    assert replica["sent_per_minute"] == 3
    assert (key["variable"], key["endpoint"], key["state"], key["status"]) == (
        "JINA_API_KEY",
        "search",
        "invalid",
        40102,
    )
    assert all(text in drawn for text in ("refused keys", "JINA_API_KEY", "invalid", "40102"))


@requirement("budgets.calls")
async def test_uses_survive_a_restart_and_a_cached_response_costs_nothing(world_without_executor: World) -> None:
    world = world_without_executor
    for number in (1, 2):
        async with world.executor(budgets={"session_requests": 3}, cache={"ttl_s": 300}):
            await world.send(await world.place())
            outcome = await world.send(await world.place())
        output = outcome.rows.card["metadata"]["tool_output"]
        assert (output["cached"], output["budget"]) == (True, {"session": {"requests": 3, "requests_left": 3 - number}})
        bucket = await world.caller.client.jetstream().key_value(BUDGETS.bucket.name)
        [value] = [(await bucket.get(name)).value or b"" for name in await bucket.keys()]
        record = account_record.parse(value)
        assert record is not None
        assert (record.used.requests, record.open) == (number, {})
    await world.caller.client.jetstream().delete_key_value(BUDGETS.bucket.name)


@requirement("budgets.calls")
async def test_without_budgets_nothing_is_stored(world: World) -> None:
    outcome = await world.send(await world.place())
    assert "budget" not in outcome.rows.card["metadata"]["tool_output"]
    with pytest.raises(NotFoundError):
        await world.caller.client.jetstream().stream_info(f"KV_{BUDGETS.bucket.name}")


WHY = ("--reason", "it costs too much", "--by", "an operator")


async def run_command(world: World, *arguments: str) -> Any:
    environment = {"NATS_SERVERS": world.stack.nats.url}
    return await asyncio.to_thread(CliRunner().invoke, app, ["tools", *arguments], env=environment)


async def run_ok(world: World, *arguments: str) -> str:
    result = await run_command(world, *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


async def error_of_call(world: World, arguments: Any = None) -> Any:
    """Read the switches, make a call, and return its error code and message; None if it succeeds."""
    assert world.components is not None
    await world.components.switches.check()
    outcome = await world.send(await world.place(arguments))
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
@pytest.mark.parametrize(
    ("definition", "arguments", "otherwise"),
    [
        (search_tool(jina={"mode": "search", "auth_env": "UNSET"}), None, "tool_misconfigured"),
        (search_tool(jina={"mode": "search", "base_url": "http://s.jina.ai"}), None, "tool_misconfigured"),
        (search_tool(envs={"url": "JINA_API_KEY"}), None, "tool_misconfigured"),
        ({**search_tool(), "parameters": {"type": "object", "required": ["q"]}}, {}, "bad_request"),
        (search_tool(), {"query": [0] * 2_000}, "bad_request"),
    ],
    ids=["no key", "invalid definition", "secret not allowed", "invalid arguments", "too many arguments"],
)
async def test_a_disabled_tool_is_refused_for_that_before_anything_else_of_the_call_is_looked_at(
    world: World, definition: dict[str, Any], arguments: Any, otherwise: str
) -> None:
    await world.caller.add_tool(PROJECT, definition)
    assert (await error_of_call(world, arguments))[0] == otherwise
    await run_ok(world, "disable", "jina_search", "--project", PROJECT, *WHY)
    code, message = await error_of_call(world, arguments)
    assert (code, "An operator disabled this tool: it costs too much." in message) == ("tool_not_available", True)


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
async def test_an_executor_that_starts_knows_what_is_disabled(world_without_executor: World) -> None:
    await run_ok(world_without_executor, "disable", "--all-projects", *WHY)
    call = await world_without_executor.place()
    await world_without_executor.caller.publish(call)
    async with world_without_executor.executor():
        outcome = await world_without_executor.outcome(call)
    assert outcome.content["error"]["code"] == "tool_not_available"


@requirement("switches")
@pytest.mark.parametrize("stored", [b"[]", b"", b'{"type": "io.nats.jetstream.api.v1.stream_names_response"}'])
async def test_an_executor_runs_nothing_until_it_can_read_what_is_disabled(
    world_without_executor: World, stored: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Another NATS user may have overwritten the record of a disabled tool."""
    world = world_without_executor
    await run_ok(world, "disable", "--all-projects", *WHY)
    bucket = await world.caller.client.jetstream().key_value(BUCKET)
    await bucket.put(SWITCHES_KEY, stored)
    call = await world.place()
    await world.caller.publish(call)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2), world.executor():
            await world.outcome(call)
    [unready, *_] = logged(caplog, "health.changed")
    assert (
        f"delete it, and disable again what must not run: nats kv del {BUCKET} {SWITCHES_KEY}" in unready.getMessage()
    )
    await bucket.delete(SWITCHES_KEY)
    await run_ok(world, "disable", "--all-projects", *WHY)
    async with world.executor():
        outcome = await world.outcome(call)
    assert outcome.content["error"]["code"] == "tool_not_available"


@requirement("switches")
async def test_replicas_write_the_record_again_whose_bucket_was_deleted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await run_ok(world, "disable", "jina_search", "--project", PROJECT, *WHY)
    assert await error_of_call(world) is not None
    await world.caller.client.jetstream().delete_key_value(BUCKET)
    assert await error_of_call(world) is not None
    assert len(logged(caplog, "switches.written_again")) == 1
    stored = await load_switches(world.caller.client)
    assert [(switch.project_id, switch.tool_name) for switch in stored.switches.all] == [(PROJECT, "jina_search")]
    assert await error_of_call(world) is not None
    await run_ok(world, "enable", "jina_search", "--project", PROJECT, *WHY)
    assert await error_of_call(world) is None


@requirement("switches")
async def test_the_last_known_switches_apply_while_the_record_cannot_be_read(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await run_ok(world, "disable", "jina_search", "--project", PROJECT, *WHY)
    assert await error_of_call(world) is not None
    await (await world.caller.client.jetstream().key_value(BUCKET)).put(SWITCHES_KEY, b"[]")
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
    monkeypatch.setattr("openapi_tool.nats_records.switches.SWITCHES_READ_INTERVAL_S", 0.01)
    assert world.components is not None
    changed = asyncio.Event()
    monkeypatch.setattr(world.components.switches, "_use", lambda _: changed.set())
    monitoring = asyncio.create_task(world.components.switches.run())
    await run_ok(world, "disable", "--all-projects", *WHY)
    async with asyncio.timeout(WAIT_S):
        await changed.wait()
    monitoring.cancel()


@requirement("switches")
async def test_concurrent_changes_are_all_stored(world: World) -> None:
    def disable(number: int) -> Any:
        switch = Switch(str(number), "t", "x", "y", "z")
        return change_switches(world.caller.client, lambda found: found.with_disabled(switch))

    await asyncio.gather(*map(disable, range(4)))
    stored = await load_switches(world.caller.client)
    assert [each.project_id for each in stored.switches.all] == ["0", "1", "2", "3"]


@requirement("switches")
async def test_what_is_disabled_is_listed(world: World) -> None:
    assert "nothing is disabled" in (await run_command(world, "disabled")).stderr
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
    result = await run_command(world, *arguments)
    assert (result.exit_code, says in result.stderr) == (code, True), result.output


@requirement("switches")
async def test_a_full_record_accepts_no_further_switch(world: World) -> None:
    many = Switches(Switch(str(number), "t", "x", "y", "z") for number in range(1_000))
    await change_switches(world.caller.client, lambda _: many)
    full = await run_command(world, "disable", "t", "--project", "p", *WHY)
    assert (full.exit_code, "1,000 tools are disabled already" in full.stderr) == (2, True)
    assert "disabled" in (await run_command(world, "disable", "t", "--project", "7", *WHY)).stderr


@requirement("switches")
async def test_an_invalid_record_is_reported_with_the_remedy(world: World) -> None:
    await (await world.caller.client.jetstream().key_value(BUCKET)).put(SWITCHES_KEY, b"[]")
    result = await run_command(world, "disabled")
    assert (result.exit_code, "nats kv del openapi_tool switches" in result.stderr) == (2, True)
