"""Span of a call: its ids go into the traceparent of report and doorbell, whether or not spans are exported."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

from openapi_tool.protocol.trace import SpanContext, TraceLink, new_span_id
from openapi_tool.telemetry.calls import CallFacts

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CallSpan:
    """Span context for the traceparent, and the facts for the exported span and its children."""

    context: SpanContext
    tracestate: str | None
    facts: CallFacts | None = None


class WireTracer:
    """Tracer without an exporter: a span is only a new span id for the traceparent."""

    def span(self, name: str, link: TraceLink, attributes: Mapping[str, str]) -> AbstractContextManager[CallSpan]:
        """Start a child span of the link's parent."""
        del name, attributes
        return nullcontext(child_of(link))

    def shutdown(self) -> None:
        """Do nothing: there is nothing to export."""


def child_of(link: TraceLink) -> CallSpan:
    """Return a child span of the link's parent."""
    return CallSpan(SpanContext(link.parent.trace_id, new_span_id(), link.parent.flags), link.tracestate)


class Exporting(Protocol):
    """Tracer that may have spans to export."""

    def shutdown(self) -> None:
        """Export the remaining spans and stop; may block for as long as the collector does."""


async def shut_down(tracer: Exporting, limit_s: float = 5.0) -> None:
    """Export the remaining spans for at most `limit_s` seconds; then log a warning and drop them.

    Runs in a daemon thread: on the event loop it would block the shutdown, and closing the loop waits for threads of
    its executor.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        tracer.shutdown()
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name="tracer shutdown", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            await done.wait()
    except TimeoutError:
        log.warning(
            "cannot export the last spans within %s s; they are dropped; check telemetry.otlp_endpoint",
            limit_s,
            extra={"action": "traces.dropped"},
        )
