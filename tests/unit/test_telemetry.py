from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from openapi_tool.protocol.trace import SpanContext, TraceLink
from openapi_tool.telemetry.logs import ConsoleFormatter, JsonFormatter, configure_logging, without_details
from openapi_tool.telemetry.otlp import ExportingTracer
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.traces import WireTracer
from tests.requirements import requirement
from tests.support import TRACE_ID

SECRET = "a-secret-of-the-test"
REDACTOR = Redactor([SECRET, "a-secret"])
PARENT = SpanContext(TRACE_ID, "b7ad6b7169203331", "01")


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
def test_a_secret_is_taken_out_of_message_arguments_fields_and_traceback(logger: str) -> None:
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
def test_whatever_looks_like_a_key_of_jina_is_taken_out() -> None:
    shape = "jina" + "_" + "0" * 20
    assert Redactor().text(f"x {shape} y") == "x [redacted] y"
    assert Redactor().value({shape: (shape, 7)}) == {"[redacted]": ["[redacted]", 7]}


@pytest.mark.parametrize("name", ["tool_jina_openapi_cmd_v1r4", "jina_search_images", "jina_reader_of_long_pages_2"])
def test_names_that_only_begin_like_a_key_stay(name: str) -> None:
    assert Redactor().text(f"tool {name} ran") == f"tool {name} ran"


@pytest.mark.parametrize("value", ["re\udcff", 10**30, {"a": ["\ud800"]}])
@requirement("terminal.text")
def test_a_value_that_json_libraries_differ_on_is_logged_all_the_same(value: Any) -> None:
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
def test_lines_of_libraries_lose_queries_authorization_and_passwords(line: str) -> None:
    made = record("%s", line)
    for formatter in (JsonFormatter(Redactor()), ConsoleFormatter(Redactor())):
        assert "the-detail" not in formatter.format(made)
        assert line[:7] in formatter.format(made) or line.startswith(("{", "[", '"'))


def test_what_is_no_detail_stays_in_the_lines_of_libraries() -> None:
    plain = "connected to https://s.jina.ai:443/search in 3 ms, passed: 7 (signal 15), what? GET /metrics"
    assert without_details(plain) == plain


def test_long_texts_of_libraries_are_cleaned_in_no_time() -> None:
    started = time.monotonic()
    for text in ("a" * 200_000, "a:" * 100_000, "https://" + "a@" * 50_000, "GET " * 50_000, "pass" * 50_000):
        without_details(text)
    assert time.monotonic() - started < 2


@requirement("loop.answers", "secrets.output")
def test_a_library_message_is_cut_and_no_secret_with_it() -> None:
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
def test_the_exported_span_is_the_one_on_the_wire() -> None:
    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, REDACTOR)
    foreign = SpanContext("a" * 32, "b" * 16)
    with tracer.span("execute_tool t", TraceLink(PARENT, None, foreign), {"tool_call_id": f"c {SECRET}"}) as span:
        span.outcome("failed", "bad_request")
    tracer.shutdown()
    (exported,) = exporter.get_finished_spans()
    assert exported.context is not None
    assert f"{exported.context.span_id:016x}" == span.context.span_id
    assert f"{exported.context.trace_id:032x}" == TRACE_ID
    assert exported.parent is not None
    assert f"{exported.parent.span_id:016x}" == PARENT.span_id
    assert [f"{link.context.trace_id:032x}" for link in exported.links] == ["a" * 32]
    assert dict(exported.attributes or {}) == {
        "gen_ai.tool.call.id": "c [redacted]",
        "openapi_tool.status": "failed",
        "error.type": "bad_request",
    }


@requirement("answer.trace")
def test_a_trace_that_is_not_sampled_is_not_exported_and_not_looked_through_but_passed_on() -> None:
    class Untouched(Redactor):
        def text(self, text: str) -> str:
            raise AssertionError(text)

    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, Untouched())
    parent = SpanContext(TRACE_ID, "b" * 16, "00")
    with tracer.span("execute_tool t", TraceLink(parent, "v=1", None), {"tool_call_id": "c"}) as span:
        span.outcome("success", None)
    tracer.shutdown()
    assert exporter.get_finished_spans() == ()
    assert (span.context.trace_id, span.context.flags, span.tracestate) == (TRACE_ID, "00", "v=1")
    assert span.context.span_id not in (parent.span_id, "0" * 16)


@requirement("secrets.output")
def test_a_span_shows_no_secret_in_name_attributes_events_and_status() -> None:
    exporter = InMemorySpanExporter()
    tracer = ExportingTracer(exporter, REDACTOR)
    link = TraceLink(PARENT, None, None)
    with suppress(ValueError), tracer.span(f"run {SECRET}", link, {"tool_call_id": SECRET}) as span:
        span.attributes["more"] = SECRET
        raise ValueError(SECRET)
    tracer.shutdown()
    (exported,) = exporter.get_finished_spans()
    assert SECRET not in exported.to_json()
    assert exported.name == "run [redacted]"
    assert exported.status.status_code.name == "ERROR"
    (event,) = exported.events
    assert dict(event.attributes or {}) == {"exception.type": "ValueError", "exception.message": "[redacted]"}
