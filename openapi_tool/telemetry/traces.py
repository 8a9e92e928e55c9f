"""The span of a call: an identity for the wire, whether or not anything is exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from openapi_tool.protocol.trace import SpanContext, TraceLink, new_span_id


@dataclass(slots=True)
class CallSpan:
    """What the wire needs of a span, and how the call ended."""

    context: SpanContext
    tracestate: str | None
    attributes: dict[str, str] = field(default_factory=dict)

    def outcome(self, status: str, error_code: str | None) -> None:
        """Note how the call ended."""
        self.attributes["openapi_tool.status"] = status
        if error_code:
            self.attributes["error.type"] = error_code


class WireTracer:
    """Spans that only exist in the traceparent which they pass on; they cost one random number."""

    @contextmanager
    def span(self, name: str, link: TraceLink, attributes: Mapping[str, str]) -> Iterator[CallSpan]:
        """A child of the link's parent."""
        del name, attributes
        yield CallSpan(SpanContext(link.parent.trace_id, new_span_id(), link.parent.flags), link.tracestate)

    def shutdown(self) -> None:
        """Nothing is left to export."""
