from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from openapi_tool.protocol.trace import SpanContext, TraceLink
from openapi_tool.telemetry.logs import ConsoleFormatter, JsonFormatter, configure_logging
from openapi_tool.telemetry.otlp import ExportingTracer
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.traces import WireTracer
from tests.promises import requirement
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


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.INFO, __file__, 1, message, args, None)
    vars(made).update(extra)
    return made


@requirement("secrets.output")
def test_a_secret_is_taken_out_of_message_arguments_fields_and_traceback() -> None:
    made = record("key %s", SECRET, action="x", nested={"k": [SECRET]}, **{SECRET: 1})
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


def test_logging_goes_to_standard_error(_logging: None, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: PT019
    configure_logging("info", "json", REDACTOR)
    logging.getLogger("openapi_tool").info("to %s", SECRET)
    logging.getLogger("openapi_tool").debug("not shown")
    logging.getLogger("httpx").info("not shown")
    written = capsys.readouterr()
    assert written.out == ""
    assert [json.loads(line)["message"] for line in written.err.splitlines()] == ["to [redacted]"]


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
