"""Handling of a closed or full standard output: exit like other programs, without a traceback."""

from __future__ import annotations

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

OUTPUT_CLOSED = 141
"""Exit code for a closed pipe: 128 plus the number of SIGPIPE, as in shells."""

_FAILED = 1


class _Output(FileIO):
    """File of standard output; a failed write raises SystemExit."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _discard_output(self.fileno())
            if isinstance(error, BrokenPipeError):
                raise SystemExit(OUTPUT_CLOSED) from None
            sys.stderr.write(f"openapi-tool: standard output cannot be written: {error.strerror}\n")
            raise SystemExit(_FAILED) from None


def guard_output() -> None:
    """Replace standard output, if it is a file. Characters that its encoding lacks are escaped."""
    now = sys.stdout
    if not isinstance(now, TextIOWrapper):
        return
    raw = BufferedWriter(_Output(now.fileno(), "wb", closefd=False))
    sys.stdout = TextIOWrapper(raw, now.encoding, "backslashreplace", line_buffering=now.isatty())


def _discard_output(descriptor: int) -> None:
    """Redirect buffered output to /dev/null. Otherwise the interpreter prints an error when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
