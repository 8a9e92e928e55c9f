"""Snapshot of this process for `openapi-tool top` and the status page: rates, health, warnings and the last calls.

A snapshot is a JSON object. `nats_records/statistics_schema.py` describes it, and docs/operations.md its fields.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from openapi_tool import __version__
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import RECENT, CallFacts
from openapi_tool.telemetry.health import Health
from openapi_tool.telemetry.metrics import Instrument, samples
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.telemetry.upstream_waits import UPSTREAM_WAITS

WINDOW_S = 60.0
"""Period of rates and latencies; shorter if `RECENT`, the list of the last calls, cannot hold all calls of a minute."""

_MAX_ROWS = 20  # of a table of the status page
_MAX_CALLS = 20  # the newest, on the status page
_MAX_AGE_S = 0.5  # of a snapshot that several readers of the status page share
_GAUGES = {
    "running": metrics.RUNNING,
    "held": metrics.HELD,
    "waiting": metrics.WAITING,
    "slots": metrics.SLOTS,
    "oldest_held_s": metrics.OLDEST_HELD,
    "waiting_for_memory": metrics.RESPONSE_WAITING,
}
_DURABLE_GAUGES = {
    "pending": metrics.PENDING,
    "unacknowledged": metrics.UNACKNOWLEDGED,
    "max_unacknowledged": metrics.MAX_UNACKNOWLEDGED,
}


@dataclass(slots=True)
class Snapshots:
    """Makes snapshots, at most two a second, since any client may request them.

    - `instance`: name of this replica.
    - `limits`: settings that are shown (rate limits are in `health`).
    - `protocol`, `durable`: version and durable consumer of the kernel; empty without a kernel.
    - `work`: returns the commands that this replica holds, running and waiting.
    """

    instance: str
    health: Health
    limits: Mapping[str, Any]
    protocol: str = ""
    durable: str = ""
    work: Callable[[], Mapping[str, Any]] = dict
    _made_at: float = 0.0
    _last: Mapping[str, Any] = field(default_factory=dict)

    def now(self) -> Mapping[str, Any]:
        """Return a snapshot, at most half a second old."""
        now = time.monotonic()
        if not self._last or now - self._made_at >= _MAX_AGE_S:
            self._made_at = now
            self._last = self._snapshot(now)
        return self._last

    def _snapshot(self, now: float) -> Mapping[str, Any]:
        recent = [call for call in RECENT if now - call.ended <= WINDOW_S]
        window_s = WINDOW_S
        is_full = len(RECENT) == RECENT.maxlen
        if is_full and len(recent) == len(RECENT):  # earlier calls of the window were dropped from the list
            window_s = now - recent[0].ended
        return {
            "instance": self.instance,
            "version": __version__,
            **(self._of_kernel() if self.durable else {}),
            "window_s": round(window_s, 1),
            **_rates(recent, window_s),
            **{name: _number(gauge) for name, gauge in _GAUGES.items()},
            "phases_p95_ms": _phases(recent),
            "health": self.health.as_json(),
            "limits": dict(self.limits),
            "upstream_limits": list(self.health.limits()),
            "configured_limits": list(self.health.configured_limits()),
            "upstream_keys": list(self.health.keys()),
            "upstream_waits": UPSTREAM_WAITS.snapshot(),
            "budgets": list(self.health.budgets()),
            "tools": _by_tool(recent),
            "errors": _errors(recent),
            "warnings": RECENT_WARNINGS.snapshot(),
            "log_lines_dropped": round(_number(metrics.LOG_LINES_DROPPED)),
            "last": [_call(call, now) for call in islice(reversed(RECENT), _MAX_CALLS)],
        }

    def _of_kernel(self) -> dict[str, Any]:
        counts = {name: round(_number(gauge)) for name, gauge in _DURABLE_GAUGES.items()}
        return {"protocol": self.protocol, "durable": self.durable, **counts, "work": self.work()}


def _number(instrument: Instrument) -> float:
    """Return the value of an instrument without labels."""
    (sample,) = samples(instrument)
    return round(sample.value, 1)


def _rates(calls: Sequence[CallFacts], window_s: float) -> dict[str, Any]:
    seconds = sorted(call.seconds for call in calls)
    return {
        "calls": len(calls),
        "failed": sum(call.error_code is not None for call in calls),
        "rate": round(len(calls) / max(window_s, 1.0), 2),
        "p50_ms": _quantile_ms(seconds, 0.5),
        "p95_ms": _quantile_ms(seconds, 0.95),
        "tokens": sum(call.tokens for call in calls),
    }


def _phases(calls: Sequence[CallFacts]) -> dict[str, int | None]:
    """Return the 95th percentile of the milliseconds of each phase; None if no call had it."""
    seconds = {
        "queue": [call.age_s for call in calls],
        "load": [call.loaded - call.began for call in calls],
        "permit": [call.permit_s for call in calls if call.permit_s is not None],
        "commit": [end - begin for begin, end in (call.commit for call in calls if call.commit)],
    }
    return {phase: _quantile_ms(sorted(values), 0.95) for phase, values in seconds.items()}


def _quantile_ms(sorted_seconds: Sequence[float], share: float) -> int | None:
    """Return the milliseconds that this share of calls (0.95: 95 %) does not exceed; None without calls."""
    if not sorted_seconds:
        return None
    index = min(len(sorted_seconds) - 1, int(share * len(sorted_seconds)))
    return round(1000 * sorted_seconds[index])


def _by_tool(calls: Sequence[CallFacts]) -> list[dict[str, Any]]:
    """Return the rates of each project and tool, by its name in the project, those with the most calls first."""
    groups: dict[tuple[str, str], list[CallFacts]] = defaultdict(list)
    for call in calls:
        groups[call.ids["project_id"], call.function_name].append(call)
    busiest = sorted(groups, key=lambda name: len(groups[name]), reverse=True)[:_MAX_ROWS]
    return [{"project": project, "tool": tool, **_rates(groups[project, tool], WINDOW_S)} for project, tool in busiest]


def _errors(calls: Sequence[CallFacts]) -> list[dict[str, Any]]:
    failed = Counter((call.ids["project_id"], call.function_name, call.error_code) for call in calls if call.error_code)
    return [
        {"project": project, "tool": tool, "error_code": code, "calls": count}
        for (project, tool, code), count in failed.most_common(_MAX_ROWS)
    ]


def _call(call: CallFacts, now: float) -> dict[str, Any]:
    return {
        "ago_s": round(now - call.ended, 1),
        "project": call.ids["project_id"],
        "tool": call.function_name,
        "status": call.status,
        "error_code": call.error_code,
        "ms": round(call.seconds * 1000),
        "tokens": call.tokens,
        "cached": call.cached,
        "tool_call_id": call.ids["tool_call_id"],
    }
