"""Record of one call, for metrics, log line, span and list of recent calls."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from openapi_tool.protocol.identity import SpanContext, TraceLink, new_span_id
from openapi_tool.protocol.records import Attempt, upstream_seconds
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.metrics import project_label

log = logging.getLogger(__name__)

_QUEUE, _LOAD, _PERMIT, _UPSTREAM, _TURN, _COMMIT = (metrics.PHASE_SECONDS.labels(phase) for phase in metrics.PHASES)
_MAX_RECENT = 1_024
_MAX_EXPORT_S = 5.0  # at the end of the process


@dataclass(slots=True)
class CallFacts:
    """Facts of one call. Times are on the monotonic clock, in seconds; pairs are begin and end, None if not reached.

    `function_name` is the tool's name in the command, `tool` the built-in tool. `age_s` is the age of the command in
    the stream at `began`. `turn_s` are the seconds that the finished result waited for the worker.
    """

    ids: Mapping[str, str]
    trace_id: str
    protocol: str
    function_name: str
    delivery_attempt: int
    age_s: float
    began: float
    loaded: float
    tool: str = ""
    status: str = ""
    error_code: str | None = None
    tokens: int = 0
    attempts: Sequence[Attempt] = ()
    permit_waits: Sequence[tuple[float, float]] = ()
    cached: bool = False
    truncated: bool = False
    turn_s: float = 0.0
    commit: tuple[float, float] | None = None
    wakeup: tuple[float, float] | None = None
    wakeup_subject: str = ""
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the arrival of the command in the stream to the end of the call."""
        return self.ended - self.began + self.age_s

    @property
    def permit_s(self) -> float | None:
        """Longest wait for a permit."""
        return max((end - begin for begin, end in self.permit_waits), default=None)

    def fields(self) -> Mapping[str, Any]:
        """Return the fields of each log line."""
        return {"trace_id": self.trace_id, "protocol": self.protocol, **self.ids}

    @property
    def http_status(self) -> int | None:
        """Status of the last upstream response."""
        return self.attempts[-1].http_status if self.attempts else None


RECENT: deque[CallFacts] = deque(maxlen=_MAX_RECENT)
"""The last finished calls, oldest first."""


def record_finished(facts: CallFacts) -> None:
    """Count, log and store a call whose result is committed."""
    now = facts.ended = time.monotonic()
    upstream_s = upstream_seconds(facts.attempts, now) if facts.attempts else None
    permit_s = facts.permit_s
    _count(facts, permit_s, upstream_s)
    RECENT.append(facts)
    log.info(
        "finished",
        extra={
            "action": "call.finished",
            "tool_name": facts.function_name,
            "status": facts.status,
            "error_code": facts.error_code,
            "duration_ms": round((now - facts.loaded) * 1000),
            "queue_ms": round(facts.age_s * 1000),
            "permit_ms": None if permit_s is None else round(permit_s * 1000),
            "upstream_ms": None if upstream_s is None else round(upstream_s * 1000),
            "turn_ms": round(facts.turn_s * 1000),
            "http_status": facts.http_status,
            "tokens": facts.tokens,
            "requests": len(facts.attempts),
            "cached": facts.cached,
            "attempt": facts.delivery_attempt,
        },
    )


def _count(facts: CallFacts, permit_s: float | None, upstream_s: float | None) -> None:
    project = project_label(facts.ids["project_id"])
    metrics.CALLS.labels(facts.tool, facts.status, facts.error_code or "", project).inc()
    metrics.CALL_SECONDS.labels(facts.tool).observe(facts.seconds)
    _QUEUE.observe(facts.age_s)
    _LOAD.observe(facts.loaded - facts.began)
    if permit_s is not None:
        _PERMIT.observe(permit_s)
    if upstream_s is not None:
        _UPSTREAM.observe(upstream_s)
    if facts.commit is not None:
        _TURN.observe(facts.turn_s)
        _COMMIT.observe(facts.commit[1] - facts.commit[0])


@dataclass(slots=True)
class CallSpan:
    """Span context for the traceparent, and the facts for the exported spans."""

    context: SpanContext
    tracestate: str | None
    facts: CallFacts | None = None


class WireTracer:
    """Tracer without an exporter."""

    def span(self, name: str, link: TraceLink, attributes: Mapping[str, str]) -> AbstractContextManager[CallSpan]:
        """Start a child span."""
        del name, attributes
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
    loop, done, limit_s = asyncio.get_running_loop(), asyncio.Event(), min(_MAX_EXPORT_S, left_s() / 2)

    def work() -> None:
        shutdown()
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name="tracer shutdown", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            await done.wait()
    except TimeoutError:
        log.warning(
            "cannot export the last spans or metrics within %.2f s; they are dropped; check telemetry.otlp_endpoint",
            limit_s,
            extra={"action": "traces.dropped"},
        )
