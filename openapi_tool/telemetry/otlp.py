"""Export of spans and metrics over OTLP; imported only if an endpoint is configured, as the import takes 30 MB.

A call only puts its record into a bounded queue. A thread makes and exports the spans: on the event loop the seven
spans of a call would take a fifth of its CPU time. Names follow OpenTelemetry's conventions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, NamedTuple

import requests
from opentelemetry import trace
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
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceState

from openapi_tool import __version__
from openapi_tool.protocol.attempts import Attempt
from openapi_tool.protocol.tracing import SpanContext, TraceLink, new_span_id
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import CallFacts
from openapi_tool.telemetry.metrics import ALL, Distribution
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.spans import CallSpan, child_of

MAX_QUEUED = 2_048
"""Calls that wait for export; further ones are dropped and counted."""
_BATCH = 64
_EXPORT_INTERVAL_S = 1.0
_MAX_READ_BYTES = 4_096  # of a response's body
_ATTRIBUTE_OF_ID = {
    "project_id": "commonground.project.id",
    "agent_id": "gen_ai.agent.id",
    "agent_turn_id": "commonground.turn.id",
    "tool_call_id": "gen_ai.tool.call.id",
}
_SCOPE = InstrumentationScope("openapi_tool", __version__)

Attributes = dict[str, Any]


class _EndedCall(NamedTuple):
    """Ended span of a call; times on the monotonic clock in seconds, which `ns` converts to time since the epoch."""

    name: str
    link: TraceLink
    attributes: Mapping[str, str]
    span: CallSpan
    start: float
    end: float
    offset_ns: int
    error: tuple[str, str] | None

    def ns(self, seconds: float) -> int:
        return self.offset_ns + round(seconds * 1e9)


class ExportingTracer:
    """Tracer with an exporter; a call is sampled if its parent is, and if its trace id is below `ratio` of the largest.

    All services that sample by this rule choose the same traces. The span has the ids of the traceparent in report and
    doorbell.
    """

    def __init__(self, exporter: SpanExporter, redactor: Redactor, ratio: float = 1.0, instance: str = "") -> None:
        self._id_bound = int(ratio * 2**64)  # of the lowest bits, as for OpenTelemetry's TraceIdRatioBased
        self._builder = _Builder(redactor, instance)
        self._exporter = exporter
        self._ended: deque[_EndedCall] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()

    @contextmanager
    def span(self, name: str, link: TraceLink, attributes: Mapping[str, str]) -> Iterator[CallSpan]:
        """Start a child span; queue it for export when the block is left."""
        span = child_of(link)
        is_sampled = int(link.parent.flags, 16) & 1 and int(link.parent.trace_id[16:], 16) < self._id_bound
        if not is_sampled:
            yield span
            return
        began, error = time.monotonic(), None
        try:
            yield span
        except Exception as raised:
            error = type(raised).__name__, str(raised)
            raise
        finally:
            offset_ns = time.time_ns() - time.monotonic_ns()
            self._put(_EndedCall(name, link, attributes, span, began, time.monotonic(), offset_ns, error))

    def _put(self, ended: _EndedCall) -> None:
        if len(self._ended) >= MAX_QUEUED:
            metrics.SPANS_DROPPED.inc()
            return
        self._ended.append(ended)
        if len(self._ended) == _BATCH:
            self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(_EXPORT_INTERVAL_S)
            self._wake.clear()
            self._export_all()

    def _export_all(self) -> None:
        while batch := [self._ended.popleft() for _ in range(min(_BATCH, len(self._ended)))]:
            try:
                result = self._exporter.export([span for ended in batch for span in self._builder.spans(ended)])
            except Exception:  # noqa: BLE001 - a library's defect must not end the thread
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                metrics.SPANS_DROPPED.inc(len(batch))

    def shutdown(self) -> None:
        """Export the remaining spans; may block for as long as the collector does."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._export_all()
        self._exporter.shutdown()


class _Builder:
    def __init__(self, redactor: Redactor, instance: str) -> None:
        self._masked = redactor.text
        self._resource = resource(instance)

    def spans(self, ended: _EndedCall) -> Iterator[ReadableSpan]:
        link, facts = ended.link, ended.span.facts
        state = TraceState.from_header([self._masked(link.tracestate)]) if link.tracestate else None
        parent = _context(link.parent, state, is_remote=True)
        context = _context(ended.span.context, state)
        attributes = self._attributes(ended, facts)
        yield ReadableSpan(
            name=self._masked(ended.name),
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=self._events(ended),
            # The inbound span, if it is of another trace.
            links=[trace.Link(_context(link.linked, is_remote=True))] if link.linked else (),
            kind=SpanKind.CONSUMER,
            status=_status(attributes),
            # The call begins with the arrival of its command in the stream.
            start_time=ended.ns(ended.start if facts is None else facts.began - facts.age_s),
            end_time=ended.ns(ended.end),
            instrumentation_scope=_SCOPE,
        )
        for child in _children(facts) if facts is not None else ():
            yield ReadableSpan(
                name=child.name,
                context=_context(SpanContext(link.parent.trace_id, new_span_id(), link.parent.flags), state),
                parent=context,
                resource=self._resource,
                attributes={
                    name: self._masked(value) if isinstance(value, str) else value
                    for name, value in child.attributes.items()
                },
                kind=child.kind,
                status=_status(child.attributes),
                start_time=ended.ns(child.start),
                end_time=ended.ns(ended.end if child.end is None else child.end),
                instrumentation_scope=_SCOPE,
            )

    def _attributes(self, ended: _EndedCall, facts: CallFacts | None) -> Attributes:
        named: Attributes = {
            _ATTRIBUTE_OF_ID.get(name, name): self._masked(value) for name, value in ended.attributes.items()
        }
        if error_type := (facts and facts.error_code) or (ended.error and ended.error[0]):
            named["error.type"] = error_type
        if facts is None:
            return named
        return named | {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self._masked(facts.function_name),
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

    def _events(self, ended: _EndedCall) -> list[Event]:
        """Return an exception event, masked and without traceback."""
        if ended.error is None:
            return []
        kind, message = ended.error
        attributes = {"exception.type": kind, "exception.message": self._masked(message)}
        return [Event("exception", attributes, ended.ns(ended.end))]


class _Child(NamedTuple):
    """Phase of a call; `end` is None if it did not end before the call."""

    name: str
    kind: SpanKind
    start: float
    end: float | None
    attributes: Attributes


def _children(facts: CallFacts) -> Iterator[_Child]:
    received = _messaging("receive") | {
        "messaging.destination.template": "cg.{version}.{project}.{channel}.cmd.tool.{target}.{suffix}"
    }
    yield _Child("queue", SpanKind.CONSUMER, facts.began - facts.age_s, facts.began, received)
    yield _Child("load", SpanKind.CLIENT, facts.began, facts.loaded, {"db.system.name": "postgresql"})
    for begin, end in facts.permit_waits:
        yield _Child("wait for permit", SpanKind.INTERNAL, begin, end, {})
    yield from map(_attempt, facts.attempts)
    if facts.commit is not None:
        yield _Child("commit", SpanKind.CLIENT, *facts.commit, {"db.system.name": "postgresql"})
    if facts.wakeup is not None:
        sent = _messaging("send") | {"messaging.destination.name": facts.wakeup_subject}
        yield _Child("send wakeup", SpanKind.PRODUCER, *facts.wakeup, sent)


def _messaging(operation: str) -> Attributes:
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _attempt(attempt: Attempt) -> _Child:
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


def _status(attributes: Attributes) -> Status:
    return Status(StatusCode.ERROR if "error.type" in attributes else StatusCode.UNSET)


def open_tracer(endpoint: str, redactor: Redactor, ratio: float, instance: str) -> ExportingTracer:
    """Return a tracer that exports to the full traces URL of an OTLP/HTTP collector."""
    return ExportingTracer(OTLPSpanExporter(endpoint=endpoint, session=CollectorSession()), redactor, ratio, instance)


def resource(instance: str) -> Resource:
    """Return the attributes of this process."""
    service = {"service.name": "openapi-tool", "service.version": __version__}
    return Resource.create(service | ({"service.instance.id": instance} if instance else {}))


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
        head.status_code, head.reason, head.headers = received.status_code, received.reason, received.headers
        if received.is_redirect:
            head.status_code, head.reason = HTTPStatus.MISDIRECTED_REQUEST, "the collector redirects"
        length = received.headers.get("Content-Length", "")
        if length.isdigit() and int(length) <= _MAX_READ_BYTES:
            received.content  # noqa: B018 - read the body, so that the next export can reuse the connection
        received.close()
        return head


def _context(span: SpanContext, state: TraceState | None = None, *, is_remote: bool = False) -> trace.SpanContext:
    flags = trace.TraceFlags(int(span.flags, 16))
    return trace.SpanContext(int(span.trace_id, 16), int(span.span_id, 16), is_remote, flags, state)


_ATTRIBUTES = {
    "tool": "openapi_tool.built_in",
    "error_code": "error.type",
    "project": "commonground.project.id",
    "host": "server.address",
}
"""Names of labels in OpenTelemetry's conventions."""


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
        stopping = False
        while not stopping:
            stopping = self._stop.wait(self._every_s)
            self._exporter.export(self.collected())

    def collected(self) -> MetricsData:
        """Return the current values."""
        now = time.time_ns()
        converted = [self._converted(metric, now) for metric in ALL if any(metric.children())]
        scope = ScopeMetrics(InstrumentationScope("openapi_tool", __version__), converted, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _converted(self, metric: metrics.Metric, now: int) -> Metric:
        unit = "s" if metric.name.endswith("_seconds") else ""
        data: Histogram | Sum | Gauge
        if isinstance(metric, metrics.Histogram):
            points = [self._distribution(labels, child, now) for labels, child in metric.children()]
            data = Histogram(points, AggregationTemporality.CUMULATIVE)
        else:
            numbers = [
                NumberDataPoint(_attributes(labels), self._since_ns, now, float(child.number))
                for labels, child in metric.children()
            ]
            counts = isinstance(metric, metrics.Counter)
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(numbers)
        return Metric(metric.name, metric.text, unit, data)

    def _distribution(self, labels: Mapping[str, str], child: Distribution, now: int) -> HistogramDataPoint:
        counts = list(child.counts)
        attributes, nan = _attributes(labels), float("nan")  # minimum and maximum are not recorded
        return HistogramDataPoint(
            attributes, self._since_ns, now, sum(counts), child.total, counts, child.bounds, min=nan, max=nan
        )

    def shutdown(self) -> None:
        """Export once more; may block for as long as the collector does."""
        self._stop.set()
        self._thread.join()
        self._exporter.shutdown()


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {_ATTRIBUTES.get(name, name): value for name, value in labels.items()}


def open_exporter(endpoint: str, every_s: float, instance: str) -> PeriodicExport:
    """Return an exporter to the full metrics URL of an OTLP/HTTP collector."""
    return PeriodicExport(OTLPMetricExporter(endpoint=endpoint, session=CollectorSession()), every_s, instance)
