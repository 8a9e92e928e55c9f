"""`openapi-tool usage`: what the calls of a project cost."""

from __future__ import annotations

import asyncio
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.common import USAGE, fail, print_json, print_status
from openapi_tool.cli.kernels import ProtocolOption, kernel_bootstrap
from openapi_tool.cli.tables import Rows, output
from openapi_tool.kernel.failures import located
from openapi_tool.kernel.queries import MAX_ROWS, By, usage
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subject import is_token
from openapi_tool.telemetry.logs import printable_line
from openapi_tool.tools.problems import short

_FIGURES = ("calls", "tokens", "requests", "cache_hits", "errors", "truncated", "retries", "p50_ms", "p95_ms")
_SPAN = re.compile(r"([0-9]{1,4}+)([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_UNKNOWN = "\N{EN DASH}"
_MAX_BARS = 20


def show_usage(
    *,
    project: Annotated[str, typer.Option(help="Project of the calls.")],
    since: Annotated[str, typer.Option(help="Start: 7d, 24h, 30m, or a date or time in ISO 8601 (UTC).")] = "7d",
    until: Annotated[str | None, typer.Option(help="End, in the same forms; by default now.")] = None,
    by: Annotated[By, typer.Option(help="What to sum up by.")] = By.TOOL,
    protocol: ProtocolOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV only.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens and calls as PNG; needs the extra [plot].")] = None,
) -> None:
    """Sum up calls, tokens, requests, cache hits, errors, truncations, retries and latency from the result cards.

    Days are in UTC. A dash means that no card records the value. Exit codes: 0, 2 invalid settings or options,
    or PostgreSQL cannot be reached.
    """
    if as_json and as_csv:
        fail("--json and --csv exclude each other; name one")
    if not is_token(project):
        fail(f"--project: {short(project)!r} is no project id: it is empty or contains blanks or `.*>`", USAGE)
    now = datetime.now(UTC)
    start, end = _moment(since, now, "--since"), _moment(until, now, "--until") if until else now
    if start >= end:
        fail("--since must be before --until")
    total, rows = _read(kernel_bootstrap(protocol), project, start, end, by)
    if plot is not None:
        _plot(plot, rows, f"{project} by {by}, {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC")
    if as_json:
        span = {"since": start.isoformat(), "until": end.isoformat()}
        print_json({"project_id": project, **span, "by": by, "total": total, "rows": rows})
    elif as_csv:
        _print_csv(by, rows)
    else:
        _print_table(by, rows, total)


def _moment(text: str, now: datetime, option: str) -> datetime:
    """Return a moment in UTC from a span before now or an ISO 8601 text; exits if it is neither."""
    if span := _SPAN.fullmatch(text):
        return now - timedelta(**{_UNITS[span[2]]: int(span[1])})
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        fail(f"{option} {text!r} is neither a span such as 7d, 24h or 30m nor a date or time such as 2030-01-31T12:00")


def _read(
    bootstrap: Bootstrap, project: str, start: datetime, end: datetime, by: By
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the sum over all calls, and the rows by `by`; exits if the database is unavailable."""
    rows = _fetched(bootstrap, project, start, end, by)
    figures = [{"key": row["key"], **{name: row[name] for name in _FIGURES}} for row in rows]
    if len(figures) > MAX_ROWS:
        print_status(f"only the first {MAX_ROWS:,} rows are shown; name a shorter time with --since and --until")
    total = {name: figures[0][name] for name in _FIGURES}
    return total, figures[1 : MAX_ROWS + 1]


def _fetched(bootstrap: Bootstrap, project: str, start: datetime, end: datetime, by: By) -> list[dict[str, Any]]:
    pool, actor_id = bootstrap.pool, bootstrap.settings.actor_id
    try:
        return asyncio.run(usage(pool.dsn, pool.version, project, start, end, actor_id, by))
    except Unavailable as error:
        fail(bootstrap.redactor.text(located(str(error), pool.where, pool.setting)), USAGE)


def _print_table(by: By, rows: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> None:
    if not rows:
        print_status("no calls in this time")
        return
    table = Rows(by, *_FIGURES, numbers=len(_FIGURES), footed=True)
    for row in (*rows, {"key": "all", **total}):
        table.add(_shown(row["key"]), *(_shown(row[name]) for name in _FIGURES))
    output().print(table)


def _shown(value: object) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_csv(by: By, rows: Sequence[Mapping[str, Any]]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow((by, *_FIGURES))
    for row in rows:
        writer.writerow((_csv_text(row["key"]), *(row[name] for name in _FIGURES)))


def _csv_text(value: object) -> str:
    """Return a cell that no spreadsheet reads as a formula: names and sessions are chosen by agents and models."""
    text = "" if value is None else printable_line(str(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _plot(file: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw tokens and calls as bars, of the first rows only. Exits without matplotlib, or if it cannot write."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        fail("--plot needs matplotlib: pip install 'openapi-tool[plot]'")
    drawn = rows[:_MAX_BARS]
    names = [printable_line(_shown(row["key"]))[:40].replace("$", r"\$") for row in drawn]
    figure = Figure(figsize=(8, 2 + 0.3 * len(drawn)), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("tokens", "calls"), strict=True):
        axes.barh(range(len(drawn)), [row[name] or 0 for row in drawn])
        axes.set_yticks(range(len(drawn)), names)
        axes.set_title(name)
    figure.axes[0].invert_yaxis()
    figure.suptitle(printable_line(title).replace("$", r"\$"))
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        fail(f"--plot: cannot write {file}: {error.strerror}")
    print_status(f"wrote {file}")
