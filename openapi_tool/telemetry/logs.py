"""Structured logs: each line has a stable `action` and the ids of its call, and no secret.

`configure_logging` installs it all at the start of a process. A log record passes the limit of its project
(`ProjectLimit`), becomes a line (`JsonFormatter` or `ConsoleFormatter`), and is written (`log_writer.py`).
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import filterfalse
from typing import Any, Literal, NamedTuple

import orjson
from cachetools import LRUCache

from openapi_tool.protocol.printable import printable_line, printable_lines
from openapi_tool.telemetry.log_writer import LogWriter
from openapi_tool.telemetry.redact import MASK, Redactor

log = logging.getLogger(__name__)

on_dropped: Callable[[int], None] = lambda _: None  # noqa: E731 - `metrics` replaces it
"""Counts lines that could not be written. It is set by `metrics`, whose import would take too long for `--help`."""

on_limited: Callable[[int], None] = lambda _: None  # noqa: E731 - the same
"""Counts lines beyond the limit of a project or a library; set by `metrics`."""

CALL_FIELDS: ContextVar[Callable[[], Mapping[str, Any]]] = ContextVar("call_fields", default=dict)
"""A function that returns the fields of log lines here: ids of the call that the task belongs to, else the protocol."""

MAX_LINES = 20
"""Limit of the lines of each action that a project can cause in a window, and of each logger of a library."""

WINDOW_S = 60.0
"""Length of a window in seconds."""

UNLIMITED = frozenset({"call.finished", "tool.disabled", "tool.enabled"})
"""Actions whose lines are never dropped: what became of each call, and which operator disabled or enabled a tool."""

MESSAGE_CHARS = 400
"""Limit of the message of a line that a project can cause; the mistakes of one definition had 5.8 kB."""

_MAX_CHARS = 100_000  # of a library's message, or a traceback
_MAX_COUNTS = 4_096  # of lines, by action and project
_PACKAGE = __name__.partition(".")[0]
_PROJECT = "project_id"


def configure_logging(
    level: str, log_format: Literal["json", "console"], redactor: Redactor, *, background: bool = False
) -> None:
    """Send all records to standard error through the redactor, those of libraries from WARNING on.

    In `background` a thread writes them; call `logging.shutdown` before `os._exit`, else the last ones are lost.
    """
    # No line shows these, so they need not be found out for each.
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
    handler = LogWriter(sys.stderr, background=background, on_dropped=_count_dropped)
    handler.setFormatter(JsonFormatter(redactor) if log_format == "json" else ConsoleFormatter(redactor))
    handler.addFilter(ProjectLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger(_PACKAGE).setLevel(level.upper())


def guard_crashes() -> None:
    """Log uncaught exceptions and warnings, which Python would print unredacted."""
    sys.excepthook = lambda _, error, __: log_crash(error)
    threading.excepthook = lambda crash: None if crash.exc_type is SystemExit else log_crash(crash.exc_value)
    sys.unraisablehook = lambda crash: log_crash(crash.exc_value)
    logging.captureWarnings(capture=True)


def log_crash(error: BaseException | None) -> None:
    """Log an uncaught exception with its traceback."""
    log.critical("uncaught exception", exc_info=error, extra={"action": "process.crashed"})


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a record is of this package, not of a library."""
    return record.name.partition(".")[0] == _PACKAGE


def _count_dropped(lines: int) -> None:
    on_dropped(lines)  # looked up now, as `metrics` may set it after `configure_logging`


class _Source(NamedTuple):
    """What lines are limited together: an action and a project, or a library's logger without a project."""

    action: str
    project: str


class ProjectLimit(logging.Filter):
    """Passes MAX_LINES lines of each action and project within WINDOW_S; drops and counts the others.

    So no project can fill the log. The next line that passes has the number of dropped ones as its field `dropped`.

    - Limited are all lines that a project can cause: those of a call, and those about a project.
    - Not limited are the actions in UNLIMITED, and lines at debug level, which an operator asks for.
    - The lines of each logger of a library are limited, too: uvicorn writes one for each request that is no HTTP,
      whoever sends it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._window_ends_at = 0.0
        self._lines: dict[_Source, int] = {}  # in this window
        self._dropped: LRUCache[_Source, int] = LRUCache(_MAX_COUNTS)  # since the last line that passed
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        action = getattr(record, "action", "log")
        if record.levelno <= logging.DEBUG or action in UNLIMITED:
            return True
        project = getattr(record, _PROJECT, None)
        if project is None:
            project = CALL_FIELDS.get()().get(_PROJECT)
        if project is not None:
            source = _Source(action, project)
        elif _is_ours(record):
            return True
        else:
            source = _Source(record.name, "")
        with self._lock:
            return self._passes(record, source)

    def _passes(self, record: logging.LogRecord, source: _Source) -> bool:
        """Count a record; return whether it passes. If so, set its `dropped`."""
        now = self._now()
        if now >= self._window_ends_at:
            self._lines.clear()
            self._window_ends_at = now + WINDOW_S
        if source not in self._lines and len(self._lines) >= _MAX_COUNTS:
            # Further projects share one limit: many of them must not use up the memory.
            source = _Source(source.action, "")
        self._lines[source] = self._lines.get(source, 0) + 1
        if self._lines[source] > MAX_LINES:
            self._dropped[source] = self._dropped.get(source, 0) + 1
            on_limited(1)
            return False
        dropped = self._dropped.pop(source, 0)
        if dropped:
            record.dropped = dropped
        return True


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that each log record has; others are fields of the line."""

_INDENT = "    "  # of a traceback for people


class _Formatter(logging.Formatter):
    """What both formatters do: they collect the fields of a line, and limit its texts."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields of the line's call, and those that the caller gave to the logger as `extra`."""
        attributes = vars(record)
        names = filterfalse(_STANDARD.__contains__, attributes)  # in C, as most attributes are standard ones
        extra = {name: attributes[name] for name in names if attributes[name] is not None}
        return {"action": "log", **CALL_FIELDS.get()(), **extra}

    def _texts(self, record: logging.LogRecord, fields: Mapping[str, Any]) -> tuple[str, str]:
        """Return the message, and the traceback (which begins with a line break, or is empty).

        Both are limited in length. A library's are also without details, such as the query of a URL.
        """
        max_chars = MESSAGE_CHARS if _PROJECT in fields else _MAX_CHARS
        message = self._head(record.getMessage(), max_chars)
        traceback = ""
        if record.exc_info:
            traceback = self._head(f"\n{self.formatException(record.exc_info)}", _MAX_CHARS)
        if not _is_ours(record):
            message = without_details(self._redactor.text(message))
            traceback = without_details(self._redactor.text(traceback))
        return message, traceback

    def _head(self, text: str, chars: int) -> str:
        """Return the beginning of a text that is too long; a secret at the cut is masked."""
        if len(text) <= chars:
            return text
        return f"{self._redactor.head(text, chars)} … ({len(text) - chars:,} characters more)"


class JsonFormatter(_Formatter):
    """Formatter for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one redacted JSON object."""
        fields = self._fields(record)
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": "".join(self._texts(record, fields)),
            **fields,
        }
        # Searching the line once costs less than a walk over all values. If it contains a secret, mask the values and
        # serialize again: masking the line itself could break its JSON.
        line = _as_json(entry)
        if self._redactor.finds_in(line):
            return _as_json(self._redactor.value(entry))
        return line


def _as_json(entry: dict[str, Any]) -> str:
    """Return one line of JSON; orjson refuses lone surrogates and huge integers."""
    try:
        return orjson.dumps(entry, default=str).decode()
    except TypeError:
        return json.dumps(entry, default=str)


class ConsoleFormatter(_Formatter):
    """Formatter for people; control characters are escaped, so that no value can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one redacted line, and an indented traceback."""
        at = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = self._fields(record)
        message, traceback = self._texts(record, fields)
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        line = printable_line(self._redactor.text(f"{message}  {shown}"))
        traceback = printable_lines(self._redactor.text(traceback), _INDENT)
        return f"{at} {record.levelname:7} {line}{traceback}"


# The user info of a URL: in `nats://user:password@host` what precedes the host is removed.
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/?#@'\"]*@", re.IGNORECASE)
# The query of a URL: `?key=…`.
_QUERY = re.compile(r"\?[^\s'\"<>]+")
# A name and its value, such as `Authorization: Bearer abc` or `'password': 'abc'`; the value is masked.
_CREDENTIALS = re.compile(
    # the name
    r"((?:proxy-)?authorization|(?:set-)?cookie|password|passwd|auth_token|pass|jwt|sig|nkey)"
    # what separates name and value: `: `, `=`, `': '` of a dictionary, `', b'` of a tuple of bytes
    r"(['\"]?[\s,:=>]+(?:b(?=['\"]))?['\"]?)"
    # the value
    r"(?:(?:bearer|basic)\s+)?[^\s'\",;})]+",
    re.IGNORECASE,
)


def without_details(text: str) -> str:
    """Remove URL queries, user info, authorization and passwords from a masked message of a library.

    Mask it before: the redactor does not recognize a secret of which a part was removed.
    """
    text = _USER_INFO.sub(r"\1", text)
    text = _QUERY.sub("?", text)
    return _CREDENTIALS.sub(rf"\1\2{MASK}", text)
