"""Export of spans and metrics over OTLP; imported only if an endpoint is configured, as the import takes 30 MB.

Spans are made once their call has ended, by names of OpenTelemetry's conventions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NamedTuple

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, StatusCode, TraceState

from openapi_tool import __version__
from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.tracing import SpanContext, TraceLink
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import CallFacts
from openapi_tool.telemetry.metrics import ALL, Described, Sample, samples
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.spans import CallSpan, child_of

log = logging.getLogger(__name__)

MAX_QUEUED = 4_096
"""Spans that wait for export; further ones are dropped and counted."""
_BATCH = 512  # spans in one request
_EXPORT_INTERVAL_MS = 1_000  # between two requests while spans come slowly
_MAX_READ_BYTES = 4_096  # of a response's body
_SCOPE = "openapi_tool"
_ATTRIBUTE_OF_ID = {
    "project_id": "commonground.project.id",
    "agent_id": "gen_ai.agent.id",
    "agent_turn_id": "commonground.turn.id",
    "tool_call_id": "gen_ai.tool.call.id",
}

Attributes = dict[str, Any]


class ExportingTracer:
    """Tracer with an exporter; a call is sampled if its parent is, and if its trace id is below `ratio` of the largest.

    All services that sample by this rule choose the same traces. The span has the ids of the traceparent in report and
    doorbell.
    """

    def __init__(self, exporter: SpanExporter, redactor: Redactor, ratio: float = 1.0, instance: str = "") -> None:
        self._masked = redactor.text
        self._provider = TracerProvider(
            sampler=TraceIdRatioBased(ratio), resource=resource(instance), shutdown_on_exit=False
        )
        self._provider.add_span_processor(_Queue(exporter))
        self._tracer = self._provider.get_tracer(_SCOPE, __version__)

    @contextmanager
    def span(
        self, name: str, link: TraceLink, attributes: Mapping[str, str], began: float | None = None
    ) -> Iterator[CallSpan]:
        """Start a child span, at `began` on the monotonic clock; queue it for export when the block is left."""
        if not int(link.parent.flags, 16) & trace.TraceFlags.SAMPLED:
            yield child_of(link)
            return
        ns = _ns_since_epoch()
        state = TraceState.from_header([self._masked(link.tracestate)]) if link.tracestate else None
        span = self._tracer.start_span(
            self._masked(name),
            _context_with_span(_span_context(link.parent, state)),
            SpanKind.CONSUMER,
            # The inbound span, if it is of another trace.
            links=[trace.Link(_span_context(link.linked))] if link.linked else (),
            start_time=ns(time.monotonic() if began is None else began),
        )
        span_id = trace.format_span_id(span.get_span_context().span_id)
        made = CallSpan(SpanContext(link.parent.trace_id, span_id, link.parent.flags), link.tracestate)
        error: Exception | None = None
        try:
            yield made
        except Exception as raised:
            error = raised
            raise
        finally:
            if span.is_recording():
                self._end(span, ns, attributes, made.facts, error)

    def _end(
        self,
        span: trace.Span,
        ns: Callable[[float], int],
        named: Mapping[str, str],
        facts: CallFacts | None,
        error: Exception | None,
    ) -> None:
        """End the span of a call, and make those of its phases."""
        ended = ns(time.monotonic())
        attributes: Attributes = {_ATTRIBUTE_OF_ID.get(name, name): value for name, value in named.items()}
        if facts is not None:
            attributes |= _call_attributes(facts)
        if facts is not None and facts.error_code:
            attributes["error.type"] = facts.error_code
        elif error is not None:
            attributes["error.type"] = type(error).__name__
        if error is not None:  # without its traceback
            event = {"exception.type": type(error).__name__, "exception.message": self._masked(str(error))}
            span.add_event("exception", event, ended)
        self._set(span, attributes)
        span.end(ended)
        if facts is None:
            return
        parent = _context_with_span(span.get_span_context())
        for child in _children(facts):
            phase = self._tracer.start_span(child.name, parent, child.kind, start_time=ns(child.start))
            self._set(phase, child.attributes)
            phase.end(ended if child.end is None else ns(child.end))

    def _set(self, span: trace.Span, attributes: Attributes) -> None:
        """Set attributes, masked, and the status."""
        for name, value in attributes.items():
            span.set_attribute(name, self._masked(value) if isinstance(value, str) else value)
        if "error.type" in attributes:
            span.set_status(StatusCode.ERROR)

    def shutdown(self) -> None:
        """Export the remaining spans; may block for as long as the collector does."""
        self._provider.shutdown()


class _Queue(BatchSpanProcessor):
    """The SDK's queue, whose daemon thread exports; counts the spans that are not exported."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exported = _CountingExporter(exporter)
        self._ended = 0
        super().__init__(self._exported, MAX_QUEUED, _EXPORT_INTERVAL_MS, min(_BATCH, MAX_QUEUED))

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or drop it."""
        if self._ended - self._exported.spans >= MAX_QUEUED:
            metrics.SPANS_DROPPED.inc()
            return
        self._ended += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans; count those that the collector does not take."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.spans += len(spans)
            if result is not SpanExportResult.SUCCESS:
                metrics.SPANS_DROPPED.inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self._exporter.shutdown()


def _ns_since_epoch() -> Callable[[float], int]:
    """Return a function that converts a time on the monotonic clock, in seconds, to nanoseconds since the epoch."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda monotonic: offset + round(monotonic * 1e9)


def _context_with_span(span_context: trace.SpanContext) -> Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(span_context), Context())


def _span_context(span: SpanContext, state: TraceState | None = None) -> trace.SpanContext:
    flags = trace.TraceFlags(int(span.flags, 16))
    return trace.SpanContext(int(span.trace_id, 16), int(span.span_id, 16), True, flags, state)  # noqa: FBT003 - remote


def _call_attributes(facts: CallFacts) -> Attributes:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": facts.function_name,
        "gen_ai.tool.type": "function",
        "openapi_tool.protocol": facts.protocol,
        "openapi_tool.built_in": facts.tool,
        "openapi_tool.status": facts.status,
        "openapi_tool.tokens": facts.tokens,
        "openapi_tool.requests": len(facts.attempts),
        "openapi_tool.cached": facts.cached,
        "openapi_tool.truncated": facts.truncated,
        "openapi_tool.delivery_attempt": facts.delivery_attempt,
    }


class _Child(NamedTuple):
    """Phase of a call; `end` is None if it did not end before the call."""

    name: str
    kind: SpanKind
    start: float
    end: float | None
    attributes: Attributes


def _children(facts: CallFacts) -> Iterator[_Child]:
    received = _messaging_attributes("receive") | {
        "messaging.destination.template": "cg.{version}.{project}.{channel}.cmd.tool.{target}.{suffix}"
    }
    yield _Child("queue", SpanKind.CONSUMER, facts.began - facts.age_s, facts.began, received)
    yield _Child("load", SpanKind.CLIENT, facts.began, facts.loaded, {"db.system.name": "postgresql"})
    for begin, end in facts.permit_waits:
        yield _Child("wait for permit", SpanKind.INTERNAL, begin, end, {})
    yield from map(_attempt_span, facts.attempts)
    if facts.commit is not None:
        yield _Child("commit", SpanKind.CLIENT, *facts.commit, {"db.system.name": "postgresql"})
    if facts.doorbell is not None:
        sent = _messaging_attributes("send") | {"messaging.destination.name": facts.doorbell_subject}
        yield _Child("send wakeup", SpanKind.PRODUCER, *facts.doorbell, sent)


def _messaging_attributes(operation: str) -> Attributes:
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _attempt_span(attempt: UpstreamAttempt) -> _Child:
    attributes = {
        "http.request.method": attempt.method,
        "server.address": attempt.host,
        "server.port": 443,
        "url.scheme": "https",
        "http.response.status_code": attempt.http_status,
        "http.request.resend_count": attempt.resends or None,
        "error.type": attempt.error_code if attempt.seconds is not None else "canceled",
    }
    known = {name: value for name, value in attributes.items() if value is not None}
    end = None if attempt.seconds is None else attempt.began + attempt.seconds
    return _Child(attempt.method, SpanKind.CLIENT, attempt.began, end, known)


def open_tracer(endpoint: str, redactor: Redactor, ratio: float, instance: str) -> ExportingTracer:
    """Return a tracer that exports to the full traces URL of an OTLP/HTTP collector."""
    return ExportingTracer(OTLPSpanExporter(endpoint=endpoint, session=CollectorSession()), redactor, ratio, instance)


def resource(instance: str) -> Resource:
    """Return the attributes of this process."""
    attributes = {"service.name": "openapi-tool", "service.version": __version__}
    if instance:
        attributes["service.instance.id"] = instance
    return Resource.create(attributes)


class CollectorSession(requests.Session):
    """Session without redirects, proxies and .netrc, which keeps only the head of a response.

    A redirect becomes an error status: the exporter would take it for a success, although nothing was stored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False

    def request(self, method: str, url: str, *args: Any, **options: Any) -> requests.Response:  # type: ignore[override]
        """Send a request. Raises requests.RequestException."""
        options |= {"allow_redirects": False, "stream": True}
        received = super().request(method, url, *args, **options)
        head = requests.Response()
        head.status_code = received.status_code
        head.reason = received.reason
        head.headers = received.headers
        if received.is_redirect:
            head.status_code = HTTPStatus.MISDIRECTED_REQUEST
            head.reason = "the collector redirects"
        length = received.headers.get("Content-Length", "")
        if length.isdigit() and int(length) <= _MAX_READ_BYTES:
            received.content  # noqa: B018 - read the body, so that the next export can reuse the connection
        received.close()
        return head


_ATTRIBUTE_OF_LABEL = {
    "tool": "openapi_tool.built_in",
    "error_code": "error.type",
    "project": "commonground.project.id",
    "host": "server.address",
}
"""Names of labels by OpenTelemetry's conventions."""


class PeriodicExport:
    """Exports all metrics every `every_s` seconds in its own thread; no retries, since values are totals."""

    def __init__(self, exporter: MetricExporter, every_s: float, instance: str) -> None:
        self._exporter = exporter
        self._every_s = every_s
        self._since_ns = time.time_ns()
        self._resource = resource(instance)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics export", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        stopping = failed = False
        while not stopping:
            stopping = self._stop.wait(self._every_s)
            try:
                self._exporter.export(self.collected())
                failed = False
            except Exception:  # a defect; without this thread no metric would be exported any more
                if not failed:
                    log.exception("internal error in the export of metrics", extra={"action": "metrics.not_exported"})
                failed = True

    def collected(self) -> MetricsData:
        """Return the current values."""
        now = time.time_ns()
        converted = [made for described in ALL if (made := _converted(described, self._since_ns, now)) is not None]
        scope = ScopeMetrics(InstrumentationScope(_SCOPE, __version__), converted, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def shutdown(self) -> None:
        """Export once more; may block for as long as the collector does."""
        self._stop.set()
        self._thread.join()
        self._exporter.shutdown()


def _converted(described: Described, since_ns: int, now_ns: int) -> Metric | None:
    """Return a metric in OpenTelemetry's form, None if it has no value yet."""
    found = list(samples(described.instrument))
    if not found:
        return None
    data: Histogram | Sum | Gauge
    if described.kind == "histogram":
        data = Histogram(_distributions(found, since_ns, now_ns), AggregationTemporality.CUMULATIVE)
    else:
        points = [NumberDataPoint(_attributes_of_labels(one.labels), since_ns, now_ns, one.value) for one in found]
        counts = described.kind == "counter"
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(points)
    unit = "s" if described.name.endswith("_seconds") else ""
    return Metric(described.name, described.text, unit, data)


def _distributions(found: list[Sample], since_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    """Return a point for each combination of labels; its buckets are consecutive, and each counts those below, too."""
    points: list[HistogramDataPoint] = []
    bounds: list[float] = []
    totals = [0.0]
    nan = float("nan")  # minimum and maximum are not recorded
    for sample in found:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            totals.append(sample.value)
        elif sample.name.endswith("_sum"):
            total = int(totals[-1])
            counts = [int(upper - lower) for lower, upper in pairwise(totals)]
            attributes = _attributes_of_labels(sample.labels)
            points.append(
                HistogramDataPoint(attributes, since_ns, now_ns, total, sample.value, counts, bounds[:-1], nan, nan)
            )
            bounds, totals = [], [0.0]
    return points


def _attributes_of_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {_ATTRIBUTE_OF_LABEL.get(name, name): value for name, value in labels.items()}


def open_exporter(endpoint: str, every_s: float, instance: str) -> PeriodicExport:
    """Return an exporter to the full metrics URL of an OTLP/HTTP collector."""
    return PeriodicExport(OTLPMetricExporter(endpoint=endpoint, session=CollectorSession()), every_s, instance)
