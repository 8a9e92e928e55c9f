"""Readiness of this process: the state of each dependency, and the body of `/readyz`.

A *dependency* is what calls need: PostgreSQL, NATS, the durable consumer of commands (the record in JetStream of what
is delivered and acknowledged), and the other records in JetStream. Monitors report each (`Health.record`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cachetools import TTLCache

from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

POSTGRES = "postgres"
NATS = "nats"
CONSUMER = "consumer"
JETSTREAM = "jetstream"
DEPENDENCIES = (POSTGRES, NATS, CONSUMER, JETSTREAM)
QUOTAS = "quotas"
"""The NATS that holds the records of quotas, if that is not the kernel's."""

_REASON_CHARS = 1_000  # of why a dependency is unavailable
_MAX_LOGGED_REASONS = 64  # remembered, so that none is logged again within the next seconds
_REPEAT_AFTER_S = 60.0  # until the same reason is logged again


@dataclass(slots=True)
class Dependency:
    """State of a dependency.

    `last_ok_at` is its last success, on the monotonic clock in seconds; `since` is when `ok` changed last.
    """

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
    """Dependencies by name; ready while all are available and the process does not drain (finish its calls to stop).

    `clock_offset_s` is the local clock's offset from the NATS server's. The parts of the process set the functions:

    - `redact` masks secrets in a text;
    - `limits` returns the use of each rate limit, `configured_limits` what the settings say of them;
    - `keys` returns the keys that Jina refused;
    - `budgets` returns the accounts, `budget_outage` why they cannot be shared with other processes, else "".
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

        A change is logged. While the dependency is unavailable, each new reason is, too, once a minute: behind a pooler
        the reason can change many times.
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
        # Whoever can read /readyz need not know the projects.
        limits = [{name: limit[name] for name in limit if name != "waiting_by_project"} for limit in self.limits()]
        optional = {
            "limits": limits,
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
