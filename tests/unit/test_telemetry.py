"""Logs, metrics and spans of a call, and the health server."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import orjson
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import REGISTRY

from openapi_tool.kernel.postgres.failures import describe_connection_error as describe_database_error
from openapi_tool.nats_client.connection_errors import describe_connection_error
from openapi_tool.nats_client.options import BusOptions, NatsOptions
from openapi_tool.open_files import OUT_OF_FILES
from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.tracing import SpanContext, TraceLink, parse_traceparent
from openapi_tool.quotas.key_record import KeyUse
from openapi_tool.quotas.refused_keys import RefusedKeys
from openapi_tool.service.file_limit import file_limit_problem, fit_to_file_limit, health_connections
from openapi_tool.settings import Settings
from openapi_tool.telemetry import calls, metrics, otlp_spans
from openapi_tool.telemetry import health_server as module
from openapi_tool.telemetry.calls import RECENT, CallFacts
from openapi_tool.telemetry.health import NATS, Health
from openapi_tool.telemetry.health_server import MAX_CONNECTIONS, exposition, health_server
from openapi_tool.telemetry.logs import (
    CALL_FIELDS,
    MAX_LINES,
    MESSAGE_CHARS,
    UNLIMITED,
    WINDOW_S,
    ConsoleFormatter,
    JsonFormatter,
    ProjectLimit,
    configure_logging,
    without_details,
)
from openapi_tool.telemetry.otlp_collector import CollectorSession
from openapi_tool.telemetry.otlp_metrics import PeriodicExport
from openapi_tool.telemetry.otlp_spans import ExportingTracer
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS, RecentWarnings
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.replica_problems import found_problems
from openapi_tool.telemetry.snapshots import Snapshots
from openapi_tool.telemetry.spans import WireTracer
from openapi_tool.telemetry.upstream_waits import UpstreamWaits
from tests.requirements import requirement
from tests.support import TRACE_ID, each
from tests.waiting import WAIT_S

SECRET = "a-secret-of-the-test"
REDACTOR = Redactor([SECRET, "a-secret"])
PARENT = SpanContext(TRACE_ID, "b7ad6b7169203331", "01")


def facts(**changes: Any) -> CallFacts:
    """Return the record of a call of three seconds."""
    known: dict[str, Any] = {
        "ids": {"project_id": "p", "tool_call_id": "c"},
        "trace_id": TRACE_ID,
        "protocol": "v1r4",
        "function_name": "t",
        "delivery_attempt": 1,
        "age_s": 0.5,
        "began": 0.0,
        "loaded": 1.0,
        "tool": "jina.search",
        "status": "success",
    }
    return CallFacts(**(known | changes))


@pytest.fixture
def _logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("openapi_tool").setLevel(logging.NOTSET)


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.INFO, __file__, 1, message, args, None)
    vars(made).update(extra)
    return made


@pytest.mark.parametrize("logger", ["a.library", "openapi_tool.x"])
@requirement("secrets.output")
def test_a_secret_is_masked_in_message_arguments_fields_and_traceback(logger: str) -> None:
    made = record("key %s", SECRET, action="x", nested={"k": [SECRET]}, **{SECRET: 1})
    made.name = logger
    try:
        int(SECRET)
    except ValueError:
        made.exc_info = sys.exc_info()
    for formatter in (JsonFormatter(REDACTOR), ConsoleFormatter(REDACTOR)):
        line = formatter.format(made)
        assert "a-secret" not in line
        assert "[redacted]" in line
        assert "ValueError" in line


@requirement("secrets.output")
def test_anything_that_looks_like_a_jina_key_is_masked() -> None:
    shape = "jina" + "_" + "0" * 20
    assert Redactor().text(f"x {shape} y") == "x [redacted] y"
    assert Redactor().value({shape: (shape, 7)}) == {"[redacted]": ["[redacted]", 7]}


@pytest.mark.parametrize("name", ["tool_jina_openapi_cmd_v1r4", "jina_search_images", "jina_reader_of_long_pages_2"])
def test_names_that_only_begin_like_a_key_are_not_masked(name: str) -> None:
    assert Redactor().text(f"tool {name} ran") == f"tool {name} ran"


@pytest.mark.parametrize("value", ["re\udcff", 10**30, {"a": ["\ud800"]}])
@requirement("terminal.text")
def test_a_value_that_orjson_refuses_is_logged(value: Any) -> None:
    line = JsonFormatter(REDACTOR).format(record("hello", value=value, other="é"))
    assert "\n" not in line
    assert json.loads(line)["value"] == value
    assert json.loads(line)["other"] == "é"


def test_a_record_is_one_json_object_with_an_action() -> None:
    line = json.loads(
        JsonFormatter(REDACTOR).format(record("hello", action="call.finished", project_id="p", empty=None))
    )
    assert (line["action"], line["message"], line["project_id"], line["level"]) == (
        "call.finished",
        "hello",
        "p",
        "info",
    )
    assert "empty" not in line
    assert json.loads(JsonFormatter(REDACTOR).format(record("hello")))["action"] == "log"


@requirement("secrets.output")
def test_logging_goes_to_standard_error(_logging: None, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: PT019
    configure_logging("info", "json", REDACTOR)
    logging.getLogger("openapi_tool").info("to %s", SECRET)
    logging.getLogger("openapi_tool").debug("not shown")
    logging.getLogger("httpx").info("not shown")
    configure_logging("debug", "json", REDACTOR)
    for library in ("httpx", "httpcore.http11", "aiohttp.client", "asyncpg", "nats.aio", "urllib3", "asyncio"):
        logging.getLogger(library).info("not shown")
    written = capsys.readouterr()
    assert written.out == ""
    assert [json.loads(line)["message"] for line in written.err.splitlines()] == ["to [redacted]"]


LIBRARY_LINES = [
    'HTTP Request: POST https://s.jina.ai/?q=the-detail "HTTP/1.1 200 OK"',
    "connect_tcp.started host='s.jina.ai' url=https://user:the-detail@s.jina.ai/x?y=the-detail#f",
    "receive_response_headers.complete return_value=(b'HTTP/1.1', 200, [(b'Set-Cookie', b'the-detail=1; a=b')])",
    "send_request_headers [(b'Authorization', b'Bearer the-detail'), (b'x', b'y')]",
    "{'Authorization': 'Basic the-detail', 'accept': '*/*'}",
    "Authorization: Bearer the-detail",
    "Proxy-Authorization: Basic the-detail",
    '"GET /search?q=the-detail HTTP/1.1" 200',
    "<Request [b'GET'], b'/search?q=the-detail'> b'GET', b'/search?q=the-detail'",
    "connecting to postgresql://kernel:the-detail@db:5432/kernel?password=the-detail",
    "ConnectionParameters(user='kernel', password='the-detail', database='x')",
    '[\'CONNECT {"user":"u","pass":"the-detail","auth_token":"the-detail","jwt":"the-detail"}\']',
    "dial nats://the-detail@bus:4222, tls://u:the-detail@bus",
]


@pytest.mark.parametrize("line", LIBRARY_LINES)
@requirement("secrets.output")
def test_log_lines_of_libraries_lose_queries_authorization_and_passwords(line: str) -> None:
    made = record("%s", line)
    for formatter in (JsonFormatter(Redactor()), ConsoleFormatter(Redactor())):
        assert "the-detail" not in formatter.format(made)
        assert line[:7] in formatter.format(made) or line.startswith(("{", "[", '"'))


def test_other_text_in_log_lines_of_libraries_is_unchanged() -> None:
    plain = "connected to https://s.jina.ai:443/search in 3 ms, passed: 7 (signal 15), what? GET /metrics"
    assert without_details(plain) == plain


def test_cleaning_long_texts_of_libraries_takes_linear_time() -> None:
    began = time.process_time()
    for text in ("a" * 200_000, "a:" * 100_000, "https://" + "a@" * 50_000, "GET " * 50_000, "pass" * 50_000):
        without_details(text)
    assert time.process_time() - began < 2


@requirement("loop.answers", "secrets.output")
def test_a_long_library_message_is_truncated_without_halving_a_secret() -> None:
    for before in range(99_990, 100_001):
        made = record("%s", "x" * before + SECRET + "y" * 500_000)
        for formatter in (JsonFormatter(REDACTOR), ConsoleFormatter(REDACTOR)):
            line = formatter.format(made)
            assert len(line) < 101_000
            assert SECRET[:4] not in line
            assert "characters more" in line


def test_without_an_exporter_the_span_is_a_child_that_keeps_the_flags() -> None:
    with WireTracer().span("x", TraceLink(PARENT, "v=1", None), {}) as span:
        assert span.context.trace_id == TRACE_ID
        assert span.context.span_id != PARENT.span_id
        assert (span.context.flags, span.tracestate) == ("01", "v=1")


@requirement("answer.trace")
def test_the_exported_span_has_the_ids_of_the_traceparent() -> None:
    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, REDACTOR)
    foreign = SpanContext("a" * 32, "b" * 16)
    with tracer.span("execute_tool t", TraceLink(PARENT, None, foreign), {"tool_call_id": f"c {SECRET}"}) as span:
        span.facts = facts(status="failed", error_code="bad_request")
    tracer.shutdown()
    exported, *_ = exporter.get_finished_spans()
    attributes = dict(exported.attributes or {})
    assert attributes["gen_ai.tool.call.id"] == "c [redacted]"
    assert (attributes["openapi_tool.status"], attributes["error.type"]) == ("failed", "bad_request")
    assert exported.context is not None
    assert f"{exported.context.span_id:016x}" == span.context.span_id
    assert f"{exported.context.trace_id:032x}" == TRACE_ID
    assert exported.parent is not None
    assert f"{exported.parent.span_id:016x}" == PARENT.span_id
    assert [f"{link.context.trace_id:032x}" for link in exported.links] == ["a" * 32]


@requirement("answer.trace")
def test_an_unsampled_trace_is_neither_exported_nor_masked_but_propagated() -> None:
    class Untouched(Redactor):
        def text(self, text: str) -> str:
            raise AssertionError(text)

    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, Untouched())
    parent = SpanContext(TRACE_ID, "b" * 16, "00")
    with tracer.span("execute_tool t", TraceLink(parent, "v=1", None), {"tool_call_id": "c"}) as span:
        span.facts = facts()
    tracer.shutdown()
    assert exporter.get_finished_spans() == ()
    assert (span.context.trace_id, span.context.flags, span.tracestate) == (TRACE_ID, "00", "v=1")
    assert span.context.span_id not in (parent.span_id, "0" * 16)


@requirement("secrets.output")
def test_a_span_shows_no_secret_in_name_attributes_events_and_status() -> None:
    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, REDACTOR)
    link = TraceLink(PARENT, f"v={SECRET}", None)
    with suppress(ValueError), tracer.span(f"run {SECRET}", link, {"tool_call_id": SECRET}) as span:
        span.facts = facts(function_name=SECRET, doorbell=(2.0, 3.0), doorbell_subject=f"cg.{SECRET}")
        raise ValueError(SECRET)
    tracer.shutdown()
    exported, *children = exporter.get_finished_spans()
    assert [child.name for child in children] == ["queue", "load", "send wakeup"]
    assert all(SECRET not in span.to_json() for span in (exported, *children))
    for span_context in (made.context for made in (exported, *children)):
        assert span_context is not None
        assert SECRET not in span_context.trace_state.to_header()
    assert exported.name == "run [redacted]"
    assert exported.status.status_code.name == "ERROR"
    (event,) = exported.events
    assert dict(event.attributes or {}) == {"exception.type": "ValueError", "exception.message": "[redacted]"}


@requirement("traces")
def test_only_the_headers_of_a_collectors_response_are_read_and_no_redirect_is_followed() -> None:
    with collector(b"HTTP/1.1 200 OK\r\n\r\n", endless=True) as port:
        answer = CollectorSession().post(f"http://127.0.0.1:{port}/v1/traces", data=b"x", timeout=5)
        assert (answer.status_code, answer.text) == (200, "")
    for status in (302, 307):
        elsewhere = b"HTTP/1.1 %d Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n" % status
        with collector(elsewhere) as port:
            exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{port}/v1/traces", session=CollectorSession())
            assert exporter.export([]) is SpanExportResult.FAILURE, "nothing was stored, so it counts as dropped"


@contextmanager
def collector(answer: bytes, *, endless: bool = False) -> Iterator[int]:
    """Answer one request, with a body that never ends if `endless`; yields the port."""

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)
                while endless:
                    connection.sendall(b"x" * 65_536)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
    thread.join(10)
    assert not thread.is_alive(), "the connection was not closed"


ATTEMPTS = [
    UpstreamAttempt(1.0, "POST", "s.jina.ai", 0, 0.5, 503, "upstream_unavailable"),
    UpstreamAttempt(1.6, "POST", "s.jina.ai", 1, 0.4, 200),
    UpstreamAttempt(1.7, "POST", "s.jina.ai", 0),
]


@requirement("traces")
def test_each_phase_of_a_call_is_a_child_span_by_the_conventions() -> None:
    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, REDACTOR, instance="replica-1")
    with tracer.span("execute_tool t", TraceLink(PARENT, "v=1", None), {"tool_call_id": "c"}, -0.5) as span:
        times_of_end = {"commit": (2.0, 2.5), "doorbell": (2.5, 3.0), "doorbell_subject": "cg.x.wakeup"}
        span.facts = facts(attempts=ATTEMPTS, permit_waits=[(1.0, 1.0), (1.5, 1.6)], **times_of_end)
    tracer.shutdown()
    call, *children = exporter.get_finished_spans()
    assert call.context is not None
    assert call.context.trace_state.to_header() == "v=1"
    assert call.resource.attributes["service.instance.id"] == "replica-1"
    waits = ["wait for permit"] * 2
    names = [child.name for child in children]
    assert names == ["queue", "load", *waits, "POST", "POST", "POST", "commit", "send wakeup"]
    assert all(child.parent == call.context for child in children)
    assert all(child.context and child.context.trace_id == call.context.trace_id for child in children)
    assert len({child.context.span_id for child in children if child.context}) == len(children)
    assert call.start_time == min(child.start_time or 0 for child in children)
    times = [((child.start_time or 0) - (call.start_time or 0)) / 1e9 for child in children]
    assert times == pytest.approx([0.0, 0.5, 1.5, 2.0, 1.5, 2.1, 2.2, 2.5, 3.0], abs=1e-6)
    first, second, unfinished = (dict(child.attributes or {}) for child in children[4:7])
    http = {"http.request.method": "POST", "server.address": "s.jina.ai", "server.port": 443, "url.scheme": "https"}
    assert first == {**http, "http.response.status_code": 503, "error.type": "upstream_unavailable"}
    assert second == {**http, "http.response.status_code": 200, "http.request.resend_count": 1}
    assert unfinished == {**http, "error.type": "canceled"}
    doorbell = dict(children[-1].attributes or {})
    assert (doorbell["messaging.system"], doorbell["messaging.operation.type"]) == ("nats", "send")
    assert dict(call.attributes or {})["gen_ai.operation.name"] == "execute_tool"


@each(
    ("flags", "ratio", "expected"),
    [
        ("01", 1.0, True),
        ("00", 1.0, False),
        ("03", 1.0, True),
        ("01", 0.0, False),
        ("01", 0.7, False),
        ("01", 0.8, True),
    ],
)
@requirement("traces")
def test_a_call_is_sampled_by_its_parent_and_by_the_share_of_traces(flags: str, ratio: float, expected: bool) -> None:  # noqa: FBT001
    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, REDACTOR, ratio)
    parent = SpanContext("0" * 16 + "c" + "0" * 15, "b" * 16, flags)  # at three quarters of all ids
    with tracer.span("x", TraceLink(parent, None, None), {}) as span:
        assert span.context.flags == flags
    tracer.shutdown()
    assert len(exporter.get_finished_spans()) == expected


def spans_dropped() -> float:
    return REGISTRY.get_sample_value("openapi_tool_spans_dropped_total") or 0.0


@requirement("traces")
def test_spans_beyond_the_queue_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            started.set()
            release.wait()
            return super().export(spans)

    monkeypatch.setattr(otlp_spans, "MAX_QUEUED", 100)
    started, release = threading.Event(), threading.Event()
    exporter, before = Hanging(), spans_dropped()
    monkeypatch.setattr(otlp_spans, "_BATCH", 64)
    tracer = ExportingTracer(exporter, REDACTOR)

    def call() -> None:
        with tracer.span("x", TraceLink(PARENT, None, None), {}):
            pass

    for _ in range(64):
        call()
    started.wait()  # the exporter holds the first span
    for _ in range(200):
        call()
    release.set()
    tracer.shutdown()
    dropped = spans_dropped() - before
    assert dropped + len(exporter.get_finished_spans()) == 264
    assert dropped >= 100


@each("header", ["00-{}-{}-01", "00-{}-{}-00", "01-{}-{}-01-more", "00-{}-{}-01-more", "ff-{}-{}-01", "0-{}-{}-01", ""])
@requirement("traces")
def test_our_parser_of_traceparent_agrees_with_that_of_opentelemetry(header: str) -> None:
    text = header.format(TRACE_ID, "b7ad6b7169203331")
    theirs = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": text})).get_span_context()
    try:
        ours = parse_traceparent(text)
    except ValueError:
        assert not theirs.is_valid
    else:
        assert (f"{theirs.trace_id:032x}", f"{theirs.span_id:016x}") == (ours.trace_id, ours.span_id)
        assert theirs.trace_flags == int(ours.flags, 16)


@requirement("metrics")
def test_metrics_of_both_exporters_are_the_same() -> None:
    metrics.list_projects(["listed"])
    for project in ("listed", "unlisted"):
        ids = {"project_id": project}
        calls.record_finished(
            facts(ids=ids, tool="a.tool", status="failed", error_code="bad_request", attempts=ATTEMPTS)
        )
    metrics.list_projects([])
    text = exposition().decode()
    series = 'openapi_tool_calls_total{error_code="bad_request",project="%s",status="failed",tool="a.tool"} 1.0\n'
    assert series % "" in text
    assert series % "listed" in text
    assert "unlisted" not in text
    assert "openapi_tool_build_info{" in text
    assert "_created" not in text
    exporter = PeriodicExport(create_autospec(MetricExporter, instance=True), 3_600, "replica-1")
    exported = exporter.collected().resource_metrics[0].scope_metrics[0].metrics
    exporter.shutdown()
    filled = [described.name for described in metrics.ALL if list(metrics.samples(described.instrument))]
    assert [metric.name for metric in exported] == filled, "none without data"
    (points,) = (metric.data.data_points for metric in exported if metric.name == "openapi_tool_calls")
    values = [(dict(point.attributes or {}), getattr(point, "value", None)) for point in points]
    known = {"openapi_tool.built_in": "a.tool", "status": "failed", "error.type": "bad_request"}
    assert (known | {"commonground.project.id": "listed"}, 1.0) in values
    assert (known, 1.0) in values


@requirement("metrics")
def test_a_defect_in_an_export_of_metrics_does_not_end_the_next_ones(caplog: pytest.LogCaptureFixture) -> None:
    exporter = create_autospec(MetricExporter, instance=True)
    exporter.export.side_effect = [KeyError("a defect"), KeyError("a defect"), None, None]
    exporting = PeriodicExport(exporter, 0.01, "replica-1")
    deadline = time.monotonic() + 10
    while exporter.export.call_count < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    exporter.export.side_effect = None
    exporting.shutdown()
    assert exporter.export.call_count >= 3
    assert [record.__dict__["action"] for record in caplog.records] == ["metrics.not_exported"]


@requirement("metrics")
def test_a_histogram_bucket_includes_its_upper_bound() -> None:
    exporter = PeriodicExport(create_autospec(MetricExporter, instance=True), 3_600, "replica-1")

    def lag() -> tuple[list[int], float]:
        exported = exporter.collected().resource_metrics[0].scope_metrics[0].metrics
        (points,) = (one.data.data_points for one in exported if one.name == "openapi_tool_event_loop_lag_seconds")
        (point,) = points
        assert isinstance(point, HistogramDataPoint)
        assert list(point.explicit_bounds) == [0.005, 0.01, 0.05, 0.1, 0.5, 1, 5]
        assert sum(point.bucket_counts) == point.count
        return list(point.bucket_counts), point.sum

    before, before_s = lag()
    for value in (0.005, 0.002, 0.01, 9.0):
        metrics.EVENT_LOOP_LAG.observe(value)
    after, after_s = lag()
    exporter.shutdown()
    assert [now - was for now, was in zip(after, before, strict=True)] == [2, 1, 0, 0, 0, 0, 0, 1]
    assert after_s - before_s == pytest.approx(9.017)


@requirement("logs.call")
def test_a_line_within_a_call_has_its_ids_and_trace_id() -> None:
    token = CALL_FIELDS.set(facts().fields)
    try:
        line = json.loads(JsonFormatter(REDACTOR).format(record("hello", action="x")))
        shown = ConsoleFormatter(REDACTOR).format(record("hello", action="x"))
    finally:
        CALL_FIELDS.reset(token)
    assert (line["project_id"], line["tool_call_id"], line["trace_id"]) == ("p", "c", TRACE_ID)
    assert f"trace_id={TRACE_ID}" in shown


@requirement("cli.top", "secrets.output")
def test_recent_warnings_are_grouped_by_action_masked_and_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings, now = RecentWarnings(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    warnings.install(REDACTOR)
    logger = logging.getLogger("openapi_tool.somewhere")
    try:
        logger.info("not shown", extra={"action": "quiet"})
        for number in range(3):
            logger.warning("number %s of %s", number, SECRET, extra={"action": "loud", "project_id": "p"})
        now += 1
        logger.error("x" * 1_000)
        unknown, loud = warnings.snapshot()
        assert (loud["action"], loud["count"], loud["ago_s"], loud["project_id"]) == ("loud", 3, 1.0, "p")
        assert loud["message"].startswith("number 2 of ")
        assert SECRET not in str(warnings.snapshot())
        assert (unknown["action"], unknown["message"]) == ("log", "x" * 400 + "…")
        now += 599.5
        assert [warning["action"] for warning in warnings.snapshot()] == ["log"], "ten minutes have passed"
        logger.warning("again", extra={"action": "loud"})
        assert warnings.snapshot()[0]["count"] == 1
        for number in range(200):
            logger.warning("many", extra={"action": f"many.{number}"})
        assert len(warnings.snapshot()) == 100
        assert warnings.snapshot()[0]["action"] == "many.199", "the newest ones stay"
    finally:
        logging.getLogger("openapi_tool").removeHandler(warnings)


@requirement("cli.top")
def test_recent_warnings_name_each_project_and_those_of_many_projects_displace_no_other_action() -> None:
    warnings = RecentWarnings()
    warnings.handle(record("another", action="other"))
    for number in range(200):
        for _ in range(2):
            warnings.handle(record("full", action="intake.full", project_id=f"p{number}"))
    full = [warning for warning in warnings.snapshot() if warning["action"] == "intake.full"]
    assert [(warning["project_id"], warning["count"]) for warning in full[:2]] == [("p199", 2), ("p198", 2)]
    assert len(full) == 8
    assert warnings.snapshot()[-1]["action"] == "other"


@requirement("cli.top")
def test_an_outage_of_each_dependency_is_a_recent_warning_so_that_it_is_known_after_the_recovery() -> None:
    warnings, health = RecentWarnings(), Health(redact=str)
    warnings.install(REDACTOR)
    try:
        for name in ("postgres", "nats"):
            health.record(name, ok=True)
            health.record(name, ok=False, reason="gone")
            health.record(name, ok=True)
        assert [(warning["dependency"], warning["message"]) for warning in warnings.snapshot()] == [
            ("nats", "nats is unavailable: gone"),
            ("postgres", "postgres is unavailable: gone"),
        ]
    finally:
        logging.getLogger("openapi_tool").removeHandler(warnings)


@requirement("cli.top", "reload")
@pytest.mark.parametrize("action", ["reload.failed", "tools.reload_failed"])
def test_a_failed_reload_is_a_warning_until_one_succeeds(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings, now = RecentWarnings(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    warnings.handle(record("wrong", action=action))
    now += 7_200
    for number in range(200):
        warnings.handle(record("many", action=f"many.{number}"))
    snapshot = warnings.snapshot()
    assert (len(snapshot), snapshot[-1]["action"], snapshot[-1]["lasts"]) == (100, action, True)
    replica = {"instance": "r", "warnings": snapshot[-1:]}
    assert found_problems([replica]).now == [f"r: {action}, 1 time, last 120 min ago: wrong"]
    warnings.solve(action)
    assert action not in str(warnings.snapshot()), "it was more than ten minutes ago"
    warnings.handle(record("wrong again", action=action))
    warnings.solve(action)
    replica = {"instance": "r", "warnings": warnings.snapshot()[:1]}
    assert found_problems([replica]).earlier == [f"recovered: r: {action}, 1 time, last 0 s ago: wrong again"]


@requirement("cli.top", "answer.errors")
def test_a_refused_key_has_recovered_at_an_endpoint_once_a_request_there_succeeded() -> None:
    keys, search, reader = RefusedKeys(), KeyUse("KEY", "search"), KeyUse("KEY", "reader")
    RECENT_WARNINGS.install(REDACTOR)
    try:
        for use in (search, reader):
            keys.record(use, 401)
        keys.record_success(search)
        found = found_problems([{"instance": "r", "warnings": RECENT_WARNINGS.snapshot()}])
        assert [line.partition(" for a ")[2].partition(" ")[0] for line in found.now] == ["reader"]
        assert found.earlier[0].startswith("recovered: r: key.refused, 1 time, last 0 s ago: the upstream refused")
        keys.record(search, 401)
        assert len(found_problems([{"instance": "r", "warnings": RECENT_WARNINGS.snapshot()}]).earlier) == 0, "again"
    finally:
        logging.getLogger("openapi_tool").removeHandler(RECENT_WARNINGS)


class Upstream:
    """Requests to one host, with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.waits = UpstreamWaits()

    def begin(self, *, is_sent: bool = True) -> UpstreamAttempt:
        attempt = UpstreamAttempt(self.now, "GET", "a.example", 0, is_sent=is_sent)
        self.waits.begin(attempt)
        return attempt

    def end(self, attempt: UpstreamAttempt, http_status: int | None = None, *, cancelled: bool = False) -> None:
        if not cancelled:
            attempt.http_status = http_status
            attempt.end(self.now)
        self.waits.end(attempt)

    def shown(self) -> list[tuple[int, float, float]]:
        return [(host["open"], host["oldest_s"], host["silent_s"]) for host in self.waits.snapshot()]


@requirement("cli.top")
def test_a_host_to_which_nothing_could_be_sent_is_not_said_to_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream(monkeypatch)
    attempt = upstream.begin(is_sent=False)
    upstream.now += 10
    assert upstream.shown() == [(1, 10.0, 10.0)]  # it waits for its connection
    upstream.end(attempt)
    assert upstream.shown() == []


@requirement("cli.top")
def test_a_host_is_silent_from_its_first_request_until_it_answers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream(monkeypatch)
    first = upstream.begin()
    upstream.now += 30
    assert upstream.shown() == [(1, 30.0, 30.0)]
    second = upstream.begin()
    upstream.end(first)  # too late
    upstream.now += 5
    assert upstream.shown() == [(1, 5.0, 35.0)], "also if each single request is given up earlier"
    upstream.end(second, 503)
    assert upstream.shown() == [], "any status is an answer"
    third, fourth = upstream.begin(), upstream.begin()
    upstream.now += 40
    upstream.end(third, 200)
    assert upstream.shown() == [(1, 40.0, 0.0)], "one request waits, but the host answers"
    upstream.end(fourth, cancelled=True)
    assert upstream.shown() == []


@requirement("cli.top")
def test_a_host_without_requests_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream(monkeypatch)
    upstream.end(upstream.begin(), cancelled=True)
    upstream.now += 600
    upstream.end(upstream.begin())
    upstream.now += 60
    assert upstream.shown() == [(0, 0.0, 60.0)]
    upstream.now += 1
    assert upstream.shown() == [], "it failed a minute ago"
    upstream.begin()
    assert upstream.shown() == [(1, 0.0, 0.0)]


@requirement("cli.top")
def test_warnings_about_a_subject_of_any_bytes_can_be_sent_as_statistics() -> None:
    warnings = RecentWarnings()
    warnings.handle(record("project %s", "p\udcff", action="intake.full", project_id="p\udcff\ud800"))
    assert b"intake.full" in orjson.dumps(warnings.snapshot())


def _limited(
    limit: ProjectLimit, project: str | None = "noisy", action: str = "some.action", **fields: Any
) -> int | None:
    """Return the number of dropped lines that a line reports, or None if it is dropped itself."""
    given = {"name": "openapi_tool.x", **fields, **({} if project is None else {"project_id": project})}
    made = record("a line", action=action, **given)
    return vars(made).get("dropped", 0) if limit.filter(made) else None


@requirement("hostile.neighbour", "logs.limits")
def test_a_flood_of_one_project_is_logged_in_part_with_the_number_of_dropped_lines() -> None:
    clock = [0.0]
    limit = ProjectLimit(lambda: clock[0])
    before = REGISTRY.get_sample_value("openapi_tool_log_lines_limited_total") or 0.0
    assert [_limited(limit) for _ in range(MAX_LINES + 500)] == [0] * MAX_LINES + [None] * 500
    assert (REGISTRY.get_sample_value("openapi_tool_log_lines_limited_total") or 0.0) - before == 500
    assert (_limited(limit, "quiet"), _limited(limit, action="another.action")) == (0, 0)
    clock[0] += WINDOW_S
    assert [_limited(limit) for _ in range(MAX_LINES + 1)] == [500, *[0] * (MAX_LINES - 1), None]


@requirement("logs.limits")
def test_final_lines_lines_of_no_project_and_debug_lines_are_not_limited() -> None:
    limit = ProjectLimit(lambda: 0.0)
    for action in UNLIMITED:
        assert [_limited(limit, action=action) for _ in range(500)] == [0] * 500
    assert [_limited(limit, None) for _ in range(500)] == [0] * 500
    assert [_limited(limit, levelno=logging.DEBUG) for _ in range(500)] == [0] * 500


@requirement("logs.limits")
def test_the_lines_of_each_logger_of_a_library_are_limited() -> None:
    limit = ProjectLimit(lambda: 0.0)
    for name in ("uvicorn.error", "mcp.server.runner"):
        assert [_limited(limit, None, name=name) for _ in range(500)] == [0] * MAX_LINES + [None] * (500 - MAX_LINES)
    assert _limited(limit, name="uvicorn.error") == 0, "a line of a project is counted with this project's"


@requirement("hostile.neighbour", "logs.limits")
def test_the_limit_of_lines_takes_the_project_of_the_running_call() -> None:
    limit = ProjectLimit(lambda: 0.0)
    token = CALL_FIELDS.set(lambda: {"project_id": "noisy"})
    try:
        written = [_limited(limit, None) for _ in range(200)]
        CALL_FIELDS.set(lambda: {"project_id": "quiet"})
        assert _limited(limit, None) == 0
    finally:
        CALL_FIELDS.reset(token)
    assert written.count(0) == MAX_LINES


@requirement("hostile.neighbour", "logs.limits")
def test_many_projects_do_not_use_up_the_memory_of_the_limit_and_earlier_ones_keep_their_lines() -> None:
    clock = [0.0]
    limit = ProjectLimit(lambda: clock[0])
    for _ in range(2):
        assert _limited(limit, "earlier") == 0
        gc.collect()
        tracemalloc.start()
        written = sum(_limited(limit, f"project {number}") is not None for number in range(50_000))
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 4_000 < written < 5_000
        assert used < 4_000_000
        assert _limited(limit, "earlier") == 0
        clock[0] += WINDOW_S


@requirement("logs.limits", "secrets.output")
def test_the_message_of_a_line_of_a_project_is_cut_without_halving_a_secret() -> None:
    for before in range(MESSAGE_CHARS - len(SECRET) - 2, MESSAGE_CHARS + 2):
        for logger in ("openapi_tool.x", "library"):
            made = record("%s", "x" * before + SECRET + "y" * 50_000, name=logger, project_id="noisy")
            for formatter in (JsonFormatter(REDACTOR), ConsoleFormatter(REDACTOR)):
                line = formatter.format(made)
                assert len(line) < MESSAGE_CHARS + 250
                assert SECRET[:4] not in line
                assert "characters more" in line


@pytest.mark.usefixtures("_logging")
@requirement("hostile.neighbour", "logs.limits")
def test_the_handler_of_the_process_limits_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json", REDACTOR)
    for _ in range(MAX_LINES + 50):
        logging.getLogger("openapi_tool.x").error("again", extra={"action": "call.broken", "project_id": "noisy"})
    assert len(capsys.readouterr().err.splitlines()) == MAX_LINES


PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /livez HTTP/1.1\r\nHost: "
READ = asyncio.StreamReader | None


@pytest.fixture
def _descriptors() -> Iterator[None]:
    """Raise the limit of open files: one process has both ends of every connection."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
async def port(_descriptors: None) -> AsyncIterator[int]:
    async with health_server("127.0.0.1", 0, Health()) as port:
        yield port


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def response_to(port: int, request: bytes) -> bytes:
    """Return everything that the server sends until it closes. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S), connection(port) as (reader, writer):
        return await read_response(reader, writer, request)


async def read_response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        writer.write(request)
        while data := await reader.read(65_536):
            answer += data
    return answer


@pytest.mark.usefixtures("_descriptors")
@requirement("health")
async def test_the_text_of_metrics_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count()
    monkeypatch.setattr(module, "exposition", lambda: b"text %d" % next(made))
    for cache_s, texts in ((3_600.0, {b"text 0"}), (0.0, {b"text %d" % number for number in range(1, 21)})):
        monkeypatch.setattr(module, "METRICS_CACHE_S", cache_s)
        async with health_server("127.0.0.1", 0, Health()) as port:
            answers = await asyncio.gather(*(response_to(port, METRICS) for _ in range(20)))
        assert {answer.partition(b"\r\n\r\n")[2] for answer in answers} == texts


@requirement("health")
async def test_a_probe_is_answered_despite_many_half_sent_requests(port: int) -> None:
    async with AsyncExitStack() as exits:
        readers = []
        for _ in range(1_200):
            reader, writer = await exits.enter_async_context(connection(port))
            writer.write(HALF)
            readers.append(reader)
        assert b'"live": true' in await response_to(port, PROBE)
        async with asyncio.timeout(WAIT_S):
            for reader in readers[: 1_200 - MAX_CONNECTIONS]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""


@requirement("health")
async def test_open_connections_never_exceed_the_limit(port: int) -> None:
    taken: set[object] = set()
    usual = module._Connection.connection_made  # noqa: SLF001 - connections of the server itself are counted

    def count(self: module._Connection, transport: asyncio.BaseTransport) -> None:
        usual(self, transport)
        taken.add(transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Connection, "connection_made", count)  # noqa: SLF001
        async with AsyncExitStack() as exits:
            for _ in range(3 * MAX_CONNECTIONS):
                await exits.enter_async_context(connection(port))
            assert b'"live": true' in await response_to(port, PROBE)
            is_open = [transport for transport in taken if not transport.is_closing()]  # type: ignore[attr-defined]
            assert len(taken) == 3 * MAX_CONNECTIONS + 1
            assert len(is_open) < MAX_CONNECTIONS


@pytest.mark.usefixtures("_descriptors")
@pytest.mark.parametrize("first", [b"", HALF, b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx"])
@requirement("health")
async def test_a_slow_connection_is_closed(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIFE_S", 0.3)
    async with health_server("127.0.0.1", 0, Health()) as port, connection(port) as (reader, writer):
        writer.write(first)
        reading = asyncio.create_task(read_response(reader, writer, b""))
        async with asyncio.timeout(WAIT_S):
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
        assert b"200 OK" not in reading.result()
        assert b'"live": true' in await response_to(port, PROBE)


# fmt: off
CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HOSTILE = {
    "a header of 10 MB": b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 10_000_000,
    "headers of 10 MB": b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 1_600_000,
    "a path of 10 MB": b"GET /" + b"x" * 10_000_000 + b" HTTP/1.1\r\n\r\n",
    "a body of 10 MB": b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 10_000_000,
    "a body of a probe": b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 10_000_000,
    "chunks without end": CHUNKED + b"1\r\nx\r\n" * 100_000,
    "a chunk of any size": CHUNKED + b"ffffffffffffffff\r\n",
    "TLS": b"\x16\x03\x01" + b"\x00" * 200, "no text": b"\xff" * 1_000 + b"\r\n\r\n",
    "another version": b"GET /livez HTTP/9.9\r\n\r\n",
    "an upgrade": PROBE[:-2] + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
}
# fmt: on


@pytest.mark.parametrize("request_", HOSTILE.values(), ids=HOSTILE)
@requirement("health")
async def test_any_bytes_get_at_most_one_response_and_the_connection_is_closed(request_: bytes, port: int) -> None:
    assert (await response_to(port, request_)).count(b"HTTP/1.") <= 1
    assert b'"live": true' in await response_to(port, PROBE)


@requirement("health")
async def test_only_the_first_of_pipelined_requests_is_answered(port: int) -> None:
    answer = await response_to(port, PROBE * 2_000)
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [(PROBE, b"200"), (PROBE.replace(b"live", b"ready"), b"503"), (PROBE.replace(b"livez", b"x"), b"404")],
)
@requirement("health")
async def test_every_response_closes_its_connection(request_: bytes, status: bytes, port: int) -> None:
    answer = await response_to(port, request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in answer


@pytest.mark.usefixtures("_descriptors")
@requirement("health")
def test_bytes_beyond_the_limit_are_not_buffered_and_close_the_connection() -> None:
    """aiohttp buffers data that arrives after a refusal: a few connections of 10 MB took 600 MB."""
    inner, transport = Mock(), Mock()
    connection = module._Connection(inner, {}, module.MAX_CONNECTIONS)  # noqa: SLF001 - not visible elsewhere
    connection._transport = transport  # noqa: SLF001
    for _ in range(100):
        connection.data_received(b"x" * 65_536)
    passed_on = sum(len(call.args[0]) for call in inner.data_received.call_args_list)
    assert 70_000 < passed_on <= module.MAX_REQUEST_BYTES
    transport.abort.assert_called()


@requirement("health")
async def test_a_port_in_use_is_an_error(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        async with health_server("127.0.0.1", port, Health()):
            pytest.fail("two servers at one port")


@pytest.mark.usefixtures("_descriptors")
@requirement("health")
async def test_readyz_shows_recorded_states() -> None:
    health = Health()
    health.record(NATS, ok=True)
    async with health_server("127.0.0.1", 0, health) as port:
        assert b'"nats": {"ok": true' in await response_to(port, PROBE.replace(b"live", b"ready"))


LIMIT = """
import logging
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
from openapi_tool.service.file_limit import raise_file_limit
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@requirement("health")
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    assert done.stdout.split() == ["300", "300", "300"]


@pytest.mark.parametrize(
    ("limit", "port", "enough"),
    [
        (1159, 0, False),
        (1160, 0, True),
        (1223, 8080, False),
        (1224, 8080, True),
        (resource.RLIM_INFINITY, 1, True),
    ],
)
@requirement("health")
def test_a_shortage_of_open_files_is_reported_with_the_numbers(limit: int, port: int, enough: bool) -> None:  # noqa: FBT001
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, "health": {"port": port}})
    message = file_limit_problem(settings, limit)
    assert (message is None) == enough
    if message:
        assert f"may open {limit} files" in message
        assert "egress.max_connections for each of 2 hosts 1024, postgres.pool_size 8" in message


@pytest.mark.parametrize(
    ("limit", "connections", "pool_size", "health"),
    [
        (resource.RLIM_INFINITY, 512, 8, 64),
        (1224, 512, 8, 64),
        (1223, 511, 8, 64),
        (256, 44, 8, 32),
        (64, 8, 8, 8),
        (32, 4, 4, 4),
        (4, 1, 1, 1),
    ],
)
@requirement("open_files")
def test_connections_are_limited_so_that_all_purposes_have_files(
    limit: int, connections: int, pool_size: int, health: int
) -> None:
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, "health": {"port": 8080}})
    fitted = fit_to_file_limit(settings, limit)
    assert (fitted.egress.max_connections, fitted.postgres.pool_size) == (connections, pool_size)
    assert health_connections(limit) == health


@requirement("open_files")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_shortage_of_files_is_named_for_every_dependency(number: int) -> None:
    shortage = OSError(number, os.strerror(number))
    several = OSError(f"Multiple exceptions: [Errno 111] Connect call failed, {shortage}")
    bus = BusOptions(NatsOptions(servers=("nats://h:4222",)))
    for error in (shortage, several):
        assert describe_connection_error(error, bus) == f"NATS at h:4222: {OUT_OF_FILES}"
        assert describe_database_error(error) == OUT_OF_FILES
    refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    assert OUT_OF_FILES not in describe_connection_error(refused, bus)


@requirement("health")
def test_each_reason_of_an_outage_is_logged_once_a_minute_and_named_at_each_change(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "openapi_tool.telemetry.health")
    health = Health()
    health.record(NATS, ok=True)
    for number in range(20):
        health.record(NATS, ok=False, reason="timeout" if number % 2 else "no responders")
    health.record(NATS, ok=True)
    health.record(NATS, ok=False, reason="timeout")
    assert [record.getMessage() for record in caplog.records] == [
        "nats is available",
        "nats is unavailable: no responders",
        "nats is unavailable: timeout",
        "nats is available",
        "nats is unavailable: timeout",
    ]
    caplog.clear()
    monkeypatch.setattr("openapi_tool.telemetry.health._REPEAT_AFTER_S", 0.0)  # as if a minute passed after each line
    health = Health()
    for ok in (False, False, False, True, True):
        health.record(NATS, ok=ok, reason="" if ok else "timeout")
    assert [record.getMessage() for record in caplog.records] == [
        *["nats is unavailable: timeout"] * 3,
        "nats is available",
    ]


CHROMIUM = shutil.which("chromium")
NAMED = "<script>document.title = 'taken'</script>"
_BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom")


@pytest.fixture
async def page_port() -> AsyncIterator[int]:
    facts = CallFacts(
        {"project_id": NAMED, "tool_call_id": "tc_1"}, "0" * 32, "v1r4", "t", 1, 0.5, 0.0, 0.1, tool="jina.search"
    )
    facts.status, facts.ended = "success", time.monotonic()
    RECENT.append(facts)
    async with health_server("127.0.0.1", 0, Health(), Snapshots("replica-1", Health(), {"a.limit": 7})) as port:
        yield port


@requirement("page")
async def test_the_page_is_off_by_default(port: int) -> None:
    for path in (b"/", b"/stats.json"):
        assert b" 404 " in await response_to(port, b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path)


@pytest.mark.usefixtures("_descriptors")
@requirement("page")
async def test_a_page_without_an_executor_serves_no_probes_and_metrics() -> None:
    """`dev` shows the page of another process, whose state it does not know."""
    RECENT.clear()
    async with health_server("127.0.0.1", 0, None, Snapshots("replica-1", Health(), {})) as port:
        for path, status in ((b"/", b" 200 "), (b"/readyz", b" 404 "), (b"/metrics", b" 404 ")):
            assert status in await response_to(port, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)


@requirement("page")
async def test_the_page_has_a_strict_policy_and_its_numbers_no_payload(page_port: int) -> None:
    page = await response_to(page_port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"default-src 'none'; connect-src 'self'; script-src 'sha256-" in page
    assert b"unsafe" not in page
    assert b"innerHTML" not in page
    answer = await response_to(page_port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"X-Content-Type-Options: nosniff" in answer
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (stats["instance"], stats["limits"]) == ("replica-1", {"a.limit": 7})
    assert stats["last"][0].keys() == {
        "ago_s", "project", "tool_call_id", "tool", "status", "error_code", "ms", "tokens", "cached",
    }  # fmt: skip


@requirement("page")
async def test_the_page_says_what_is_wrong_before_all_numbers_and_without_script() -> None:
    RECENT.clear()
    health = Health()
    health.record("postgres", ok=False, reason="<b>no</b> answer")
    async with health_server("127.0.0.1", 0, None, Snapshots("replica-1", health, {})) as port:
        page = (await response_to(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).decode()
        answer = await response_to(port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    body = page.partition("</head>")[2]
    assert "postgres is unavailable: &lt;b&gt;no&lt;/b&gt; answer" in body
    assert body.index("postgres is unavailable") < body.index("<table")
    assert "calls may wait" in body
    assert "<noscript>" in body
    assert "/stats.json" in body
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert stats["problems"][0] == "postgres is unavailable: <b>no</b> answer", "without the replica's own name"
    assert stats["earlier"] == []


@requirement("page")
async def test_only_livez_is_served_under_public_host_names(page_port: int) -> None:
    """A foreign web page could resolve its own host name to this address, and read it (DNS rebinding)."""
    paths = (b"/", b"/stats.json", b"/metrics", b"/readyz")
    for host in (
        "localhost",
        "127.0.0.1:8080",
        "[::1]:80",
        "10.1.2.3",
        "executor",
        "executor.agents.svc",
        "a.internal",
    ):
        for path in paths:
            answer = await response_to(page_port, b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host.encode()))
            assert answer.split()[1] == (b"503" if path == b"/readyz" else b"200"), host
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[", "x.svc.example"):
        for path in paths:
            answer = await response_to(page_port, b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host.encode()))
            assert answer.split()[1] in (b"421", b"400"), host
    assert b" 200 " in await response_to(page_port, b"GET /livez HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert b" 503 " in await response_to(page_port, b"GET /readyz HTTP/1.0\r\n\r\n"), "a probe without Host"


@requirement("page")
async def test_metrics_are_served_under_a_public_name_that_the_settings_allow() -> None:
    async with health_server("127.0.0.1", 0, Health(), allowed_hosts=("a.example",)) as port:
        for host, status in ((b"A.example:9090", b" 200 "), (b"b.example", b" 421 ")):
            assert status in await response_to(port, b"GET /metrics HTTP/1.1\r\nHost: %s\r\n\r\n" % host)


@requirement("page", "cli.top")
async def test_a_tool_whose_definition_is_not_usable_has_its_name_in_the_project(page_port: int) -> None:
    RECENT[-1].tool, RECENT[-1].function_name, RECENT[-1].error_code = "", "my_tool", "tool_misconfigured"
    answer = await response_to(page_port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert [stats[part][0]["tool"] for part in ("tools", "errors", "last")] == ["my_tool"] * 3


@requirement("page")
async def test_the_last_calls_stay_on_the_page_beyond_the_minute(page_port: int) -> None:
    RECENT[-1].ended = time.monotonic() - 600
    answer = await response_to(page_port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (len(stats["last"]), stats["calls"]) == (1, 0)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian's package) is not installed")
@requirement("page")
async def test_a_browser_shows_the_numbers_and_runs_no_script_from_a_call(
    page_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CHROMIUM is not None
    warnings = RecentWarnings()
    warnings.handle(record("of a project", action="intake.full", project_id="p_warned"))
    warnings.handle(record("of none", action="nats.silent"))
    monkeypatch.setattr("openapi_tool.telemetry.snapshots.RECENT_WARNINGS", warnings)
    url = f"http://127.0.0.1:{page_port}/"
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, *_BROWSER, f"--user-data-dir={tmp_path}", url, stdout=PIPE, stderr=DEVNULL
    )
    async with asyncio.timeout(60):
        shown, _ = await browser.communicate()
    text = shown.decode()
    assert "replica-1" in text
    assert "a.limit" in text
    assert "tc_1" in text
    assert '<div class="">p_warned</div>' in text, "a column that the first row lacks"
    assert '<div id="tables">' in text, "hidden without script"
    assert "<title>openapi-tool</title>" in text
    assert "&lt;script&gt;document.title" in text
