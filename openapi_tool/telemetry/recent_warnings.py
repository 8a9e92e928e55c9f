"""Recent warnings by action, for `top` and the page. Most incidents show in a log line, not in a metric."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.telemetry.redact import Redactor

WINDOW_S = 600.0
"""Seconds for which a warning is shown."""

_MAX_ACTIONS = 100
_MAX_CHARS = 300
_EXCLUDED_ACTION = "health.changed"
"""Action that is not recorded: the current state of each dependency is shown instead."""

_IDS = ("project_id", "variable")


@dataclass(slots=True)
class RecentWarning:
    """Number of an action's warnings and errors, and the last of them; `at` is its time on the monotonic clock.

    Texts are masked when they are read, not when they are recorded: masking each line of a flood would take much CPU.
    """

    count: int
    at: float
    message: str
    ids: Mapping[str, str]

    def as_dict(self, action: str, now: float, mask: Callable[[str], str]) -> dict[str, Any]:
        """Return the JSON form; each text goes through `mask`."""
        return {
            "action": action,
            "count": self.count,
            "ago_s": round(now - self.at, 1),
            "message": mask(self.message),
            **{name: mask(text) for name, text in self.ids.items()},
        }


class RecentWarnings(logging.Handler):
    """Log handler that keeps the last line of each action; `snapshot` masks and truncates it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._redactor = Redactor()
        self._warned: dict[str, RecentWarning] = {}

    def install(self, redactor: Redactor) -> None:
        """Record the package's own warnings from now on, and discard older ones."""
        self._redactor = redactor
        self._warned.clear()
        logger = logging.getLogger(__name__.partition(".")[0])
        logger.removeHandler(self)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        fields = vars(record)
        action = str(fields.get("action", "log"))
        known = self._warned.get(action)
        if action == _EXCLUDED_ACTION or (known is None and len(self._warned) >= _MAX_ACTIONS):
            return
        now = time.monotonic()
        before = known.count if known is not None and now - known.at <= WINDOW_S else 0
        ids = {name: str(fields[name]) for name in _IDS if name in fields}
        self._warned[action] = RecentWarning(before + 1, now, record.getMessage(), ids)

    def _masked(self, text: str) -> str:
        return self._redactor.head(text, _MAX_CHARS)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the warnings of the last ten minutes, the newest first."""
        now = time.monotonic()
        recent = [(action, warned) for action, warned in list(self._warned.items()) if now - warned.at <= WINDOW_S]
        newest = sorted(recent, key=lambda item: -item[1].at)
        return [warned.as_dict(action, now, self._masked) for action, warned in newest]


RECENT_WARNINGS = RecentWarnings()
