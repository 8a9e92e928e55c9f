"""Export of spans to an OTLP collector: one for each call, with child spans for its phases.

The pipeline of a call opens the span (`ExportingTracer.span`). The child spans are made when the call has ended, from
the times in its `CallFacts`. Names are those of OpenTelemetry's conventions. Without an endpoint in the settings,
`spans.WireTracer` takes the place of the tracer, and this module is not imported: the SDK takes 30 MB of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, TraceState

from openapi_tool import __version__
from openapi_tool.protocol.attempts import UpstreamAttempt, requests_sent
from openapi_tool.protocol.tracing import SpanContext, TraceLink
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import CallFacts
from openapi_tool.telemetry.otlp_collector import SCOPE, CollectorSession, resource
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.spans import CallSpan, child_of

MAX_QUEUED = 4_096
"""Spans that wait for export; further ones are dropped and counted."""
_BATCH = 512  # spans in one request
_EXPORT_INTERVAL_MS = 1_000  # between two requests while spans come slowly
_ATTRIBUTE_OF_ID = {
    "project_id": "commonground.project.id",
    "agent_id": "gen_ai.agent.id",
    "agent_turn_id": "commonground.turn.id",
    "tool_call_id": "gen_ai.tool.call.id",
}

Attributes = dict[str, Any]


def open_tracer(endpoint: str, redactor: Redactor, ratio: float, instance: str) -> ExportingTracer:
    """Return a tracer that exports to a collector; `endpoint` is its full URL for traces."""
    return ExportingTracer(OTLPSpanExporter(endpoint=endpoint, session=CollectorSession()), redactor, ratio, instance)


class ExportingTracer:
    """Exports the spans of sampled calls.

    A call is sampled if the sender's span is, and if the trace id is among the lowest `ratio` of all ids (0.1: the
    lowest tenth of them). All services that sample by this rule choose the same traces.
    """

    def __init__(self, exporter: SpanExporter, redactor: Redactor, ratio: float = 1.0, instance: str = "") -> None:
        self._masked = redactor.text
        self._provider = TracerProvider(
            sampler=TraceIdRatioBased(ratio), resource=resource(instance), shutdown_on_exit=False
        )
        self._provider.add_span_processor(_BoundedQueue(exporter))
        self._tracer = self._provider.get_tracer(SCOPE, __version__)

    @contextmanager
    def span(
        self, name: str, link: TraceLink, attributes: Mapping[str, str], began: float | None = None
    ) -> Iterator[CallSpan]:
        """Start the span of a call, at `began` on the monotonic clock; queue it for export when the block is left.

        Report and doorbell pass on the yielded span context. The block sets the `facts` of what is yielded once it
        knows them.
        """
        parent = link.parent
        if not int(parent.flags, 16) & trace.TraceFlags.SAMPLED:
            yield child_of(link)
            return
        to_epoch_ns = _epoch_converter()
        tracestate = TraceState.from_header([self._masked(link.tracestate)]) if link.tracestate else None
        span = self._tracer.start_span(
            self._masked(name),
            _context_with_parent(_sdk_span_context(parent, tracestate)),
            SpanKind.CONSUMER,
            links=[trace.Link(_sdk_span_context(link.linked))] if link.linked else (),
            start_time=to_epoch_ns(time.monotonic() if began is None else began),
        )
        span_id = trace.format_span_id(span.get_span_context().span_id)
        call_span = CallSpan(SpanContext(parent.trace_id, span_id, parent.flags), link.tracestate)
        error: Exception | None = None
        try:
            yield call_span
        except Exception as raised:
            error = raised
            raise
        finally:
            if span.is_recording():  # not if the trace id is beyond the ratio
                self._end(span, to_epoch_ns, attributes, call_span.facts, error)

    def _end(
        self,
        span: trace.Span,
        to_epoch_ns: Callable[[float], int],
        ids: Mapping[str, str],
        facts: CallFacts | None,
        error: Exception | None,
    ) -> None:
        """End the span of a call, and make those of its phases."""
        ended_ns = to_epoch_ns(time.monotonic())
        attributes: Attributes = {_ATTRIBUTE_OF_ID.get(name, name): value for name, value in ids.items()}
        if facts is not None:
            attributes |= _call_attributes(facts)
        if facts is not None and facts.error_code:
            attributes["error.type"] = facts.error_code
        elif error is not None:
            attributes["error.type"] = type(error).__name__
        if error is not None:  # without its traceback
            event = {"exception.type": type(error).__name__, "exception.message": self._masked(str(error))}
            span.add_event("exception", event, ended_ns)
        self._set_attributes(span, attributes)
        span.end(ended_ns)
        if facts is not None:
            self._make_phase_spans(span, to_epoch_ns, facts, ended_ns)

    def _make_phase_spans(
        self, span: trace.Span, to_epoch_ns: Callable[[float], int], facts: CallFacts, call_ended_ns: int
    ) -> None:
        parent = _context_with_parent(span.get_span_context())
        for phase in _phases(facts):
            child = self._tracer.start_span(phase.name, parent, phase.kind, start_time=to_epoch_ns(phase.start))
            self._set_attributes(child, phase.attributes)
            child.end(call_ended_ns if phase.end is None else to_epoch_ns(phase.end))

    def _set_attributes(self, span: trace.Span, attributes: Attributes) -> None:
        """Set attributes, masked, and with `error.type` the status, too."""
        for name, value in attributes.items():
            span.set_attribute(name, self._masked(value) if isinstance(value, str) else value)
        if "error.type" in attributes:
            span.set_status(StatusCode.ERROR)

    def shutdown(self) -> None:
        """Export the remaining spans; may block for as long as the collector does."""
        self._provider.shutdown()


def _epoch_converter() -> Callable[[float], int]:
    """Return a function that converts a time on the monotonic clock, in seconds, to nanoseconds since the epoch.

    Each call uses one function for all its spans: were the wall clock set meanwhile, they would not fit together.
    """
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda monotonic: offset_ns + round(monotonic * 1e9)


def _context_with_parent(span_context: trace.SpanContext) -> Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(span_context), Context())


def _sdk_span_context(span: SpanContext, tracestate: TraceState | None = None) -> trace.SpanContext:
    return trace.SpanContext(
        trace_id=int(span.trace_id, 16),
        span_id=int(span.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(span.flags, 16)),
        trace_state=tracestate,
    )


def _call_attributes(facts: CallFacts) -> Attributes:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": facts.function_name,
        "gen_ai.tool.type": "function",
        "openapi_tool.protocol": facts.protocol,
        "openapi_tool.built_in": facts.tool,
        "openapi_tool.status": facts.status,
        "openapi_tool.tokens": facts.tokens,
        "openapi_tool.requests": requests_sent(facts.attempts),
        "openapi_tool.cached": facts.cached,
        "openapi_tool.truncated": facts.truncated,
        "openapi_tool.delivery_attempt": facts.delivery_attempt,
    }


class _Phase(NamedTuple):
    """Part of a call that becomes a child span; `end` is None if it did not end before the call.

    Times are in seconds on the monotonic clock.
    """

    name: str
    kind: SpanKind
    start: float
    end: float | None
    attributes: Attributes


def _phases(facts: CallFacts) -> Iterator[_Phase]:
    received = _messaging_attributes("receive") | {
        "messaging.destination.template": "cg.{version}.{project}.{channel}.cmd.tool.{target}.{suffix}"
    }
    yield _Phase("queue", SpanKind.CONSUMER, facts.began - facts.age_s, facts.began, received)
    yield _Phase("load", SpanKind.CLIENT, facts.began, facts.loaded, {"db.system.name": "postgresql"})
    for begin, end in facts.permit_waits:
        yield _Phase("wait for permit", SpanKind.INTERNAL, begin, end, {})
    for attempt in facts.attempts:
        yield _attempt_phase(attempt)
    if facts.commit is not None:
        begin, end = facts.commit
        yield _Phase("commit", SpanKind.CLIENT, begin, end, {"db.system.name": "postgresql"})
    if facts.doorbell is not None:
        begin, end = facts.doorbell
        sent = _messaging_attributes("send") | {"messaging.destination.name": facts.doorbell_subject}
        yield _Phase("send wakeup", SpanKind.PRODUCER, begin, end, sent)


def _messaging_attributes(operation: str) -> Attributes:
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _attempt_phase(attempt: UpstreamAttempt) -> _Phase:
    """Return the phase of one upstream request."""
    attributes: Attributes = {
        "http.request.method": attempt.method,
        "server.address": attempt.host,
        "server.port": 443,
        "url.scheme": "https",
    }
    if attempt.http_status is not None:
        attributes["http.response.status_code"] = attempt.http_status
    if attempt.resends:
        attributes["http.request.resend_count"] = attempt.resends
    end = None
    if attempt.seconds is None:  # the call ended first
        attributes["error.type"] = "canceled"
    else:
        end = attempt.began + attempt.seconds
        if attempt.error_code is not None:
            attributes["error.type"] = attempt.error_code
    return _Phase(attempt.method, SpanKind.CLIENT, attempt.began, end, attributes)


class _BoundedQueue(BatchSpanProcessor):
    """The SDK's queue, whose daemon thread exports. Drops spans beyond MAX_QUEUED and counts them.

    The SDK's own limit does not include the spans that its thread is exporting, and none of our metrics would show what
    it drops.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._counting = _CountingExporter(exporter)
        self._queued = 0
        super().__init__(self._counting, MAX_QUEUED, _EXPORT_INTERVAL_MS, min(_BATCH, MAX_QUEUED))

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or drop it."""
        if self._queued - self._counting.spans_left_queue >= MAX_QUEUED:
            metrics.SPANS_DROPPED.inc()
            return
        self._queued += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    """Counts the spans that it exports, and those that the collector does not take."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.spans_left_queue = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.spans_left_queue += len(spans)
            if result is not SpanExportResult.SUCCESS:
                metrics.SPANS_DROPPED.inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self._exporter.shutdown()
