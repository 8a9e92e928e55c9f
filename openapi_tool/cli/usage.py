"""`openapi-tool usage`: what the calls of a project cost, as a table, JSON, CSV or a picture."""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openapi_tool.cli.gateway_usage import gateway_usage
from openapi_tool.cli.kernel_usage import SUMS_OF_RESULTS, kernel_usage
from openapi_tool.cli.output import fail, print_json, print_status
from openapi_tool.cli.selection import other_project, selected_project
from openapi_tool.cli.tables import Rows, output
from openapi_tool.cli.times import time_before
from openapi_tool.cli.usage_sums import UsageQuery, UsageSums
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.protocol.printable import printable_line
from openapi_tool.quotas.amounts import Amount
from openapi_tool.tools.wording import short

_WITHOUT_RESULT = ("no_result", "no_result_tokens")
"""Requests and tokens that were charged to the project for calls without a stored result."""

_COLUMNS = (*SUMS_OF_RESULTS, *_WITHOUT_RESULT)
_UNKNOWN = "\N{EN DASH}"
_MAX_BARS = 20
_MAX_BAR_NAME_CHARS = 40


def usage(
    *,
    project: str | None,
    since: str,
    until: str | None,
    by: By,
    as_json: bool,
    as_csv: bool,
    plot: Path | None,
    state: Path | None = None,
) -> None:
    """Print what the calls of a project cost, from the result cards of a kernel, or the rows of a gateway."""
    if as_json and as_csv:
        fail("--json and --csv exclude each other; name one")
    selected = selected_project(state, project)
    query = _query(selected.project, since, until, by)
    sums = kernel_usage(query) if selected.state is None else gateway_usage(selected.state, query)
    _add_amounts_without_result(sums, by)
    if plot is not None:
        shown_period = f"{query.start:%Y-%m-%d %H:%M} to {query.end:%Y-%m-%d %H:%M} UTC"
        _plot(plot, sums.rows, f"{query.project} by {by}, {shown_period}")
    if as_json:
        span = {"since": query.start.isoformat(), "until": query.end.isoformat()}
        print_json({"project_id": query.project, **span, "by": by, "total": sums.total, "rows": sums.rows})
    elif as_csv:
        _print_csv(by, sums.rows)
    elif sums.rows:
        _print_table(by, sums.rows, sums.total)
    else:
        print_status(f"no calls of project {short(query.project)!r} in this time{other_project(project)}")


def _query(project: str, since: str, until: str | None, by: By) -> UsageQuery:
    """Return the query for the times that the options name; exit with 2 if one of them is invalid."""
    now = datetime.now(UTC)
    start = time_before(since, now, "--since")
    end = time_before(until, now, "--until") if until else now
    if start >= end:
        fail("--since must be before --until")
    return UsageQuery(project, start, end, by)


def _add_amounts_without_result(sums: UsageSums, by: By) -> None:
    """Add the columns `_WITHOUT_RESULT` to the total and the rows; None if nothing is known."""
    sums.total.update(_amounts_without_result(sums.without_result.values()))
    for row in sums.rows:
        # Accounts are by day or month, so they say nothing of one tool, agent, session or error.
        of_day = sums.without_result.get(row["key"]) if by is By.DAY else None
        row.update(_amounts_without_result([] if of_day is None else [of_day]))


def _amounts_without_result(amounts: Collection[Amount]) -> dict[str, int | None]:
    """Return the sums of the amounts as columns.

    A sum may be below 0, as a result may count for another day than its requests; then 0 is shown.
    """
    if not amounts:
        return dict.fromkeys(_WITHOUT_RESULT)
    requests = sum(amount.requests for amount in amounts)
    tokens = sum(amount.tokens for amount in amounts)
    return dict(zip(_WITHOUT_RESULT, (max(0, requests), max(0, tokens)), strict=True))


def _print_table(by: By, rows: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> None:
    table = Rows(by, *_COLUMNS, numbers=len(_COLUMNS), footed=True)
    for row in (*rows, {"key": "all", **total}):
        table.add(_cell_text(row["key"]), *(_cell_text(row[name]) for name in _COLUMNS))
    output().print(table)


def _cell_text(value: object) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_csv(by: By, rows: Sequence[Mapping[str, Any]]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow((by, *_COLUMNS))
    for row in rows:
        writer.writerow((_csv_text(row["key"]), *(row[name] for name in _COLUMNS)))


def _csv_text(value: object) -> str:
    """Return a key, which an agent or a model may have chosen, so that a spreadsheet takes it for no formula."""
    text = "" if value is None else printable_line(str(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _plot(file: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw the tokens and the calls of the first rows as bars, beside each other, and write them as PNG."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        fail("--plot needs matplotlib: pip install 'openapi-tool[plot]'")
    drawn = rows[:_MAX_BARS]
    names = [_drawable(printable_line(_cell_text(row["key"]))[:_MAX_BAR_NAME_CHARS]) for row in drawn]
    figure = Figure(figsize=(8, 2 + 0.3 * len(drawn)), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("tokens", "calls"), strict=True):
        axes.barh(range(len(drawn)), [row[name] or 0 for row in drawn])
        axes.set_yticks(range(len(drawn)), names)
        axes.set_title(name)
    figure.axes[0].invert_yaxis()
    figure.suptitle(_drawable(printable_line(title)))
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        fail(f"--plot: cannot write {file}: {error.strerror}")
    print_status(f"wrote {file}")


def _drawable(text: str) -> str:
    """Return text in which matplotlib finds no formula: it would take one between two dollars."""
    return text.replace("$", r"\$")
