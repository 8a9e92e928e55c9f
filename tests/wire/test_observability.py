"""Spans at a collector, metrics and log lines of the same call."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import REGISTRY

from openapi_tool.protocol.identity import parse_traceparent
from openapi_tool.telemetry.logs import JsonFormatter
from openapi_tool.telemetry.redact import Redactor
from tests.canary.collector import Collector
from tests.requirements import requirement
from tests.wire.world import KNOWN, World

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
    return REGISTRY.get_sample_value(f"openapi_tool_{name}", labels) or 0.0


def exported(collector: Collector) -> list[Any]:
    """Return all spans that the collector received."""
    requests = [ExportTraceServiceRequest.FromString(body) for body in collector.bodies]
    scopes = [scope for request in requests for found in request.resource_spans for scope in found.scope_spans]
    return [span for scope in scopes for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


@requirement("traces", "answer.trace")
async def test_the_trace_of_a_call_continues_the_kernels_and_has_its_phases(idle_world: World) -> None:
    world = idle_world
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
    children = [span for span in spans if span is not top]
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
    idle_world: World, lines: list[dict[str, Any]]
) -> None:
    world = idle_world
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
    assert [line["error_code"] for line in lines if line["action"] == "call.answered"] == [code]
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


@requirement("traces")
async def test_an_unsampled_call_makes_no_span_and_passes_its_flags_on(idle_world: World) -> None:
    with Collector() as collector:
        telemetry = {"otlp_endpoint": f"http://127.0.0.1:{collector.port}/v1/traces", "trace_ratio": 0.0}
        async with idle_world.executor(telemetry=telemetry):
            call = await idle_world.place()
            outcome = await idle_world.send(call)
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
    (line,) = (line for line in lines if line["action"] == "call.answered")
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
async def test_log_lines_of_shared_tasks_have_no_call_ids(idle_world: World, lines: list[dict[str, Any]]) -> None:
    """Background tasks started by the first call serve other calls, which may be of another project."""
    world = idle_world
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
    call = await world.place(KNOWN)
    await world.caller.publish(call)
    await _until(lambda: value("calls_running") == 1)
    assert world.components is not None
    await world.components.durable_monitor.check()
    assert [value(f"durable_{name}", version="v1r4") for name in ("unacknowledged", "pending")] == [1, 0]
    assert (value("commands_held"), value("slots")) == (1, 64)
    first = value("oldest_held_command_seconds")
    await _until(lambda: value("oldest_held_command_seconds") > first)
    for reason in ("defect", "no_identity"):  # present from the start; another test of this process may have had one
        assert REGISTRY.get_sample_value("openapi_tool_dead_letters_total", {"reason": reason}) is not None


async def _until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - a gauge has no event
            await asyncio.sleep(0.01)
