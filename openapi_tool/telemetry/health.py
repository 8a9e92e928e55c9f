"""Readiness by dependency; served by `health_server`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cachetools import TTLCache

from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

POSTGRES, NATS, CONSUMER, JETSTREAM = DEPENDENCIES = "postgres", "nats", "consumer", "jetstream"

_TICK_S = 0.25
_LAG_WARNING_S = 0.5
_REASON_CHARS = 1_000
_MAX_LOGGED_REASONS = 64
_REPEAT_AFTER_S = 3_600.0
"""Seconds until the full text of a known reason is logged again."""


@dataclass(slots=True)
class Dependency:
    """State of a dependency.

    `last_ok_at` is its last success on the monotonic clock, in seconds; `since` the last change of `ok`; `reason` why
    it is not ok.
    """

    ok: bool = False
    last_ok_at: float | None = None
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object; `age_s` is in seconds since the last success, null before the first one."""
        age_s = None if self.last_ok_at is None else round(time.monotonic() - self.last_ok_at, 1)
        reason = {"reason": self.reason} if self.reason else {}
        return {"ok": self.ok, "age_s": age_s, "since": self.since.isoformat(timespec="seconds"), **reason}


@dataclass(slots=True)
class Health:
    """Dependencies by name; ready while all are available and the process does not drain.

    `clock_offset_s` is the local clock's offset from the NATS server's in seconds; None while unknown.
    `redact` masks secrets in a reason. `limits` returns the state of each limited key and endpoint, `keys` that of each
    blocked key, `budgets` that of each account, `budget_outage` why accounts cannot be shared, empty while they can.
    `prefix` precedes the names of dependencies in output. `kernels` are the records of further kernels that this
    process serves; it is ready only if they are.
    """

    dependencies: dict[str, Dependency] = field(default_factory=lambda: {name: Dependency() for name in DEPENDENCIES})
    draining: bool = False
    clock_offset_s: float | None = None
    redact: Callable[[str], str] = str
    limits: Callable[[], Sequence[Mapping[str, Any]]] = list
    keys: Callable[[], Sequence[Mapping[str, Any]]] = list
    budgets: Callable[[], Sequence[Mapping[str, Any]]] = list
    budget_outage: Callable[[], str] = str
    prefix: str = ""
    kernels: list[Health] = field(default_factory=list)
    _logged_reasons: TTLCache[tuple[str, str], bool] = field(
        default_factory=lambda: TTLCache(_MAX_LOGGED_REASONS, _REPEAT_AFTER_S)
    )

    def add_kernel(self, name: str) -> Health:
        """Add and return the record of a further kernel."""
        kernel = Health(redact=self.redact, prefix=f"{name}.")
        self.kernels.append(kernel)
        return kernel

    def record(self, name: str, *, ok: bool, reason: str = "") -> bool:
        """Record the state of a dependency; return whether `ok` changed.

        Each change of state is logged, and each new reason. The text of a reason is logged at most once an hour, a
        repeated one as `, as before`: a pooler can change it many times a minute.
        """
        dependency = self.dependencies[name]
        changed, old_reason = dependency.ok != ok, dependency.reason
        dependency.ok, dependency.reason = ok, "" if ok else self.redact(reason)[:_REASON_CHARS]
        if ok:
            dependency.last_ok_at = time.monotonic()
        if changed:
            dependency.since = datetime.now(UTC)
        metrics.DEPENDENCY_UP.labels(self.prefix + name).set(ok)
        if changed or (dependency.reason != old_reason and (name, dependency.reason) not in self._logged_reasons):
            self._log(name, dependency)
        return changed

    def _log(self, name: str, dependency: Dependency) -> None:
        reason = dependency.reason
        if reason:
            reason = ", as before" if (name, reason) in self._logged_reasons else f": {reason}"
            self._logged_reasons.setdefault((name, dependency.reason), True)
        log.log(
            logging.INFO if dependency.ok else logging.WARNING,
            "%s is %s%s",
            self.prefix + name,
            "available" if dependency.ok else "unavailable",
            reason,
            extra={"action": "health.changed", "dependency": self.prefix + name, "ok": dependency.ok},
        )

    def ok(self, name: str) -> bool:
        """Return whether a dependency was available at the last check."""
        return self.dependencies[name].ok

    @property
    def ready(self) -> bool:
        """Return whether new calls can be committed."""
        own = all(dependency.ok for dependency in self.dependencies.values())
        return own and not self.draining and all(kernel.ready for kernel in self.kernels)

    def as_json(self) -> dict[str, Any]:
        """Return the body of /readyz."""
        dependencies = {
            kernel.prefix + name: dependency.as_json()
            for kernel in (self, *self.kernels)
            for name, dependency in kernel.dependencies.items()
        }
        offset_s = None if self.clock_offset_s is None else round(self.clock_offset_s, 3)
        limits = [{name: limit[name] for name in limit if name != "waiting_by_project"} for limit in self.limits()]
        outage = self.budget_outage()
        return {
            "ready": self.ready,
            "draining": self.draining,
            "clock_offset_s": offset_s,
            "dependencies": dependencies,
            **({"limits": limits} if limits else {}),
            **({"keys": list(keys)} if (keys := self.keys()) else {}),
            **({"budgets_by_last_known_state": self.redact(outage)} if outage else {}),
        }


async def monitor_loop_lag(on_lag: Callable[[float], None]) -> None:
    """Monitor event-loop lag until cancelled; call `on_lag` with the lag in seconds if it exceeds the threshold."""
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
