"""Structured logs: one line a record, a stable `action`, redacted before anything is written."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import orjson

from openapi_tool.telemetry.redact import MASK, Redactor

log = logging.getLogger(__name__)

LogFormat = Literal["json", "console"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OURS = __name__.partition(".")[0]
_MOST_CHARS = 100_000
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/?#@'\"]*@", re.IGNORECASE)
_QUERY = re.compile(r"\?[^\s'\"<>]+")
_CREDENTIALS = re.compile(
    r"((?:proxy-)?authorization|(?:set-)?cookie|password|passwd|auth_token|pass|jwt|sig|nkey)"
    r"(['\"]?[\s,:=>]+(?:b(?=['\"]))?['\"]?)(?:(?:bearer|basic)\s+)?[^\s'\",;})]+",
    re.IGNORECASE,
)


def without_details(text: str) -> str:
    """A library's own words without queries, user info, authorization and passwords; at most so many of them.

    Secrets are masked before, because half of one is not known as one.
    """
    if len(text) > _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]} … ({len(text) - _MOST_CHARS:,} characters more)"
    text = _USER_INFO.sub(r"\1", text)
    text = _QUERY.sub("?", text)
    return _CREDENTIALS.sub(rf"\1\2{MASK}", text)


class _Formatter(logging.Formatter):
    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD and value is not None}
        return {"action": "log", **extra}

    def _message(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        return message if _is_ours(record) else without_details(self._redactor.text(message))


class JsonFormatter(_Formatter):
    """For machines: `time`, `level`, `logger`, `action`, `message` and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object, redacted."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
            **self._fields(record),
        }
        line = _as_json(entry)
        return _as_json(self._redactor.value(entry)) if self._redactor.finds_in(line) else line


def _as_json(entry: dict[str, Any]) -> str:
    """One line; the standard library also takes what orjson refuses: lone surrogates and huge integers."""
    try:
        return orjson.dumps(entry, default=str).decode()
    except TypeError:
        return json.dumps(entry, default=str)


class ConsoleFormatter(_Formatter):
    """For people: time, level, message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """One line (more for a traceback), redacted."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={value}" for name, value in self._fields(record).items())
        return self._redactor.text(f"{time} {record.levelname:7} {self._message(record)}  {fields}")


class _Handler(logging.StreamHandler[TextIO]):
    """Standard error; a record that cannot be written is told by its place alone."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """In place of logging's own report, which shows the record's arguments as they are."""
        kind = getattr(sys.exc_info()[0], "__name__", "")
        self.stream.write(f"a log record of {record.name}, line {record.lineno}, could not be written: {kind}\n")


def configure_logging(level: str, log_format: LogFormat, redactor: Redactor) -> None:
    """Send every record of this process to standard error through the redactor.

    `level` is that of our own records; those of libraries are shown from WARNING on.
    """
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter(redactor) if log_format == "json" else ConsoleFormatter(redactor))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger(_OURS).setLevel(level.upper())


def guard_crashes() -> None:
    """Log what would otherwise be printed as it is: exceptions that nobody caught, and warnings."""
    sys.excepthook = lambda _, error, __: log_crash(error)
    threading.excepthook = lambda crash: None if crash.exc_type is SystemExit else log_crash(crash.exc_value)
    sys.unraisablehook = lambda crash: log_crash(crash.exc_value)
    logging.captureWarnings(capture=True)


def log_crash(error: BaseException | None) -> None:
    """Log an exception that nobody caught, with its traceback."""
    log.critical("an exception that nobody caught", exc_info=error, extra={"action": "process.crashed"})


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == _OURS
