"""Output and errors of commands."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import datetime
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, NoReturn

import typer

from openapi_tool.telemetry.logs import printable_json, printable_line, printable_lines, wait_until_writable

USAGE = 2
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in shells."""

OUTPUT_CLOSED = 141
"""Exit code for a closed pipe: 128 plus the number of SIGPIPE, as in shells."""

_FAILED = 1
NO_DATABASE = {"postgres": {"dsn": "postgresql://unused"}}
"""Placeholder for commands without a database, because `postgres.dsn` is required."""


def print_status(text: str, *, quiet: bool = False, colour: str | None = None) -> None:
    """Print a status text on standard error. Further lines are indented, so that none can look like another message."""
    if not quiet:
        typer.secho(printable_lines(text, "  "), err=True, fg=allowed_colour(colour))


def allowed_colour(colour: str | None) -> str | None:
    """Return the colour, or None if the user wants no colours (https://no-color.org)."""
    return None if os.environ.get("NO_COLOR") else colour


def print_line(text: str) -> None:
    """Print one line on standard output."""
    typer.echo(printable_line(text))


def print_json(value: Any, indent: int | None = None) -> None:
    """Print JSON on standard output."""
    typer.echo(printable_json(value, indent))


def or_dash(value: object) -> str:
    """Return a value as text, a missing one as a dash."""
    return "-" if value is None else str(value)


def fail(text: str, code: int = USAGE) -> NoReturn:
    """Print an error, and exit."""
    print_status(f"openapi-tool: {text}")
    raise typer.Exit(code)


def json_default(value: object) -> str:
    """Return as text a value that JSON cannot represent."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


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
            while (written := super().write(data)) is None:  # another process made the file non-blocking
                wait_until_writable(self.fileno())
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
    # Otherwise the interpreter prints an error when it flushes buffered output at exit.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
