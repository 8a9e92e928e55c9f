"""Structured logs: one line a record, a stable `action`, redacted before anything is written."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from openapi_tool.telemetry.redact import Redactor

LogFormat = Literal["json", "console"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_QUIET = ("httpx", "httpcore", "asyncio", "aiohttp", "nats", "opentelemetry")


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
        return message


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
        return orjson.dumps(self._redactor.value(entry), default=str).decode()


class ConsoleFormatter(_Formatter):
    """For people: time, level, message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """One line (more for a traceback), redacted."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={value}" for name, value in self._fields(record).items())
        return self._redactor.text(f"{time} {record.levelname:7} {self._message(record)}  {fields}")


def configure_logging(level: str, log_format: LogFormat, redactor: Redactor) -> None:
    """Send every record of this process to standard error through the redactor."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(redactor) if log_format == "json" else ConsoleFormatter(redactor))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
