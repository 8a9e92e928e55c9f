"""Identity of spans, as in W3C's header `traceparent` (https://www.w3.org/TR/trace-context/#traceparent-header)."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

# `00-455ab97f080b4dc9929c29eb71aab6d4-b7ba668dd89d48c9-01`: version, trace, span, flags; later versions may have more.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Identity of a span: its trace (32 hex digits), its own id (16), and flags (2)."""

    trace_id: str
    span_id: str
    flags: str = "01"

    def traceparent(self) -> str:
        """Return the value of the header, in version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


@dataclass(frozen=True, slots=True)
class TraceLink:
    """Where the span of a report belongs.

    `parent` is its parent, with the header `tracestate` of that. `linked` is the sender's span if it is of another
    trace; the report's span gets a link to it.
    """

    parent: SpanContext
    tracestate: str | None
    linked: SpanContext | None


def parse_traceparent(header: str) -> SpanContext:
    """Parse a `traceparent`. Raises ValueError if it is malformed."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        raise ValueError("traceparent must look like 00-<32 hex>-<16 hex>-<2 hex>")
    version, trace_id, span_id, flags, rest = match.groups()
    is_version_invalid = version == "ff" or (version == "00" and rest)
    is_id_zero = not trace_id.strip("0") or not span_id.strip("0")
    if is_version_invalid or is_id_zero:
        raise ValueError("traceparent holds a forbidden version, an all-zero id or trailing data")
    return SpanContext(trace_id, span_id, flags)


def new_root(trace_id: str | None = None) -> SpanContext:
    """Return a root span of this trace; of a new trace if W3C does not allow the id, or there is none."""
    if trace_id is None or not _is_trace_id(trace_id):
        trace_id = secrets.token_hex(16)
    return SpanContext(trace_id, new_span_id())


def _is_trace_id(text: str) -> bool:
    is_all_zero = not text.strip("0")
    return bool(_TRACE_ID.fullmatch(text)) and not is_all_zero


def new_span_id() -> str:
    """Return 16 random hex digits, never all zero."""
    return f"{secrets.randbits(64) or 1:016x}"
