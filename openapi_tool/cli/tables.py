"""Tables that truncate no cell, and the console that draws them; imports rich, which takes a while."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from openapi_tool.protocol.printable import printable_line

_UNLIMITED_WIDTH = 100_000
_FOLD_ABOVE = 14  # characters; a column with shorter cells never folds


def cell(value: object) -> Text:
    """Return a table cell: one line, without rich markup."""
    return Text(printable_line(str(value)))


def output() -> Console:
    """Return the console of standard output; in a file or pipe, without COLUMNS, tables have their natural width."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if has_width else _UNLIMITED_WIDTH)


async def redraw(
    console: Console, first: RenderableType, draw: Callable[[], Awaitable[RenderableType]], every_s: float
) -> None:
    """Draw on the terminal, or print to a file or pipe, every `every_s` seconds until Ctrl-C or SIGTERM."""
    task = asyncio.current_task()
    if task is not None:
        # Let SIGTERM do what asyncio does at Ctrl-C (SIGINT): a job in the background of a shell ignores SIGINT.
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
                next_at = time.monotonic() + every_s
                drawn = await draw()
                await asyncio.sleep(next_at - time.monotonic())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class Rows:
    """Rows under headings, drawn as a table.

    In a narrow terminal there is no padding and headings fold; in a narrower one each row becomes lines
    `heading: cell`. The last `numbers` columns are right-aligned; `footed` draws a line above the last row.
    """

    def __init__(self, *heads: str, title: str | None = None, numbers: int = 0, footed: bool = False) -> None:
        self._heads = heads
        self._title = title
        self._numbers = numbers
        self._footed = footed
        self._rows: list[tuple[str, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *values: object) -> None:
        """Add a row; each value becomes one line, without rich markup."""
        self._rows.append(tuple(cell(value).plain for value in values))  # plain, so that widths can be measured

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the widest form that fits."""
        longest_cells = [
            max((cell_len(row[column]) for row in self._rows), default=0) for column in range(len(self._heads))
        ]
        folded_heads = ["\n".join(head.replace("_", " ").split()) for head in self._heads]
        for heads, padding in ((list(self._heads), 1), (folded_heads, 0)):
            # Each column has padding on both sides and a line to its right; the first one has a line to its left, too.
            width = sum(map(_column_width, longest_cells, heads)) + (2 * padding + 1) * len(heads) + 1
            if width <= options.max_width:
                yield self._table(heads, longest_cells, padding)
                return
        if self._title:
            yield Text(self._title)
        for row in self._rows:
            lines = [f"{head}: {value}" for head, value in zip(self._heads, row, strict=True)]
            yield Text("\n".join(lines) + "\n")

    def _table(self, heads: list[str], longest_cells: list[int], padding: int) -> Table:
        columns = (
            Column(
                Text(head),
                justify="right" if column >= len(heads) - self._numbers else "left",
                no_wrap=longest_cells[column] <= _FOLD_ABOVE,
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


def _column_width(longest_cell: int, head: str) -> int:
    """Return the least width of a column: if its cells may fold, its heading may fold at blanks, too."""
    may_fold = longest_cell > _FOLD_ABOVE
    words = head.split() if may_fold else head.split("\n")
    return max(min(longest_cell, _FOLD_ABOVE), *map(cell_len, words))
