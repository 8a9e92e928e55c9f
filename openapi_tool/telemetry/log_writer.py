"""Writing of log lines to standard error: for services in a thread, so that no slow reader can block the event loop."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TextIO

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 4 * 2**20
"""Limit of the lines that wait to be written; beyond it lines are dropped until half of the queue is written."""

FLUSH_S = 1.0
"""Longest wait in seconds, at the end of the process, for the queued lines to be written."""

PAUSE_S = 0.01
"""Seconds in which further lines collect once the queue is written: waking the thread costs more than a line."""


class _Queued(NamedTuple):
    """A line that waits, and how many lines were dropped just before it.

    If no line waits, `line` is empty, and `dropped_before` has the lines that were dropped last.
    """

    line: bytes
    dropped_before: int


class LogWriter(logging.Handler):
    """Writes lines to a stream; in `background` a daemon thread does.

    Lines that cannot be written, or that the queue cannot hold, are dropped. `on_dropped` counts them. A line with
    their number precedes the next one that is written.

    logging's QueueHandler and QueueListener would need as much code around them: `stop` waits for a blocked thread
    without a limit, and nothing counts or reports what the queue drops.
    """

    def __init__(
        self, stream: TextIO, *, background: bool = False, on_dropped: Callable[[int], object] = lambda _: None
    ) -> None:
        super().__init__()
        self._write = _writer(stream)
        self._encoding = stream.encoding or "utf-8"
        self._background = background
        self._on_dropped = on_dropped
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._dropped = 0  # behind the last line of the queue
        self._unreported = 0  # lines that were dropped before what is written now
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
        self._put(self._encoded(line))
        if self._background:
            self._changed.notify_all()
        else:
            self._write_out(self._take())

    def _encoded(self, line: str) -> bytes:
        return f"{line}\n".encode(self._encoding, "backslashreplace")

    def _put(self, line: bytes) -> None:
        """Queue a line, or drop it. After a dropped one, the queue must shrink to its half before it takes more."""
        limit = MAX_QUEUED_BYTES // 2 if self._dropped else MAX_QUEUED_BYTES
        if self._queue and self._queued_bytes + len(line) > limit:
            self._dropped += 1
            self._on_dropped(1)
            return
        self._queue.append(_Queued(line, self._dropped))
        self._queued_bytes += len(line)
        self._dropped = 0

    def _take(self) -> _Queued:
        """Remove and return the next line; an empty one if none is queued."""
        self._writing = True
        if self._queue:
            queued = self._queue.popleft()
            self._queued_bytes -= len(queued.line)
        else:
            queued = _Queued(b"", self._dropped)
            self._dropped = 0
        return queued

    def _write_queue(self) -> None:
        """Write lines for ever (in the thread)."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._dropped)
                queued = self._take()
            self._write_out(queued)
            if not self._queue:
                time.sleep(PAUSE_S)

    def _write_out(self, queued: _Queued) -> None:
        self._unreported += queued.dropped_before
        try:
            if self._unreported:
                self._write(self._report(self._unreported))
                self._unreported = 0
            self._write(queued.line)
            failed = 0
        except (OSError, ValueError):  # ValueError: the stream is closed
            failed = 1 if queued.line else 0
        with self._changed:
            self._unreported += failed
            self._on_dropped(failed)
            self._writing = False
            self._changed.notify_all()

    def _report(self, dropped: int) -> bytes:
        """Return a line that says how many were dropped."""
        record = log.makeRecord(
            name=log.name,
            level=logging.WARNING,
            fn="",
            lno=0,
            msg="%s log lines were dropped",
            args=(dropped,),
            exc_info=None,
            extra={"action": "log.dropped", "lines": dropped},
        )
        return self._encoded(self.format(record))

    def flush(self) -> None:
        """Wait until the queue is written, for FLUSH_S at most; logging calls this at the interpreter's exit."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._dropped or self._writing), FLUSH_S)


def _writer(stream: TextIO) -> Callable[[bytes], object]:
    """Return a function that writes a line to the stream's file, or to the stream if it has none, as in tests.

    Not to the stream in any case: if a thread is blocked in a write of `sys.stderr`, the interpreter cannot flush it at
    its exit, and aborts.
    """
    try:
        return _File(stream.fileno()).write
    except OSError:
        return lambda line: (stream.write(line.decode(stream.encoding or "utf-8")), stream.flush())


class _File:
    """File that gets whole lines. If only a part of a line could be written, a line break precedes the next one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ends_within_line = False

    def write(self, line: bytes) -> None:
        """Write a line. Raises OSError."""
        unwritten = memoryview(b"\n" + line if self._ends_within_line else line)
        while unwritten:
            try:
                count = os.write(self._descriptor, unwritten)
            except BlockingIOError:  # another process that has the file open made it non-blocking
                wait_until_writable(self._descriptor)
            else:
                unwritten = unwritten[count:]
                self._ends_within_line = bool(unwritten)


def wait_until_writable(descriptor: int) -> None:
    """Wait until a file descriptor takes data."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(descriptor, select.POLLOUT)
    poll.poll()
