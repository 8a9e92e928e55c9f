"""The last warnings of this process, for `top` and the status page."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from openapi_tool.protocol.jsontext import storable_text
from openapi_tool.telemetry.redact import Redactor

WARNINGS_WINDOW_S = 600.0  # in which a warning counts as recent
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
