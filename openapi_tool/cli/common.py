"""Shared parts of commands: output, errors, tables that truncate no cell, and the embedded stack."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from enum import StrEnum
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from openapi_tool.telemetry.logs import printable_json, printable_line, printable_lines, wait_until_writable
from openapi_tool.tools.definition import DEFAULT_AUTH_ENV

if TYPE_CHECKING:
    from openapi_tool.local.executor import ExecutorProcess
    from openapi_tool.local.stack import EmbeddedStack


USAGE = 2
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in shells."""

OUTPUT_CLOSED = 141
"""Exit code for a closed pipe: 128 plus the number of SIGPIPE, as in shells."""

_FAILED = 1
NO_DATABASE = {"postgres": {"dsn": "postgresql://unused"}}
"""Placeholder for commands without a database, because `postgres.dsn` is required."""


class UpstreamChoice(StrEnum):
    """Upstream of the calls."""

    DOUBLE = "double"
    REAL = "real"


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
UpstreamOption = Annotated[UpstreamChoice, typer.Option(help=f"Upstream to use; real needs {DEFAULT_AUTH_ENV}.")]


def print_status(text: str, *, quiet: bool = False, colour: str | None = None) -> None:
    """Print a status text on standard error. Further lines are indented, so that none can look like another message."""
    if not quiet:
        typer.secho(printable_lines(text, "  "), err=True, fg=colour)


def print_line(text: str) -> None:
    """Print one line on standard output."""
    typer.echo(printable_line(text))


def print_json(value: Any, indent: int | None = None) -> None:
    """Print JSON on standard output."""
    typer.echo(printable_json(value, indent))


def or_dash(value: object) -> str:
    """Return a value as text, a missing one as a dash."""
    return "-" if value is None else str(value)


def cell(value: object) -> Text:
    """Return a table cell: one line, without rich markup."""
    return Text(printable_line(str(value)))


def fail(text: str, code: int = USAGE) -> NoReturn:
    """Print an error, and exit."""
    print_status(f"openapi-tool: {text}")
    raise typer.Exit(code)


def json_default(value: object) -> str:
    """Return as text a value that JSON cannot represent."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


@contextmanager
def extra_needed(command: str) -> Iterator[None]:
    """Exit with a hint if an import needs the extra [local]."""
    try:
        yield
    except ModuleNotFoundError as missing:
        fail(f"{command} needs the embedded stack ({missing.name} is missing): pip install 'openapi-tool[local]'")


def executor_settings(upstream: UpstreamChoice) -> dict[str, str]:
    """Return variables of an executor that logs every call. Exits if the key for the real upstream is missing."""
    level = {"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"}
    if upstream is UpstreamChoice.DOUBLE:
        return {**level, "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "SEARCH_API_KEY"}
    key = os.environ.get(DEFAULT_AUTH_ENV)
    if not key:
        fail(f"--upstream real needs a key of Jina in {DEFAULT_AUTH_ENV}")
    return {**level, DEFAULT_AUTH_ENV: key}


@contextmanager
def running(
    stack: EmbeddedStack,
    database: str,
    prepare: Callable[[EmbeddedStack], Coroutine[Any, Any, None]],
    settings: Mapping[str, str],
    *,
    quiet: bool = False,
) -> Iterator[ExecutorProcess]:
    """Run the prepared stack with an executor on `database`. Raises ServerFailed."""
    real = DEFAULT_AUTH_ENV in settings
    print_status("Starting PostgreSQL, NATS and the upstream …", quiet=quiet)
    with stack:
        asyncio.run(prepare(stack))
        executor = stack.executor("executor", database, settings, real_upstream=real)
        print_status("Starting the executor …", quiet=quiet)
        executor.start()
        yield executor
        executor.stop()


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


_UNLIMITED_WIDTH = 100_000
_FOLD_ABOVE = 14  # characters; a column with shorter cells never folds


def output() -> Console:
    """Return the console of standard output; in a file or pipe, without COLUMNS, tables have their natural width."""
    natural = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_UNLIMITED_WIDTH if natural else None)


async def redraw(
    console: Console, first: RenderableType, draw: Callable[[], Awaitable[RenderableType]], every_s: float
) -> None:
    """Draw on the terminal, or print to a file or pipe, every `every_s` seconds until Ctrl-C or SIGTERM."""
    task = asyncio.current_task()
    if task is not None:  # asyncio does the same for Ctrl-C, which a shell's background jobs ignore
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    drawn = first
    screen = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else nullcontext()
    try:
        with screen as live:
            while True:
                if live is None:
                    console.print(drawn)
                else:
                    live.update(drawn, refresh=True)
                began = time.monotonic()
                drawn = await draw()
                await asyncio.sleep(began + every_s - time.monotonic())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class Rows:
    """Rows under headings, drawn as a table.

    In a narrow terminal there is no padding and headings fold; in a narrower one each row becomes lines
    `heading: cell`. The last `numbers` columns are right-aligned; `footed` draws a line above the last row.
    """

    def __init__(self, *heads: str, title: str | None = None, numbers: int = 0, footed: bool = False) -> None:
        self._heads, self._title, self._numbers, self._footed = heads, title, numbers, footed
        self._rows: list[tuple[str, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *values: object) -> None:
        """Add a row; each value becomes one line, without rich markup."""
        self._rows.append(tuple(cell(value).plain for value in values))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the widest form that fits."""
        longest = [max((cell_len(row[n]) for row in self._rows), default=0) for n in range(len(self._heads))]
        for padding in (1, 0):
            heads = [head if padding else "\n".join(head.replace("_", " ").split()) for head in self._heads]
            widths = map(_width, longest, heads)
            if sum(widths) + (2 * padding + 1) * len(heads) + 1 <= options.max_width:
                yield self._table(heads, longest, padding)
                return
        if self._title:
            yield Text(self._title)
        for row in self._rows:
            yield Text("\n".join(f"{head}: {value}" for head, value in zip(self._heads, row, strict=True)) + "\n")

    def _table(self, heads: list[str], longest: list[int], padding: int) -> Table:
        columns = (
            Column(
                Text(head),
                justify="right" if column >= len(heads) - self._numbers else "left",
                no_wrap=longest[column] <= _FOLD_ABOVE,
                overflow="fold",
            )
            for column, head in enumerate(heads)
        )
        table = Table(*columns, title=self._title and Text(self._title), padding=(0, padding))
        for number, row in enumerate(self._rows, 1):
            if self._footed and number == len(self._rows):
                table.add_section()
            table.add_row(*map(cell, row))
        return table


def _width(longest: int, head: str) -> int:
    words = head.split() if longest > _FOLD_ABOVE else head.split("\n")
    return max(min(longest, _FOLD_ABOVE), *map(cell_len, words))
