"""Record of one call, for metrics, log line, span and list of recent calls."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openapi_tool.protocol.attempts import UpstreamAttempt, requests_sent, upstream_seconds
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.metrics import project_label

log = logging.getLogger(__name__)

_QUEUE, _LOAD, _PERMIT, _UPSTREAM, _TURN, _COMMIT = (metrics.PHASE_SECONDS.labels(phase) for phase in metrics.PHASES)
_MAX_RECENT = 1_024  # calls that the status page counts


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
    attempts: Sequence[UpstreamAttempt] = ()
    permit_waits: Sequence[tuple[float, float]] = ()
    cached: bool = False
    truncated: bool = False
    turn_s: float = 0.0
    commit: tuple[float, float] | None = None
    doorbell: tuple[float, float] | None = None
    doorbell_subject: str = ""
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
            "requests": requests_sent(facts.attempts),
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
