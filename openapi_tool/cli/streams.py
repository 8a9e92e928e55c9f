"""Standard output and error that survive closed pipes and full disks.

If standard output cannot be written, as its reader has closed the pipe, the program ends without a traceback.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

from openapi_tool.telemetry.log_writer import wait_until_writable

OUTPUT_CLOSED = 141
"""Exit code for a closed pipe: 128 plus the number of SIGPIPE, as in shells."""

_FAILED = 1


class _Output(FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _discard_output(self.fileno())
            if isinstance(error, BrokenPipeError):
                raise SystemExit(OUTPUT_CLOSED) from None
            sys.stderr.write(f"openapi-tool: standard output cannot be written: {error.strerror}\n")
            raise SystemExit(_FAILED) from None


class _Errors(FileIO):
    def write(self, data: Any, /) -> int:
        """Write data, or drop it: a failure would change the exit code, also later, when Python flushes the stream."""
        with suppress(OSError):
            written = super().write(data)
            while written is None:  # another process made the file non-blocking, and there is no room now
                wait_until_writable(self.fileno())
                written = super().write(data)
            return written
        return len(data)


def guard_output() -> None:
    """Let standard output exit on a failed write, and standard error ignore it; escape what their encoding lacks."""
    if isinstance(sys.stdout, TextIOWrapper):  # else replaced by a test
        sys.stdout = _guarded(sys.stdout, _Output, line_buffering=sys.stdout.isatty())
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = _guarded(sys.stderr, _Errors, line_buffering=True)


def _guarded(stream: TextIOWrapper, kind: type[FileIO], *, line_buffering: bool) -> TextIOWrapper:
    raw = BufferedWriter(kind(stream.fileno(), "wb", closefd=False))
    return TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=line_buffering)


def _discard_output(descriptor: int) -> None:
    """Let a descriptor write to nowhere: else the interpreter prints an error when it flushes buffered output."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
