"""Span contexts that report and doorbell pass on, whether or not spans are exported; shutdown of an exporter."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from openapi_tool.protocol.tracing import SpanContext, TraceLink, new_span_id
from openapi_tool.telemetry.calls import CallFacts

log = logging.getLogger(__name__)

_MAX_EXPORT_S = 5.0  # at the end of the process


@dataclass(slots=True)
class CallSpan:
    """Span context for the traceparent, and the facts for the exported spans."""

    context: SpanContext
    tracestate: str | None
    facts: CallFacts | None = None


class WireTracer:
    """Tracer without an exporter."""

    def span(
        self, name: str, link: TraceLink, attributes: Mapping[str, str], began: float | None = None
    ) -> AbstractContextManager[CallSpan]:
        """Start a child span."""
        del name, attributes, began
        return nullcontext(child_of(link))

    def shutdown(self) -> None:
        """Do nothing."""


def child_of(link: TraceLink) -> CallSpan:
    """Return a child span of the link's parent."""
    return CallSpan(SpanContext(link.parent.trace_id, new_span_id(), link.parent.flags), link.tracestate)


async def shut_down(shutdown: Callable[[], None], left_s: Callable[[], float] = lambda: math.inf) -> None:
    """Run the shutdown of an exporter; after a while log a warning and drop what it has not exported.

    It gets five seconds, but at most half of the seconds that `left_s` returns, so that further steps have some.
    It runs in a daemon thread: closing the event loop would wait for a thread of its executor.
    """
    limit_s = min(_MAX_EXPORT_S, left_s() / 2)
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def work() -> None:
        shutdown()
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(done.set)

    try:
        threading.Thread(target=work, name="tracer shutdown", daemon=True).start()
        async with asyncio.timeout(limit_s):
            await done.wait()
    except RuntimeError as no_thread:  # of this container or user
        log.warning(
            "cannot export the last spans or metrics: %s; they are dropped",
            no_thread,
            extra={"action": "traces.dropped"},
        )
    except TimeoutError:
        log.warning(
            "cannot export the last spans or metrics within %.2f s; they are dropped; check telemetry.otlp_endpoint",
            limit_s,
            extra={"action": "traces.dropped"},
        )
