"""`inspect` and `top`: their output for calls that succeeded, wait, failed, or got no result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import asyncpg
import pytest
from nats.aio.msg import Msg
from typer.testing import CliRunner

from openapi_tool.bus.leases import BUCKET as LEASES
from openapi_tool.bus.leases import lease_key
from openapi_tool.bus.stats import INSTANCE
from openapi_tool.cli import app
from openapi_tool.local.caller import PlacedCall
from openapi_tool.telemetry import calls
from tests.conftest import PROJECT
from tests.requirements import requirement
from tests.support import each
from tests.wire.world import World


async def run(world: World, *arguments: str, code: int = 0, dsn: str = "") -> str:
    environment = {"PG_DSN": dsn or world.dsn, "NATS_SERVERS": world.stack.nats.url, "JINA_API_KEY": "unused-key-0123"}
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=environment)
    assert result.exit_code == code, result.output
    return result.output


async def inspected(world: World, call: PlacedCall, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        await run(world, "inspect", call.tool_call_id, "--project", PROJECT, "--json", **options)
    )
    return found


async def top_output(world: World) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await run(world, "top", "--json"))
    return found


def steps(found: Mapping[str, Any]) -> list[str]:
    return [event["what"] for event in found["events"]]


@requirement("cli.inspect")
async def test_the_timeline_of_an_answered_call_has_each_step_and_request(world: World) -> None:
    world.stack.upstream.rules({"statuses": [503], "retry_after": "0"})
    call = await world.place()
    await world.send(call)
    found = await inspected(world, call)
    assert set(steps(found)) == {
        "anchor row", "request edge", "response edge", "call card", "command", "request", "result card", "inbox row",
        "doorbell",
    }  # fmt: skip
    requests = [event["about"] for event in found["events"] if event["what"] == "request"]
    assert [text.split(",")[0] for text in requests] == ["HTTP 503", "HTTP 200"]
    assert found["verdict"] == "answered with success; the worker has not claimed it: its row is pending"
    drawn = await run(world, "inspect", call.tool_call_id, "--project", PROJECT)
    assert "HTTP 503" in drawn
    assert drawn.splitlines()[-1] == f"=> {found['verdict']}"
    async with asyncpg.create_pool(world.stack.postgres.dsn(world.database), min_size=1, max_size=1) as pool:
        await pool.execute("update state.agent_inbox set status = 'processed', processed_at = now()")
    again = await inspected(world, call)
    assert "claim" in steps(again)
    assert again["verdict"] == "answered with success; the worker claimed it"


@requirement("cli.inspect")
async def test_only_the_doorbell_of_the_call_is_shown_and_a_missing_one_is_named(world: World) -> None:
    other, call = await world.place(), await world.place()
    for one in (other, call):
        await world.send(one)
    (mine,) = (found := await inspected(world, call))["doorbells"]
    assert found["events"][-1]["what"] == "doorbell", "after the commit"
    assert [one["sequence"] for one in (await inspected(world, other))["doorbells"]] == [mine["sequence"] - 2]
    await world.caller.client.jetstream().delete_msg("cg_cmd_v1r4", mine["sequence"])
    found = await inspected(world, call)
    assert found["doorbells"] == []
    assert found["verdict"].endswith("its row is pending, and the stream has no doorbell of it")


@requirement("cli.inspect", "lease.owner")
async def test_runs_handed_back_and_the_delivery_that_settled_the_call_are_shown(idle_world: World) -> None:
    world = idle_world
    world.stack.upstream.rules({"hang": True})
    call = await world.place()
    await world.caller.publish(call)
    async with world.executor():
        await _until(lambda: bool(world.stack.upstream.requests()))
    (command,) = (await inspected(world, call))["commands"]
    assert [(run["event"], run["delivery"]) for run in command["lease"]["runs"]] == [("handed_back", 1)]
    world.stack.upstream.rules()
    async with world.executor():
        await world.outcome(call)
    found = await inspected(world, call)
    runs = [event for event in found["events"] if event["what"].startswith("run ")]
    assert [(run["what"], run["about"]) for run in runs] == [
        ("run handed back", f"delivery 1, executor {INSTANCE}"),
        ("run began", f"delivery 2, executor {INSTANCE}"),
        ("run settled", f"delivery 2, executor {INSTANCE}"),
    ]
    bucket = await world.caller.client.jetstream().key_value(LEASES)
    for odd in (b'{"runs": 7}', b'{"runs": [{"event": "x"}]}', b'{"runs": [{"at": 1e300}]}', b"[]"):
        await bucket.put(lease_key("cg_cmd_v1r4", command["sequence"]), odd)
        assert "run began" not in steps(await inspected(world, call)), odd


@requirement("cli.inspect", "tenant.scoped")
async def test_no_call_of_another_project_is_shown(world: World) -> None:
    call = await world.place()
    await world.send(call)
    output = await run(world, "inspect", call.tool_call_id, "--project", "another", code=2)
    assert "project 'another' has no call" in output


INVALID_ATTEMPTS: tuple[Any, ...] = (
    "a text",
    [1],
    [{"at_ms": "x"}],
    [{"at_ms": 1e300, "http_status": 200}],
    {"a": 1},
    7,
)


@requirement("cli.inspect")
async def test_inspect_tolerates_attempts_written_by_another_author(world: World) -> None:
    call = await world.place()
    await world.send(call)
    path = "'{tool_output,attempts}'"
    async with asyncpg.create_pool(world.stack.postgres.dsn(world.database), min_size=1, max_size=1) as pool:
        for odd in INVALID_ATTEMPTS:
            await pool.execute(
                f"update cards set metadata = jsonb_set(metadata, {path}, $1::text::jsonb) "  # noqa: S608 - a constant
                "where metadata ->> 'type' = 'tool.result'",
                json.dumps(odd),
            )
            found = await inspected(world, call)
            assert "result card" in steps(found), odd
            assert "request" not in steps(found), odd
            assert odd in [card["attempts"] for card in found["rows"]["cards"]], "as JSON, not as a text"


@each(
    ("call_id", "project", "message"),
    [
        ("tc", "", "--project: '' is no project id"),
        ("tc", ">", "--project: '>' is no project id"),
        ("tc", "a b", "--project: 'a b' is no project id"),
        ("tc", "a\udcff", "--project: 'a\\udcff' is no project id"),
        ("\udcff", "p", "TOOL_CALL_ID: '\\udcff' is no tool call id"),
        ("a\0b", "p", "TOOL_CALL_ID: 'a\\x00b' is no tool call id"),
    ],
)
@requirement("cli.inspect")
def test_an_impossible_id_is_refused_before_any_request(call_id: str, project: str, message: str) -> None:
    environment = {"PG_DSN": "postgresql://u@127.0.0.1:1/x", "NATS_SERVERS": "nats://127.0.0.1:1"}
    result = CliRunner().invoke(app, ["inspect", call_id, "--project", project], env=environment)
    assert (result.exit_code, message in result.output) == (2, True), result.output


@requirement("cli.inspect")
async def test_inspect_shows_the_reason_of_a_dead_letter(world: World) -> None:
    call = await world.place()
    async with asyncpg.create_pool(world.stack.postgres.dsn(world.database), min_size=1, max_size=1) as pool:
        await pool.execute("delete from state.agent_inbox")
        await world.caller.publish(call)
        await world.settled()
    found = await inspected(world, call)
    assert found["verdict"].startswith("no result: dead-lettered as ")
    assert "dead letter" in steps(found)


@requirement("cli.inspect")
async def test_inspect_of_an_unanswered_call_shows_what_it_waits_for(idle_world: World) -> None:
    world = idle_world
    unsent = await world.place()
    assert "the kernel never sent it" in (await inspected(world, unsent))["verdict"]
    call = await world.place()
    await world.caller.publish(call)
    assert "there is no durable" in (await inspected(world, call))["verdict"]
    world.stack.upstream.rules({"hang": True})
    async with world.executor():
        await _until(lambda: bool(world.stack.upstream.requests()))
        found = await inspected(world, call)
        assert found["verdict"] == f"no result: executor {INSTANCE} runs it"
    async with world.executor(executor={"concurrency": 1}):
        waiting = await world.place()
        await world.caller.publish(waiting)
        await _until(lambda: len(world.stack.upstream.requests()) == 2)
        assert "runs it" in (await inspected(world, call))["verdict"]
        found = await inspected(world, waiting)
        assert found["verdict"] == f"no result: executor {INSTANCE} holds it until a slot is free"
    found = await inspected(world, waiting)
    assert found["verdict"].endswith("no replica answers: its redelivery is due")


@requirement("cli.inspect", "privilege.grants")
async def test_the_printed_grants_are_enough_to_inspect(world: World) -> None:
    call = await world.place()
    await world.send(call)
    admin = world.stack.postgres.dsn(world.database)
    printed = await run(world, "sql", "grants", "--role", "reader", "--for", "inspect", "--json")
    connection = await asyncpg.connect(admin)
    try:
        await connection.execute("drop role if exists reader; create role reader login password 'reader-password'")
        await connection.execute(";".join(json.loads(printed)["statements"]))
        dsn = f"postgresql://reader:reader-password@127.0.0.1:{world.stack.postgres.port}/{world.database}"
        assert (await inspected(world, call, dsn=dsn))["verdict"].startswith("answered")
    finally:
        await connection.execute("drop owned by reader; drop role reader")
        await connection.close()


@requirement("cli.top")
async def test_top_shows_calls_errors_and_problems(world: World) -> None:
    calls.RECENT.clear()
    world.stack.upstream.rules({"match": "hello", "statuses": [401]})
    await world.send(await world.place())
    (replica,) = (found := await top_output(world))["replicas"]
    assert (replica["calls"], replica["failed"], replica["running"], replica["slots"]) == (1, 1, 0, 64)
    assert replica["errors"] == [
        {"protocol": "v1r4", "project": PROJECT, "tool": "jina.search", "error_code": "auth_failed", "calls": 1}
    ]
    assert replica["limits"]["executor.concurrency"] == 64
    assert "consumer is unavailable" in " ".join(found["problems"]), "no monitor runs in this test"
    text = await run(world, "top", "--once")
    assert "auth_failed" in text
    assert "1 replica, the last minute" in text
    assert "…" not in text, "narrow columns fold"
    assert "unused-key" not in json.dumps(found) + text


_ROW = {"project": "p", "tool": "t", "calls": 1}
FORGED: tuple[dict[str, Any], ...] = (
    *(
        {"kernels": [{"protocol": "v1r4", "pending": "x"}]},
        {"kernels": {}},
        {"waiting": "many"},
        {"tools": [{"project": "a"}]},
        {"tools": 7},
        {"warnings": [1]},
    ),
    *({"tools": [{**_ROW, "project": [1]}]}, {"errors": [{**_ROW, "calls": "9"}]}, {"health": "no"}),
    *({"health": {"dependencies": {"x": 1}}}, {"phases_p95_ms": {"load": "slow"}}, {"durables": 3}),
    *({"tools": [_ROW] * 300}, {"warnings": [{"action": "a", "count": 1, "message": "x" * 5_000}]}),
    *({"upstream_limits": [{"used": "x"}]}, {"upstream_limits": 5}, {"upstream_keys": [7]}, {"budgets": [[]]}),
)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@requirement("cli.top")
async def test_forged_statistics_and_those_of_another_version_are_reported_and_hide_no_others(world: World) -> None:
    client = world.caller.client

    async def answer(message: Msg) -> None:
        for number, part in enumerate(FORGED):
            await client.publish(message.reply, json.dumps({"instance": f"odd-{number}", **part}).encode())

        await client.publish(message.reply, json.dumps({"instance": "deep", "x": _nested(900)}).encode())
        await client.publish(message.reply, json.dumps({"instance": "twice", "calls": 1}).encode())
        await client.publish(message.reply, json.dumps({"instance": "twice", "calls": 999}).encode())

    await client.subscribe("openapi_tool.stats", cb=answer)
    await client.flush()
    text = " ".join((await run(world, "top", "--once")).split())
    for number, part in enumerate(FORGED):
        assert f"odd-{number}: its answer is not readable (another version, or forged): {next(iter(part))}" in text
    assert "deep: its answer is not readable (another version, or forged): it is nested more than 12 deep" in text
    assert "twice: 2 answers have this name: two replicas share it, or one is forged" in text
    assert f"{len(FORGED) + 3} replicas, the last minute" in text
    for command in (["limits"], ["budgets"], ["top", "--json"], ["limits", "--json"]):
        await run(world, *command)


@requirement("cli.top")
async def test_top_reports_that_no_replica_answers(idle_world: World) -> None:
    assert "no replica answers" in await run(idle_world, "top", "--once", code=1)


@pytest.mark.usefixtures("world")
@requirement("cli.top")
async def test_a_replica_answers_only_below_its_own_subject(world: World) -> None:
    elsewhere = await world.caller.client.subscribe("somewhere.else")
    below = await world.caller.client.subscribe("openapi_tool.stats.mine")
    await world.caller.client.publish("openapi_tool.stats", b"", "somewhere.else")
    await world.caller.client.publish("openapi_tool.stats", b"", "openapi_tool.stats.mine")
    assert json.loads((await below.next_msg(timeout=5)).data)["slots"] == 64
    assert elsewhere.pending_msgs == 0


async def _until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - another process is asked
            await asyncio.sleep(0.01)
