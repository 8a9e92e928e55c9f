"""State of this process: readiness by dependency, and the snapshot for `top` and the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from cachetools import TTLCache

from openapi_tool import __version__
from openapi_tool.protocol.jsontext import storable_text
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import RECENT, CallFacts
from openapi_tool.telemetry.metrics import Instrument, samples
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.upstream_waits import UPSTREAM_WAITS
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

POSTGRES = "postgres"
NATS = "nats"
CONSUMER = "consumer"
JETSTREAM = "jetstream"
DEPENDENCIES = (POSTGRES, NATS, CONSUMER, JETSTREAM)
QUOTAS = "quotas"
"""The NATS that holds the records of quotas, if that is not the kernel's."""

_TICK_S = 0.25  # between two measurements of the lag of the event loop
_LAG_WARNING_S = 0.5  # a longer lag is logged
_REASON_CHARS = 1_000  # of why a dependency is unavailable
_MAX_LOGGED_REASONS = 64  # remembered, so that none is logged again within the next seconds
_REPEAT_AFTER_S = 60.0  # until the same reason is logged again


@dataclass(slots=True)
class Dependency:
    """State of a dependency: `last_ok_at` is its last success (monotonic clock), `since` the last change of `ok`."""

    ok: bool = False
    last_ok_at: float | None = None
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object; `age_s` counts from the last success, `for_s` from the last change of `ok`."""
        age_s = None if self.last_ok_at is None else round(time.monotonic() - self.last_ok_at, 1)
        reason = {"reason": self.reason} if self.reason else {}
        since = self.since.isoformat(timespec="seconds")
        for_s = (datetime.now(UTC) - self.since).total_seconds()
        return {"ok": self.ok, "age_s": age_s, "since": since, "for_s": round(for_s, 1), **reason}


@dataclass(slots=True)
class Health:
    """Dependencies by name; ready while all are available and the process does not drain.

    `clock_offset_s` is the local clock's offset from the NATS server's. `keys` returns the state of blocked keys,
    `budget_outage` why accounts cannot be shared.
    """

    dependencies: dict[str, Dependency] = field(default_factory=lambda: {name: Dependency() for name in DEPENDENCIES})
    draining: bool = False
    clock_offset_s: float | None = None
    redact: Callable[[str], str] = str
    limits: Callable[[], Sequence[Mapping[str, Any]]] = list
    configured_limits: Callable[[], Sequence[Mapping[str, Any]]] = list
    keys: Callable[[], Sequence[Mapping[str, Any]]] = list
    budgets: Callable[[], Sequence[Mapping[str, Any]]] = list
    budget_outage: Callable[[], str] = str
    _logged_reasons: TTLCache[tuple[str, str], bool] = field(
        default_factory=lambda: TTLCache(_MAX_LOGGED_REASONS, _REPEAT_AFTER_S)
    )

    def record(self, name: str, *, ok: bool, reason: str = "") -> bool:
        """Record the state of a dependency; return whether `ok` changed.

        While it is unavailable each reason is logged once a minute: behind a pooler it can change many times.
        """
        dependency = self.dependencies[name]
        changed = dependency.ok != ok
        dependency.ok = ok
        if ok:
            dependency.reason = ""
            dependency.last_ok_at = time.monotonic()
        else:
            dependency.reason = self.redact(reason)[:_REASON_CHARS]
        if changed:
            dependency.since = datetime.now(UTC)
        metrics.DEPENDENCY_UP.labels(name).set(ok)
        is_new_reason = not ok and (name, dependency.reason) not in self._logged_reasons
        if changed or is_new_reason:
            self._log(name, dependency)
        return changed

    def _log(self, name: str, dependency: Dependency) -> None:
        self._logged_reasons[name, dependency.reason] = True
        log.log(
            logging.INFO if dependency.ok else logging.WARNING,
            "%s is %s%s",
            name,
            "available" if dependency.ok else "unavailable",
            f": {dependency.reason}" if dependency.reason else "",
            extra={"action": "health.changed", "dependency": name, "ok": dependency.ok},
        )

    def ok(self, name: str) -> bool:
        """Return whether a dependency is available."""
        return self.dependencies[name].ok

    @property
    def ready(self) -> bool:
        """Return whether new calls can be committed."""
        return not self.draining and all(dependency.ok for dependency in self.dependencies.values())

    def as_json(self) -> dict[str, Any]:
        """Return the body of /readyz."""
        dependencies = {name: dependency.as_json() for name, dependency in self.dependencies.items()}
        offset_s = None if self.clock_offset_s is None else round(self.clock_offset_s, 3)
        optional = {
            "limits": [
                {name: limit[name] for name in limit if name != "waiting_by_project"} for limit in self.limits()
            ],
            "keys": list(self.keys()),
            "budgets_by_last_known_state": self.redact(self.budget_outage()),
        }
        return {
            "ready": self.ready,
            "draining": self.draining,
            "clock_offset_s": offset_s,
            "dependencies": dependencies,
            **{name: value for name, value in optional.items() if value},
        }


async def monitor_loop_lag(on_lag: Callable[[float], None]) -> None:
    """Call `on_lag` with each lag of the event loop of more than half a second."""
    loop = asyncio.get_running_loop()
    metrics.EVENT_LOOP_TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    while True:
        before = time.monotonic()
        await asyncio.sleep(_TICK_S)
        lag_s = max(0.0, time.monotonic() - before - _TICK_S)
        metrics.EVENT_LOOP_LAG.observe(lag_s)
        if lag_s > _LAG_WARNING_S:
            on_lag(lag_s)
            log.warning("the event loop was blocked", extra={"action": "event_loop.lagged", "lag_s": round(lag_s, 3)})


WARNINGS_WINDOW_S = 600.0
_MAX_WARNINGS = 100  # remembered, each kind once
_MAX_OF_ACTION = 8  # projects or keys of one action must not displace other actions
_MAX_CHARS = 400  # of the text of a warning
_IDS = ("project_id", "variable", "endpoint", "dependency")
_UNTIL_SOLVED = ("reload.failed", "tools.reload_failed")
"""Actions whose warning lasts until it is solved, however long ago it was logged."""


@dataclass(slots=True)
class _Warned:
    """Number of an action's warnings and errors, and the last of them; `at` is its time on the monotonic clock.

    `lasts` is whether what it is about lasts; None if this is not known.
    """

    count: int
    at: float
    message: str
    lasts: bool | None


class RecentWarnings(logging.Handler):
    """Stores the last warning of each action, project, key, endpoint and dependency.

    `snapshot` masks them, since masking a flood would take much CPU.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._redactor = Redactor()
        self._warned: dict[tuple[str, tuple[tuple[str, str], ...]], _Warned] = {}  # by action and ids, oldest first

    def install(self, redactor: Redactor) -> None:
        """Record the package's own warnings from now on."""
        self._redactor = redactor
        self._warned.clear()
        logger = logging.getLogger(__name__.partition(".")[0])
        logger.removeHandler(self)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        fields = vars(record)
        action = str(fields.get("action", "log"))
        key = action, tuple((name, str(fields[name])) for name in _IDS if name in fields)
        known = self._warned.pop(key, None)
        if known is None:
            self._make_room(action)
        now = time.monotonic()
        before = known.count if known is not None and now - known.at <= WARNINGS_WINDOW_S else 0
        self._warned[key] = _Warned(before + 1, now, record.getMessage(), True if action in _UNTIL_SOLVED else None)

    def solve(self, action: str, **ids: str) -> None:
        """Record that what the last warning with this action and these ids was about is over."""
        if warned := self._warned.get((action, tuple((name, ids[name]) for name in _IDS if name in ids))):
            warned.lasts = False

    def _make_room(self, action: str) -> None:
        same = [key for key in self._warned if key[0] == action]
        if len(same) >= _MAX_OF_ACTION:
            del self._warned[same[0]]
        elif len(self._warned) >= _MAX_WARNINGS:
            del self._warned[next(key for key, warned in self._warned.items() if not warned.lasts)]

    def _masked(self, text: str) -> str:
        head = self._redactor.head(text, _MAX_CHARS)
        if len(text) > _MAX_CHARS:
            head += "…"
        return storable_text(head)  # a project's name may have bytes beyond UTF-8

    def snapshot(self) -> list[dict[str, Any]]:
        """Return recent warnings and those that last, the newest first."""
        now = time.monotonic()
        return [
            {
                "action": action,
                "count": warned.count,
                "ago_s": round(now - warned.at, 1),
                "message": self._masked(warned.message),
                **{name: self._masked(text) for name, text in ids},
                **({} if warned.lasts is None else {"lasts": warned.lasts}),
            }
            for (action, ids), warned in reversed(self._warned.copy().items())
            if warned.lasts or now - warned.at <= WARNINGS_WINDOW_S
        ]


RECENT_WARNINGS = RecentWarnings()


WINDOW_S = 60.0
"""Period of rates and latencies; shorter if `RECENT` cannot hold all of its calls."""

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

    `limits` are settings, those of `health` rate limits. `work` returns the held commands. `protocol` and `durable` are
    empty without a kernel.
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
        # A full list may cover less than the window.
        full = len(RECENT) == RECENT.maxlen and len(recent) == len(RECENT)
        window_s = now - recent[0].ended if full else WINDOW_S
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
            "tools": _rows(recent),
            "errors": _errors(recent),
            "warnings": RECENT_WARNINGS.snapshot(),
            "log_lines_dropped": round(_number(metrics.LOG_LINES_DROPPED)),
            "last": [_call(call, now) for call in islice(reversed(RECENT), _MAX_CALLS)],
        }

    def _of_kernel(self) -> dict[str, Any]:
        counts = {name: round(_number(gauge)) for name, gauge in _DURABLE_GAUGES.items()}
        return {"protocol": self.protocol, "durable": self.durable, **counts, "work": self.work()}


def _number(instrument: Instrument) -> float:
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
    seconds = {
        "queue": [call.age_s for call in calls],
        "load": [call.loaded - call.began for call in calls],
        "permit": [call.permit_s for call in calls if call.permit_s is not None],
        "commit": [call.commit[1] - call.commit[0] for call in calls if call.commit],
    }
    return {phase: _quantile_ms(sorted(values), 0.95) for phase, values in seconds.items()}


def _quantile_ms(seconds: Sequence[float], share: float) -> int | None:
    if not seconds:
        return None
    place = min(len(seconds) - 1, int(share * len(seconds)))
    return round(1000 * seconds[place])


def _tool(call: CallFacts) -> str:
    """Return the built-in tool, or the project's name of a tool whose definition is not usable."""
    return call.tool or short(call.function_name)


def _rows(calls: Sequence[CallFacts]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[CallFacts]] = defaultdict(list)
    for call in calls:
        groups[call.ids["project_id"], _tool(call)].append(call)
    most = sorted(groups.items(), key=lambda group: -len(group[1]))[:_MAX_ROWS]
    return [{"project": project, "tool": tool, **_rates(group, WINDOW_S)} for (project, tool), group in most]


def _errors(calls: Sequence[CallFacts]) -> list[dict[str, Any]]:
    failed = Counter((call.ids["project_id"], _tool(call), call.error_code) for call in calls if call.error_code)
    return [
        {"project": project, "tool": tool, "error_code": code, "calls": count}
        for (project, tool, code), count in failed.most_common(_MAX_ROWS)
    ]


def _call(call: CallFacts, now: float) -> dict[str, Any]:
    return {
        "ago_s": round(now - call.ended, 1),
        "project": call.ids["project_id"],
        "tool": _tool(call),
        "status": call.status,
        "error_code": call.error_code,
        "ms": round(call.seconds * 1000),
        "tokens": call.tokens,
        "cached": call.cached,
        "tool_call_id": call.ids["tool_call_id"],
    }
