"""Export of spans over OTLP; imported only if an endpoint is configured, because the import takes 30 MB.

Names follow OpenTelemetry's generative-AI conventions (in development), so they stay in this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import requests
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from openapi_tool import __version__
from openapi_tool.protocol.trace import SpanContext, TraceLink
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.traces import CallSpan

_ATTRIBUTES = {
    "project_id": "commonground.project.id",
    "agent_id": "gen_ai.agent.id",
    "agent_turn_id": "commonground.turn.id",
    "tool_call_id": "gen_ai.tool.call.id",
}


class ExportingTracer:
    """Tracer with an exporter; the exported span has the same ids as the traceparent that is sent."""

    def __init__(self, exporter: SpanExporter, redactor: Redactor) -> None:
        self._redactor = redactor
        resource = Resource.create({"service.name": "openapi-tool", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("openapi_tool", __version__)

    @contextmanager
    def span(self, name: str, link: TraceLink, attributes: Mapping[str, str]) -> Iterator[CallSpan]:
        """Start a child span of the link's parent; end it when the block is left."""
        links = [trace.Link(_otel_context(link.link))] if link.link else []
        parent = trace.set_span_in_context(trace.NonRecordingSpan(_otel_context(link.parent)))
        exported = self._tracer.start_span(name.partition(" ")[0], parent, trace.SpanKind.CONSUMER, links=links)
        if exported.is_recording():  # masking costs time, which a span that is not sampled need not take
            exported.update_name(self._redactor.text(name))
            exported.set_attributes(self._named(attributes))
        span_id = trace.format_span_id(exported.get_span_context().span_id)
        span = CallSpan(SpanContext(link.parent.trace_id, span_id, link.parent.flags), link.tracestate)
        try:
            yield span
        except Exception as error:
            self._record(exported, error)
            raise
        finally:
            self._end(exported, span)

    def _record(self, exported: trace.Span, error: Exception) -> None:
        """Record an exception like OpenTelemetry does, but redacted and without the traceback."""
        exported.set_status(trace.StatusCode.ERROR)
        about = {"exception.type": type(error).__name__, "exception.message": self._redactor.text(str(error))}
        exported.add_event("exception", about)

    def _end(self, exported: trace.Span, span: CallSpan) -> None:
        if exported.is_recording():
            exported.set_attributes({key: self._redactor.text(value) for key, value in span.attributes.items()})
        if "error.type" in span.attributes:
            exported.set_status(trace.StatusCode.ERROR)
        exported.end()

    def _named(self, attributes: Mapping[str, str]) -> dict[str, str]:
        return {_ATTRIBUTES.get(name, name): self._redactor.text(value) for name, value in attributes.items()}

    def shutdown(self) -> None:
        """Export the remaining spans and stop."""
        self._provider.shutdown()


def open_tracer(endpoint: str, redactor: Redactor) -> ExportingTracer:
    """Return a tracer that exports to `endpoint`: the full traces URL of an OTLP/HTTP collector."""
    session = requests.Session()
    session.trust_env = False  # no proxies and no .netrc of the environment
    return ExportingTracer(OTLPSpanExporter(endpoint=endpoint, session=session), redactor)


def _otel_context(span: SpanContext) -> trace.SpanContext:
    return trace.SpanContext(
        trace_id=int(span.trace_id, 16),
        span_id=int(span.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(span.flags, 16)),
    )
