"""Logs, spans and metrics: their form, and that they show no secret."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import create_autospec

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from openapi_tool.protocol.identity import SpanContext, TraceLink, parse_traceparent
from openapi_tool.protocol.records import Attempt
from openapi_tool.telemetry import calls, health_server, metrics, otlp
from openapi_tool.telemetry.calls import CALL_FIELDS, CallFacts, WireTracer
from openapi_tool.telemetry.health import RecentWarnings
from openapi_tool.telemetry.logs import ConsoleFormatter, JsonFormatter, configure_logging, without_details
from openapi_tool.telemetry.otlp import ExportingTracer
from openapi_tool.telemetry.otlp_metrics import PeriodicExport
from openapi_tool.telemetry.redact import Redactor
from tests.requirements import requirement
from tests.support import TRACE_ID, each

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
        JsonFormatter(REDACTOR).format(record("hello", action="call.answered", project_id="p", empty=None))
    )
    assert (line["action"], line["message"], line["project_id"], line["level"]) == (
        "call.answered",
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
    started = time.monotonic()
    for text in ("a" * 200_000, "a:" * 100_000, "https://" + "a@" * 50_000, "GET " * 50_000, "pass" * 50_000):
        without_details(text)
    assert time.monotonic() - started < 2


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
        span.facts = facts(function_name=SECRET, wakeup=(2.0, 3.0), wakeup_subject=f"cg.{SECRET}")
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
        answer = otlp.session().post(f"http://127.0.0.1:{port}/v1/traces", data=b"x", timeout=5)
        assert (answer.status_code, answer.text) == (200, "")
    for status in (302, 307):
        elsewhere = b"HTTP/1.1 %d Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n" % status
        with collector(elsewhere) as port:
            exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{port}/v1/traces", session=otlp.session())
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
    Attempt(1.0, "POST", "s.jina.ai", 0, 0.5, 503, "upstream_unavailable"),
    Attempt(1.6, "POST", "s.jina.ai", 1, 0.4, 200),
    Attempt(1.7, "POST", "s.jina.ai", 0),
]


@requirement("traces")
def test_each_phase_of_a_call_is_a_child_span_by_the_conventions() -> None:
    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, REDACTOR, instance="replica-1")
    with tracer.span("execute_tool t", TraceLink(PARENT, "v=1", None), {"tool_call_id": "c"}) as span:
        times_of_end = {"commit": (2.0, 2.5), "wakeup": (2.5, 3.0), "wakeup_subject": "cg.x.wakeup"}
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
    wakeup = dict(children[-1].attributes or {})
    assert (wakeup["messaging.system"], wakeup["messaging.operation.type"]) == ("nats", "send")
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


@requirement("traces")
def test_spans_beyond_the_queue_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            started.set()
            release.wait()
            return super().export(spans)

    monkeypatch.setattr(otlp, "MAX_QUEUED", 100)
    started, release = threading.Event(), threading.Event()
    exporter, before = Hanging(), metrics.SPANS_DROPPED.labels().number
    tracer = ExportingTracer(exporter, REDACTOR)

    def call() -> None:
        with tracer.span("x", TraceLink(PARENT, None, None), {}):
            pass

    for _ in range(64):
        call()
    started.wait()  # it holds the first of them
    for _ in range(200):
        call()
    release.set()
    tracer.shutdown()
    dropped = metrics.SPANS_DROPPED.labels().number - before
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
    text = health_server.exposition().decode()
    series = 'openapi_tool_calls_total{error_code="bad_request",status="failed",tool="a.tool"'
    assert f"{series}}} 1.0\n" in text.replace(',project="listed"', ",PROJECT")
    assert 'project="listed"' in text
    assert "unlisted" not in text
    assert "openapi_tool_build_info{" in text
    assert "_created" not in text
    exporter = PeriodicExport(create_autospec(MetricExporter, instance=True), 3_600, "replica-1")
    exported = exporter.collected().resource_metrics[0].scope_metrics[0].metrics
    exporter.shutdown()
    filled = [metric for metric in metrics.ALL if list(metric.children())]
    assert [metric.name for metric in exported] == [metric.name for metric in filled], "none without data"
    (points,) = (metric.data.data_points for metric in exported if metric.name == "openapi_tool_calls")
    values = [(dict(point.attributes or {}), getattr(point, "value", None)) for point in points]
    known = {"openapi_tool.built_in": "a.tool", "status": "failed", "error.type": "bad_request"}
    assert (known | {"commonground.project.id": "listed"}, 1.0) in values
    assert (known, 1.0) in values


@requirement("metrics")
def test_a_histogram_bucket_includes_its_upper_bound() -> None:
    histogram = metrics.Histogram("x", "", bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    (child,) = (child for _, child in histogram.children())
    assert (child.counts, child.total) == ([2, 1, 1], 6.0)


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
        logger.warning("shown by its present state", extra={"action": "health.changed"})
        for number in range(3):
            logger.warning("number %s of %s", number, SECRET, extra={"action": "loud", "project_id": "p"})
        now += 1
        logger.error("x" * 1_000)
        unknown, loud = warnings.snapshot()
        assert (loud["action"], loud["count"], loud["ago_s"], loud["project_id"]) == ("loud", 3, 1.0, "p")
        assert loud["message"].startswith("number 2 of ")
        assert SECRET not in str(warnings.snapshot())
        assert (unknown["action"], len(unknown["message"])) == ("log", 300)
        now += 599.5
        assert [warning["action"] for warning in warnings.snapshot()] == ["log"], "ten minutes have passed"
        logger.warning("again", extra={"action": "loud"})
        assert warnings.snapshot()[0]["count"] == 1
        for number in range(200):
            logger.warning("many", extra={"action": f"many.{number}"})
        assert len(warnings.snapshot()) == 100
    finally:
        logging.getLogger("openapi_tool").removeHandler(warnings)
