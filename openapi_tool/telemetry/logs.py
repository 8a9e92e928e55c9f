"""Structured logs with a stable `action`, secrets masked; escaping of text for terminals."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import filterfalse
from typing import Any, Literal, TextIO

import orjson
from cachetools import LRUCache

from openapi_tool.telemetry.redact import MASK, Redactor

_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\u2800\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    r"|(?:^|(?<=[\ufe0e\ufe0f]))[\ufe0e\ufe0f]"
)
"""Control characters, line separators, lone surrogates and invisible characters, but not the joiners U+200C and U+200D,
and of the variation selectors U+FE0E and U+FE0F one after a character: languages and emoji need them."""


def printable_line(text: str) -> str:
    r"""Return `text` as one line, each unsafe character as its escape, such as `\n`."""
    if text.isascii() and text.isprintable():
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

on_dropped: Callable[[int], None] = lambda _: None  # noqa: E731 - replaced, see below
"""Counts lines that could not be written; set by `metrics`, whose import takes too long for `--help`."""

on_limited: Callable[[int], None] = lambda _: None  # noqa: E731 - the same
"""Counts lines beyond the limit of a project or a library; set by `metrics`."""

CALL_FIELDS: ContextVar[Callable[[], Mapping[str, Any]]] = ContextVar("call_fields", default=dict)
"""Returns the fields that formatters add to log lines: those of the task's call, else the kernel's protocol."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PACKAGE = __name__.partition(".")[0]
_PROJECT = "project_id"
_MAX_CHARS = 100_000  # of a library's message, or a traceback
MESSAGE_CHARS = 400
"""Limit of the message of a line that a project can cause; the mistakes of one definition had 5.8 kB."""

UNLIMITED = frozenset({"call.finished", "tool.disabled", "tool.enabled"})
"""Actions whose lines are never dropped: what became of each call, and which operator disabled or enabled a tool."""

MAX_LINES = 20
"""Limit of the lines of each action that a project can cause in a window, and of each logger of a library."""

WINDOW_S = 60.0
"""Length of a window in seconds."""

_INDENT = "    "
_MAX_COUNTS = 4_096  # of lines, by action and project
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
    """Remove URL queries, user info, authorization and passwords from a masked message of a library.

    Mask it before: the redactor does not recognize a secret of which a part was removed.
    """
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

    def _texts(self, record: logging.LogRecord, fields: Mapping[str, Any]) -> tuple[str, str]:
        """Return the message, and the traceback after a line break: limited, and a library's without details."""
        max_chars = MESSAGE_CHARS if _PROJECT in fields else _MAX_CHARS
        message = self._head(record.getMessage(), max_chars)
        traceback = ""
        if record.exc_info:
            traceback = self._head(f"\n{self.formatException(record.exc_info)}", _MAX_CHARS)
        if record.name.partition(".")[0] != _PACKAGE:
            message = without_details(self._redactor.text(message))
            traceback = without_details(self._redactor.text(traceback))
        return message, traceback

    def _head(self, text: str, chars: int) -> str:
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
        fields = self._fields(record)
        message, traceback = self._texts(record, fields)
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        line = printable_line(self._redactor.text(f"{message}  {shown}"))
        traceback = printable_lines(self._redactor.text(traceback), _INDENT)
        return f"{at} {record.levelname:7} {line}{traceback}"


MAX_QUEUED_BYTES = 4 * 2**20
"""Limit of the lines that wait to be written; beyond it lines are dropped until half of the queue is written."""

FLUSH_S = 1.0
"""Longest wait in seconds, at the end of the process, for the queued lines to be written."""

PAUSE_S = 0.01
"""Seconds in which further lines collect once the queue is written: waking the thread costs more than a line."""


class _Handler(logging.Handler):
    """Writes lines to a stream; in `background` a daemon thread does, so that no reader can block the event loop.

    Lines that cannot be written, or that the queue cannot hold, are dropped and counted; the next line that is written
    follows one with their number.

    logging's QueueHandler and QueueListener would need as much code around them: `stop` waits for a blocked thread
    without a limit, and nothing counts or reports what the queue drops.
    """

    def __init__(self, stream: TextIO, *, background: bool = False) -> None:
        super().__init__()
        self._write = _writer(stream)
        self._encoding = stream.encoding or "utf-8"
        self._background = background
        self._queue: deque[tuple[int, bytes]] = deque()  # each line with the number of lines dropped before it
        self._queued_bytes = 0
        self._dropped = 0  # behind the last line of the queue
        self._unreported = 0  # before the first line of the queue
        self._writing = False
        # The handler's own lock, which `handle` holds: with two locks, threads could wait for each other, as garbage
        # collection may call a crash hook, which logs, at any point.
        self._changed = threading.Condition(self.lock)
        if background:
            threading.Thread(target=self._write_queue, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; without a thread, write it. It is formatted here, because its call is a context variable."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - any; only the source location is written, not the arguments
            kind = type(error).__name__
            line = f"a log record of {record.name}, line {record.lineno}, could not be written: {kind}"
        self._put(f"{line}\n".encode(self._encoding, "backslashreplace"))
        if self._background:
            self._changed.notify_all()
        else:
            self._write_out(*self._take())

    def _put(self, line: bytes) -> None:
        limit = MAX_QUEUED_BYTES // 2 if self._dropped else MAX_QUEUED_BYTES
        if self._queue and self._queued_bytes + len(line) > limit:
            self._dropped += 1
            on_dropped(1)
            return
        self._queue.append((self._dropped, line))
        self._queued_bytes += len(line)
        self._dropped = 0

    def _take(self) -> tuple[int, bytes]:
        """Return the next line and the number of lines dropped before it; the line is empty if none is queued."""
        dropped, line = self._queue.popleft() if self._queue else (self._dropped, b"")
        self._queued_bytes -= len(line)
        if not line:
            self._dropped = 0
        self._writing = True
        return dropped, line

    def _write_queue(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._dropped)
                taken = self._take()
            self._write_out(*taken)
            if not self._queue:
                time.sleep(PAUSE_S)

    def _write_out(self, dropped: int, line: bytes) -> None:
        self._unreported += dropped
        try:
            if self._unreported:
                self._write(self._report(self._unreported))
                self._unreported = 0
            self._write(line)
            failed = 0
        except (OSError, ValueError):  # ValueError: the stream is closed
            failed = 1 if line else 0
        with self._changed:
            self._unreported += failed
            on_dropped(failed)
            self._writing = False
            self._changed.notify_all()

    def _report(self, dropped: int) -> bytes:
        record = log.makeRecord(
            *(log.name, logging.WARNING, "", 0, "%s log lines were dropped", (dropped,), None),
            extra={"action": "log.dropped", "lines": dropped},
        )
        return f"{self.format(record)}\n".encode(self._encoding, "backslashreplace")

    def flush(self) -> None:
        """Wait until the queue is written, for FLUSH_S at most; logging calls this at the interpreter's exit."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._dropped or self._writing), FLUSH_S)


def _writer(stream: TextIO) -> Callable[[bytes], object]:
    """Return a function that writes a line to the stream's file, or to the stream if it has none, as in tests.

    If a thread is blocked in a write of `sys.stderr`, the interpreter aborts at its exit, as it cannot flush it.
    """
    try:
        return _File(stream.fileno()).write
    except OSError:
        return lambda line: (stream.write(line.decode(stream.encoding or "utf-8")), stream.flush())


class _File:
    """File that gets whole lines: what is left of a line that could be written in part only ends with a line break."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._torn = False

    def write(self, line: bytes) -> None:
        """Write a line. Raises OSError."""
        rest = memoryview(b"\n" + line if self._torn else line)
        while rest:
            try:
                rest = rest[os.write(self._number, rest) :]
            except BlockingIOError:  # another process that has the file open made it non-blocking
                wait_until_writable(self._number)
            else:
                self._torn = bool(rest)


def wait_until_writable(number: int) -> None:
    """Wait until a file descriptor takes data."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(number, select.POLLOUT)
    poll.poll()


class ProjectLimit(logging.Filter):
    """Passes MAX_LINES lines of each action and project within WINDOW_S; drops and counts the others.

    The next line that passes has their number as `dropped`. All lines that a project can cause are limited, those of a
    call and those about a project, except UNLIMITED and lines at debug level, which an operator asks for. So are the
    lines of each logger of a library: uvicorn writes one for each request that is no HTTP, whoever sends it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._ends_at = 0.0
        self._lines: dict[tuple[str, str], int] = {}
        self._dropped: LRUCache[tuple[str, str], int] = LRUCache(_MAX_COUNTS)
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        action = getattr(record, "action", "log")
        if record.levelno <= logging.DEBUG or action in UNLIMITED:
            return True
        project = getattr(record, _PROJECT, None)
        if project is None and (project := CALL_FIELDS.get()().get(_PROJECT)) is None:
            if record.name.partition(".")[0] == _PACKAGE:
                return True
            action, project = record.name, ""
        with self._lock:
            return self._passes(record, (action, project))

    def _passes(self, record: logging.LogRecord, key: tuple[str, str]) -> bool:
        now = self._now()
        if now >= self._ends_at:
            self._lines.clear()
            self._ends_at = now + WINDOW_S
        if key not in self._lines and len(self._lines) >= _MAX_COUNTS:
            key = (key[0], "")  # further projects share one limit: many of them must not use up the memory
        self._lines[key] = self._lines.get(key, 0) + 1
        if self._lines[key] > MAX_LINES:
            self._dropped[key] = self._dropped.get(key, 0) + 1
            on_limited(1)
            return False
        if dropped := self._dropped.pop(key, 0):
            record.dropped = dropped
        return True


def configure_logging(
    level: str, log_format: Literal["json", "console"], redactor: Redactor, *, background: bool = False
) -> None:
    """Send all records to standard error through the redactor, those of libraries from WARNING on.

    In `background` a thread writes them; call `logging.shutdown` before `os._exit`, else the last ones are lost.
    """
    # No line shows these.
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
    handler = _Handler(sys.stderr, background=background)
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
