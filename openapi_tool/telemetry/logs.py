"""Structured logs with a stable `action`, secrets masked; escaping of text for terminals."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from itertools import filterfalse
from typing import Any, Literal, TextIO

import orjson
from cachetools import LRUCache

from openapi_tool.telemetry.calls import CALL_FIELDS
from openapi_tool.telemetry.redact import MASK, Redactor

_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
"""Control characters, line separators, lone surrogates and invisible characters, but not the joiners U+200C and U+200D:
languages and emoji need them."""


def printable_line(text: str) -> str:
    r"""Return `text` as one line, each unsafe character as its escape, such as `\n`."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda unsafe: unsafe[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str, indent: str = "") -> str:
    """Escape unsafe characters but tabs and line breaks; `indent` begins later lines."""
    lines = (line.split("\t") for line in text.replace("\r\n", "\n").split("\n"))
    return f"\n{indent}".join("\t".join(map(printable_line, parts)) for parts in lines)


def printable_json(value: Any, indent: int | None = None) -> str:
    """Return JSON with unsafe characters escaped; it parses to the same value."""
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    return "\n".join(_UNSAFE.sub(_json_escape, line) for line in lines)


def _json_escape(unsafe: re.Match[str]) -> str:
    """Return the JSON escape; `json` itself does not escape DEL."""
    return json.dumps(unsafe[0])[1:-1] if unsafe[0] > "\x7f" else f"\\u{ord(unsafe[0]):04x}"


log = logging.getLogger(__name__)

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PACKAGE = __name__.partition(".")[0]
_MAX_CHARS = 100_000  # of a library's message or traceback
FLOODED = frozenset(
    {
        *("call.broken", "call.dead_lettered", "call.deduplicated", "call.overlapping", "call.redelivered"),
        *("call.unsettled", "command.requeued", "dead_letters.discarded"),
    }
)
"""Actions that clients can cause: a command of 41 bytes caused a kilobyte of log."""

FLOOD_BURST = 100
FLOOD_PER_S = 10.0
_INDENT = "    "
_LRU_ITEMS = 1_024
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/?#@'\"]*@", re.IGNORECASE)
_QUERY = re.compile(r"\?[^\s'\"<>]+")
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
    """Truncate a masked message of a library, and remove URL queries, user info, authorization and passwords.

    Mask it before: the redactor does not recognize a secret that was truncated.
    """
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]} … ({len(text) - _MAX_CHARS:,} characters more)"
    text = _USER_INFO.sub(r"\1", text)
    text = _QUERY.sub("?", text)
    return _CREDENTIALS.sub(rf"\1\2{MASK}", text)


class _Formatter(logging.Formatter):
    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = vars(record)
        extra = {name: fields[name] for name in filterfalse(_STANDARD.__contains__, fields) if fields[name] is not None}
        return {"action": "log", **CALL_FIELDS.get()(), **extra}

    def _texts(self, record: logging.LogRecord) -> tuple[str, str]:
        """Return the message, and the traceback after a line break, a library's without details."""
        message, traceback = record.getMessage(), ""
        if record.exc_info:
            traceback = f"\n{self.formatException(record.exc_info)}"
        if record.name.partition(".")[0] != _PACKAGE:
            message, traceback = (without_details(self._redactor.text(text)) for text in (message, traceback))
        return message, traceback


class JsonFormatter(_Formatter):
    """Formatter for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one redacted JSON object."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": "".join(self._texts(record)),
            **self._fields(record),
        }
        # Searching the line once costs less than a walk over all values. If it contains a secret, mask the values and
        # serialize again: masking the line itself could break its JSON.
        line = _as_json(entry)
        return _as_json(self._redactor.value(entry)) if self._redactor.finds_in(line) else line


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
        fields = " ".join(f"{name}={value}" for name, value in self._fields(record).items())
        message, traceback = self._texts(record)
        line = printable_line(self._redactor.text(f"{message}  {fields}"))
        traceback = printable_lines(self._redactor.text(traceback), _INDENT)
        return f"{at} {record.levelname:7} {line}{traceback}"


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Report the source location only; logging's own report shows the arguments."""
        kind = getattr(sys.exc_info()[0], "__name__", "")
        self.stream.write(f"a log record of {record.name}, line {record.lineno}, could not be written: {kind}\n")


class FloodFilter(logging.Filter):
    """Token bucket for each action and project; the next line that passes has the number of `dropped` ones."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._buckets: LRUCache[Hashable, tuple[float, float, int]] = LRUCache(_LRU_ITEMS)  # tokens, time, dropped
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        action = getattr(record, "action", None)
        if action not in FLOODED:
            return True
        project = getattr(record, "project_id", None) or CALL_FIELDS.get()().get("project_id")
        now = self._now()
        with self._lock:
            tokens, at, dropped = self._buckets.get((action, project), (FLOOD_BURST, now, 0))
            tokens = min(FLOOD_BURST, tokens + (now - at) * FLOOD_PER_S)
            passes = tokens >= 1
            self._buckets[action, project] = (tokens - 1, now, 0) if passes else (tokens, now, dropped + 1)
        if passes and dropped:
            record.dropped = dropped
        return passes


def configure_logging(level: str, log_format: Literal["json", "console"], redactor: Redactor) -> None:
    """Send all records to standard error through the redactor, those of libraries from WARNING on."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line shows them
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter(redactor) if log_format == "json" else ConsoleFormatter(redactor))
    handler.addFilter(FloodFilter())
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


class Once:
    """LRU set, to log each item only once."""

    def __init__(self) -> None:
        self._logged: LRUCache[int, None] = LRUCache(_LRU_ITEMS)

    def first(self, *item: Hashable) -> bool:
        """Add an item; return whether it is new."""
        key = hash(item)
        known = key in self._logged
        self._logged[key] = None
        return not known
