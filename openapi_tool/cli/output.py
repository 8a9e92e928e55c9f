"""What commands print, and their exit codes."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from typing import Any, NoReturn

import typer

from openapi_tool.protocol.abridging import abridged
from openapi_tool.protocol.printable import printable_json, printable_line, printable_lines

USAGE = 2
"""Exit code for wrong options or settings, and for servers that cannot be reached."""

MAX_ERROR_CHARS = 1_800
"""Characters of an error, which may quote an option or a path of any length."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in shells."""


def print_status(text: str, *, quiet: bool = False, colour: str | None = None) -> None:
    """Print a status text on standard error. Further lines are indented, so that none can look like another message."""
    if not quiet:
        typer.secho(printable_lines(text, "  "), err=True, **allowed_style(colour))


def allowed_style(colour: str | None) -> dict[str, Any]:
    """Return the colour as a style, or none if the user wants no colours (https://no-color.org)."""
    if colour is None or os.environ.get("NO_COLOR"):
        return {"reset": False}  # without it click would append a code that ends all styles
    return {"fg": colour}


def is_terminal() -> bool:
    """Return whether a person reads standard output."""
    return sys.stdout.isatty()


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
    print_status(f"openapi-tool: {abridged(text, MAX_ERROR_CHARS)}")
    raise typer.Exit(code)


def json_default(value: object) -> str:
    """Return as text a value that JSON cannot represent."""
    return value.isoformat() if isinstance(value, datetime) else str(value)
