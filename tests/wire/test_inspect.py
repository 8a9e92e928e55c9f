"""`inspect` and `top`; logs, metrics and spans of a call."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from nats.aio.msg import Msg
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import REGISTRY
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.kernel.jetstream.command_state import doorbells_of
from openapi_tool.kernel.jetstream.instance import INSTANCE
from openapi_tool.kernel.jetstream.leases import BUCKET as LEASES
from openapi_tool.kernel.jetstream.leases import lease_key
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.nats_client.options import DurableOptions, NatsOptions
from openapi_tool.protocol.tracing import parse_traceparent
from openapi_tool.telemetry import calls
from openapi_tool.telemetry.logs import JsonFormatter
from openapi_tool.telemetry.redact import Redactor
from tests.canary.run import Collector
from tests.conftest import PROJECT, search_tool
from tests.requirements import requirement
from tests.support import each
from tests.waiting import WAIT_S, until
from tests.wire.conftest import DURABLE, RECORDED_ARGUMENTS, World


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
async def test_runs_handed_back_and_the_delivery_that_settled_the_call_are_shown(world_without_executor: World) -> None:
    world = world_without_executor
    world.stack.upstream.rules({"hang": True})
    call = await world.place()
    await world.caller.publish(call)
    async with world.executor():
        await until(lambda: bool(world.stack.upstream.requests()))
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
async def test_inspect_of_an_unanswered_call_shows_what_it_waits_for(world_without_executor: World) -> None:
    world = world_without_executor
    unsent = await world.place()
    assert "the kernel never sent it" in (await inspected(world, unsent))["verdict"]
    call = await world.place()
    await world.caller.publish(call)
    assert "there is no durable" in (await inspected(world, call))["verdict"]
    world.stack.upstream.rules({"hang": True})
    async with world.executor():
        await until(lambda: bool(world.stack.upstream.requests()))
        found = await inspected(world, call)
        assert found["verdict"] == f"no result: executor {INSTANCE} runs it"
    async with world.executor(executor={"concurrency": 1}):
        waiting = await world.place()
        await world.caller.publish(waiting)
        await until(lambda: len(world.stack.upstream.requests()) == 2)
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
    assert replica["errors"] == [{"project": PROJECT, "tool": "jina_search", "error_code": "auth_failed", "calls": 1}]
    assert replica["limits"]["executor.concurrency"] == 64
    assert "consumer is unavailable" in " ".join(found["problems"]), "no monitor runs in this test"
    text = await run(world, "top", "--once")
    assert "auth_failed" in text
    assert "1 replica, the last minute" in text
    assert "…" not in text, "narrow columns fold"
    assert "unused-key" not in json.dumps(found) + text


@requirement("cli.top", "switches")
async def test_top_shows_the_name_by_which_a_tool_can_be_disabled(world: World) -> None:
    calls.RECENT.clear()
    await world.caller.add_tool(PROJECT, {**search_tool(), "tool_name": "product_docs"})
    for tool in ("jina_search", "product_docs"):
        await world.send(await world.place(tool=tool))
    ((replica,), text) = (await top_output(world))["replicas"], await run(world, "top", "--once")
    assert {row["tool"] for row in replica["tools"]} == {"jina_search", "product_docs"}
    assert [call["tool"] for call in replica["last"]] == ["product_docs", "jina_search"]
    assert ("product_docs" in text, "jina.search" in text) == (True, False)


_ROW = {"project": "p", "tool": "t", "calls": 1}
FORGED: tuple[dict[str, Any], ...] = (
    *(
        {"pending": "x"},
        {"work": {"running": "x"}},
        {"waiting": "many"},
        {"tools": [{"project": "a"}]},
        {"tools": 7},
        {"warnings": [1]},
    ),
    *({"tools": [{**_ROW, "project": [1]}]}, {"errors": [{**_ROW, "calls": "9"}]}, {"health": "no"}),
    *({"health": {"dependencies": {"x": 1}}}, {"phases_p95_ms": {"load": "slow"}}, {"durable": 3}),
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
async def test_top_reports_that_no_replica_answers(world_without_executor: World) -> None:
    assert "no replica answers" in await run(world_without_executor, "top", "--once", code=1)


@pytest.mark.usefixtures("world")
@requirement("cli.top")
async def test_a_replica_answers_only_below_its_own_subject(world: World) -> None:
    elsewhere = await world.caller.client.subscribe("somewhere.else")
    below = await world.caller.client.subscribe("openapi_tool.stats.mine")
    await world.caller.client.publish("openapi_tool.stats", b"", "somewhere.else")
    await world.caller.client.publish("openapi_tool.stats", b"", "openapi_tool.stats.mine")
    assert json.loads((await below.next_msg(timeout=WAIT_S)).data)["slots"] == 64
    assert elsewhere.pending_msgs == 0


RETRIED = {"statuses": [503], "retry_after": "0"}


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """Collect all log lines of the test, in the service's JSON format."""
    found: list[dict[str, Any]] = []
    formatter = JsonFormatter(Redactor())

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(formatter.format(record)))

    handler, ours = Collect(), logging.getLogger("openapi_tool")
    ours.addHandler(handler)
    level = ours.level
    ours.setLevel(logging.DEBUG)
    yield found
    ours.removeHandler(handler)
    ours.setLevel(level)


def value(name: str, **labels: str) -> float:
    """Return the value of the series with these labels, its others being empty."""
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    named = (sample for sample in samples if sample.name == f"openapi_tool_{name}")
    return next((sample.value for sample in named if _given(sample.labels) == labels), 0.0)


def _given(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if value}


def exported(collector: Collector) -> list[Any]:
    """Return all spans that the collector received."""
    requests = [ExportTraceServiceRequest.FromString(body) for body in collector.bodies]
    scopes = [scope for request in requests for found in request.resource_spans for scope in found.scope_spans]
    return [span for scope in scopes for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


@requirement("traces", "answer.trace")
async def test_the_trace_of_a_call_continues_the_kernels_and_has_its_phases(world_without_executor: World) -> None:
    world = world_without_executor
    world.stack.upstream.rules(RETRIED)
    with Collector() as collector:
        async with world.executor(telemetry={"otlp_endpoint": f"http://127.0.0.1:{collector.port}/v1/traces"}):
            call = await world.place()
            outcome = await world.send(call)
    parent = parse_traceparent(call.headers["traceparent"])
    wire = parse_traceparent((outcome.doorbells[0].headers or {})["traceparent"])
    spans = exported(collector)
    (top,) = (span for span in spans if span.name == "execute_tool jina_search")
    assert (top.trace_id.hex(), top.parent_span_id.hex()) == (parent.trace_id, parent.span_id)
    assert (top.trace_id.hex(), top.span_id.hex()) == (wire.trace_id, wire.span_id), "the doorbell continues it"
    # Only a wait of a millisecond or more has a span: on a busy machine also one for a permit that is free.
    children = [span for span in spans if span is not top and span.name != "wait for permit"]
    assert [span.name for span in children] == ["queue", "load", "POST", "POST", "commit", "send wakeup"]
    assert {span.parent_span_id for span in children} == {top.span_id}
    assert {span.trace_id for span in children} == {top.trace_id}
    found = attributes(top)
    assert (found["gen_ai.operation.name"], found["gen_ai.tool.name"]) == ("execute_tool", "jina_search")
    assert (found["gen_ai.tool.call.id"], found["openapi_tool.protocol"]) == (call.tool_call_id, "v1r4")
    assert (found["openapi_tool.requests"], found["openapi_tool.cached"], found["openapi_tool.truncated"]) == (2, 0, 0)
    assert found["openapi_tool.tokens"] == outcome.rows.card["metadata"]["tool_output"]["usage"]["tokens"]
    failed, answered = map(attributes, children[2:4])
    assert (failed["http.response.status_code"], failed["error.type"]) == (503, "upstream_unavailable")
    assert (answered["http.response.status_code"], answered["http.request.resend_count"]) == (200, 1)
    assert attributes(children[5])["messaging.destination.name"] == outcome.doorbells[0].subject


@requirement("traces", "metrics")
async def test_the_error_code_is_the_same_in_span_metric_log_and_card(
    world_without_executor: World, lines: list[dict[str, Any]]
) -> None:
    world = world_without_executor
    world.stack.upstream.rules({"statuses": [401]})
    with Collector() as traces, Collector() as numbers:
        telemetry = {
            "otlp_endpoint": f"http://127.0.0.1:{traces.port}/v1/traces",
            "otlp_metrics_endpoint": f"http://127.0.0.1:{numbers.port}/v1/metrics",
        }
        async with world.executor(telemetry=telemetry):
            outcome = await world.send(await world.place())
    top = next(span for span in exported(traces) if span.name.startswith("execute_tool"))
    code = attributes(top)["error.type"]
    assert code == outcome.content["error"]["code"] == "auth_failed"
    assert [line["error_code"] for line in lines if line["action"] == "call.finished"] == [code]
    assert value("calls_total", tool="jina.search", status="failed", error_code=code) >= 1
    request = ExportMetricsServiceRequest.FromString(numbers.bodies[-1])
    (calls,) = (
        metric
        for found in request.resource_metrics
        for scope in found.scope_metrics
        for metric in scope.metrics
        if metric.name == "openapi_tool_calls"
    )
    assert code in {attributes(point).get("error.type") for point in calls.sum.data_points}


@requirement("cli.inspect")
async def test_a_search_for_doorbells_that_ends_early_leaves_no_subscription(world: World) -> None:
    """Else it would be ended after the connection, by a task whose error nobody sees."""
    for _ in range(2):
        await world.send(await world.place())
    client = world.caller.client
    options = DurableOptions(
        "v1r4", DURABLE, "cg.v1r4.*.*.cmd.tool.jina.>", NatsOptions(ack_wait_s=30.0, max_ack_pending=1_000)
    )
    before = set(client._subs)  # noqa: SLF001
    two_hours_ago = datetime.now(UTC) - timedelta(hours=2)  # longer than a doorbell may be late
    assert await doorbells_of(client, options, PROJECT, "of another call", two_hours_ago) == []
    assert set(client._subs) == before  # noqa: SLF001


@requirement("traces")
async def test_an_unsampled_call_makes_no_span_and_passes_its_flags_on(world_without_executor: World) -> None:
    with Collector() as collector:
        telemetry = {"otlp_endpoint": f"http://127.0.0.1:{collector.port}/v1/traces", "trace_ratio": 0.0}
        async with world_without_executor.executor(telemetry=telemetry):
            call = await world_without_executor.place()
            outcome = await world_without_executor.send(call)
    assert exported(collector) == []
    sent, received = (parse_traceparent(h["traceparent"]) for h in (call.headers, outcome.doorbells[0].headers or {}))
    assert (received.trace_id, received.flags) == (sent.trace_id, sent.flags)
    assert received.span_id != sent.span_id


@requirement("metrics", "logs.call")
async def test_metrics_and_the_log_line_of_a_call_show_its_time_and_tokens(
    world: World, lines: list[dict[str, Any]]
) -> None:
    world.stack.upstream.rules(RETRIED)
    names = [f"phase_seconds_count:phase={phase}" for phase in ("queue", "load", "upstream", "commit")]
    names += ["upstream_tokens_total:tool=jina.search", "upstream_requests_total:tool=jina.search"]
    names += ["upstream_request_seconds_count:host=s.jina.ai,error_code=upstream_unavailable"]
    before = [counted(name) for name in names]
    call = await world.place()
    outcome = await world.send(call)
    tool_output = outcome.rows.card["metadata"]["tool_output"]
    tokens = tool_output["usage"]["tokens"]
    assert [counted(name) - was for name, was in zip(names, before, strict=True)] == [1, 1, 1, 1, tokens, 2, 1]
    assert [(attempt["http_status"], attempt.get("error_code")) for attempt in tool_output["attempts"]] == [
        (503, "upstream_unavailable"),
        (200, None),
    ]
    (line,) = (line for line in lines if line["action"] == "call.finished")
    shown = ("status", "tokens", "requests", "http_status", "cached", "tool_call_id", "project_id")
    assert [line[name] for name in shown] == [
        "success", tokens, 2, 200, False, call.tool_call_id, call.project_id,
    ]  # fmt: skip
    assert line["upstream_ms"] >= 0
    of_call = [found for found in lines if found["action"] in ("call.running", "upstream.retry", "upstream.request")]
    assert len(of_call) == 4
    trace_id = parse_traceparent(call.headers["traceparent"]).trace_id
    of_call.append(line)
    ids = {(found["tool_call_id"], found["trace_id"], found["protocol"]) for found in of_call}
    assert ids == {(call.tool_call_id, trace_id, "v1r4")}


@requirement("logs.call")
async def test_log_lines_of_shared_tasks_have_no_call_ids(
    world_without_executor: World, lines: list[dict[str, Any]]
) -> None:
    """Background tasks started by the first call serve other calls, which may be of another project."""
    world = world_without_executor
    async with world.executor(limits={"search_requests_per_minute": 60}):
        await world.send(await world.place())
        world.stack.upstream.rules({"statuses": [429], "retry_after": "0"})
        await world.send(await world.place({"query": "another"}))
    (paused,) = (line for line in lines if line["action"] == "limits.paused")
    assert "tool_call_id" not in paused
    assert "trace_id" not in paused


def counted(name: str) -> float:
    name, _, labels = name.partition(":")
    return value(name, **dict(pair.split("=") for pair in labels.split(",")))


@requirement("metrics")
async def test_gauges_show_held_commands_and_the_durables_backlog(world: World) -> None:
    world.stack.upstream.rules({"hang": True})
    call = await world.place(RECORDED_ARGUMENTS)
    await world.caller.publish(call)
    await until(lambda: value("calls_running") == 1)
    assert world.components is not None
    await world.components.durable_monitor.check()
    assert [value(f"durable_{name}") for name in ("unacknowledged", "pending")] == [1, 0]
    assert (value("commands_held"), value("slots")) == (1, 64)
    first = value("oldest_held_command_seconds")
    await until(lambda: value("oldest_held_command_seconds") > first)
    for reason in ("defect", "no_identity"):  # present from the start; another test of this process may have had one
        assert REGISTRY.get_sample_value("openapi_tool_dead_letters_total", {"reason": reason}) is not None
