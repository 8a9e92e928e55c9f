"""The last warnings and errors in the log of this process, for `top` and the status page.

Warnings of the same *kind* (action and ids) are counted, and only the last message is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from openapi_tool.protocol.jsontext import storable_text
from openapi_tool.telemetry.redact import Redactor

WARNINGS_WINDOW_S = 600.0  # in which a warning counts as recent
_MAX_WARNINGS = 100  # remembered, each kind once
_MAX_OF_ACTION = 8  # projects or keys of one action must not displace other actions
_MAX_CHARS = 400  # of the text of a warning
_IDS = ("project_id", "variable", "endpoint", "dependency")  # fields of a log line; `variable` stands for a key
_UNTIL_SOLVED = ("reload.failed", "tools.reload_failed")
"""Actions whose warning lasts until it is solved, however long ago it was logged."""


class _Kind(NamedTuple):
    """What warnings are counted together; `ids` are names and values of `_IDS`."""

    action: str
    ids: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, action: str, fields: Mapping[str, Any]) -> _Kind:
        return cls(action, tuple((name, str(fields[name])) for name in _IDS if name in fields))


@dataclass(slots=True)
class _Warned:
    """Number of the warnings of a kind, and the last of them; `last_at` is its time on the monotonic clock.

    `lasts` is whether what it is about lasts; None if this is not known.
    """

    count: int
    last_at: float
    message: str
    lasts: bool | None


class RecentWarnings(logging.Handler):
    """Stores the last warning of each kind.

    Secrets are masked only when a snapshot is made, since masking a flood would take much CPU.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._redactor = Redactor()
        self._warned: dict[_Kind, _Warned] = {}  # oldest first

    def install(self, redactor: Redactor) -> None:
        """Record the package's own warnings from now on."""
        self._redactor = redactor
        self._warned.clear()
        logger = logging.getLogger(__name__.partition(".")[0])  # of the package
        logger.removeHandler(self)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record (called by logging)."""
        action = str(vars(record).get("action", "log"))
        kind = _Kind.of(action, vars(record))
        known = self._warned.pop(kind, None)  # it becomes the newest
        if known is None:
            self._make_room(action)
        now = time.monotonic()
        count = 1
        if known is not None and now - known.last_at <= WARNINGS_WINDOW_S:
            count += known.count
        lasts = True if action in _UNTIL_SOLVED else None
        self._warned[kind] = _Warned(count, now, record.getMessage(), lasts)

    def solve(self, action: str, **ids: str) -> None:
        """Record that what the last warning with this action and these ids was about is over."""
        warned = self._warned.get(_Kind.of(action, ids))
        if warned is not None:
            warned.lasts = False

    def _make_room(self, action: str) -> None:
        """If there are too many warnings, forget the oldest of this action, or the oldest of all that does not last."""
        same_action = [kind for kind in self._warned if kind.action == action]
        if len(same_action) >= _MAX_OF_ACTION:
            del self._warned[same_action[0]]
        elif len(self._warned) >= _MAX_WARNINGS:
            oldest = next(kind for kind, warned in self._warned.items() if not warned.lasts)
            del self._warned[oldest]

    def snapshot(self) -> list[dict[str, Any]]:
        """Return recent warnings and those that last, the newest first."""
        now = time.monotonic()
        return [
            self._shown(kind, warned, now)
            for kind, warned in reversed(self._warned.copy().items())  # a copy, as threads log, too
            if warned.lasts or now - warned.last_at <= WARNINGS_WINDOW_S
        ]

    def _shown(self, kind: _Kind, warned: _Warned, now: float) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "action": kind.action,
            "count": warned.count,
            "ago_s": round(now - warned.last_at, 1),
            "message": self._masked(warned.message),
        }
        for name, text in kind.ids:
            shown[name] = self._masked(text)
        if warned.lasts is not None:
            shown["lasts"] = warned.lasts
        return shown

    def _masked(self, text: str) -> str:
        head = self._redactor.head(text, _MAX_CHARS)
        if len(text) > _MAX_CHARS:
            head += "…"
        return storable_text(head)  # a project's name may have bytes beyond UTF-8


RECENT_WARNINGS = RecentWarnings()
