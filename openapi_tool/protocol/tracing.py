"""Trace context as in W3C's header `traceparent`."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Span identity: 32 hex digits of trace, 16 of span, 2 of flags."""

    trace_id: str
    span_id: str
    flags: str = "01"

    def traceparent(self) -> str:
        """Return the header value, version 00 (https://www.w3.org/TR/trace-context/#traceparent-header)."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


@dataclass(frozen=True, slots=True)
class TraceLink:
    """Parent of the report's span; `linked` is the inbound span if it is of another trace, for a link to it."""

    parent: SpanContext
    tracestate: str | None
    linked: SpanContext | None


def parse_traceparent(header: str) -> SpanContext:
    """Parse a `traceparent`. Raises ValueError if it is malformed."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        raise ValueError("traceparent must look like 00-<32 hex>-<16 hex>-<2 hex>")
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
        raise ValueError("traceparent holds a forbidden version, an all-zero id or trailing data")
    return SpanContext(trace_id, span_id, flags)


def new_root(trace_id: str | None = None) -> SpanContext:
    """Return a root span of this trace, or of a new one without a `trace_id` that W3C allows."""
    if trace_id is None or not _TRACE_ID.fullmatch(trace_id) or not trace_id.strip("0"):
        trace_id = secrets.token_hex(16)
    return SpanContext(trace_id, new_span_id())


def new_span_id() -> str:
    """Return 16 random hex digits, never all zero."""
    return f"{secrets.randbits(64) or 1:016x}"
