"""`openapi-tool top` and `usage`."""

from __future__ import annotations

import asyncio
import csv
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.gateway import project_or_default, selected_state
from openapi_tool.cli.gateway_usage import usage as gateway_usage
from openapi_tool.cli.kernel import charged_in_nats, kernel_bootstrap
from openapi_tool.cli.output import fail, or_dash, print_json, print_status
from openapi_tool.cli.statistics import show_statistics_of
from openapi_tool.cli.tables import Rows, cell, output
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.queries import MAX_ROWS, reported, usage
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import is_token
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.charged import WithoutResult, without_result
from openapi_tool.telemetry.printable import printable_line
from openapi_tool.telemetry.replica_problems import but_noticed, found_problems
from openapi_tool.tools.wording import counted, short

_MAX_ROWS = 20
_COLUMNS = ("rate", "p50_ms", "p95_ms", "failed", "running", "waiting", "held", "oldest_held_s")


def top(*, once: bool, every_s: float, expect: int, as_json: bool, state: Path | None = None) -> None:
    """Print the statistics of all replicas, or processes of a gateway, once or every `every_s` seconds.

    Less than `expect` replicas are a problem.
    """
    show_statistics_of(
        state,
        partial(shown, expect=expect),
        partial(_as_object, expect=expect),
        as_json=as_json,
        every_s=None if once else every_s,
        gateway_lacks="no data for commands and lag: a gateway has no queue",
    )


def _as_object(replicas: Sequence[Mapping[str, Any]], expect: int) -> dict[str, Any]:
    found = found_problems(replicas, expect)
    return {"replicas": replicas, "problems": found.now, "earlier": found.earlier}


def shown(replicas: Sequence[Mapping[str, Any]], expect: int = 0) -> Group:
    """Return the problems, tables of replicas and tools, and what was wrong earlier.

    The present problems come first, because a terminal that is too low shows the beginning.
    """
    found = found_problems(replicas, expect)
    now = [_line(f"! {text}", "bold red") for text in found.now]
    if not now:
        noticed = but_noticed(replicas)
        now = [_line(f"no problem is known now{noticed}", "yellow" if noticed else "green")]
    table = Rows("replica", *_COLUMNS, title=f"{counted(len(replicas), 'replica')}, the last minute")
    for replica in replicas:
        table.add(*(_figure(replica.get(name)) for name in ("instance", *_COLUMNS)))
    earlier = [Text("earlier, within ten minutes:"), *(_line(f"- {text}", "dim") for text in found.earlier)]
    return Group(*now, table, *_lag(replicas), *_tools(replicas), *(earlier if found.earlier else ()))


def _figure(value: object) -> str:
    return str(round(value)) if isinstance(value, float) and value.is_integer() else or_dash(value)


def _line(text: str, style: str) -> Text:
    line = cell(text)
    line.stylize(style)
    return line


def _lag(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    # Replicas share the durable, so they report nearly the same numbers.
    reported = [replica for replica in replicas if "pending" in replica and "unacknowledged" in replica]
    if reported:
        pending = max(replica["pending"] for replica in reported)
        unsettled = max(replica["unacknowledged"] for replica in reported)
        yield cell(f"durable: {counted(pending, 'command')} not delivered, {unsettled} not settled")


def _tools(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Rows]:
    """Yield a table of the calls by project and tool, and of how many of them failed and why; none without calls."""
    calls: Counter[tuple[str, ...]] = Counter()
    failed: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for replica in replicas:
        for row in replica.get("tools") or ():
            calls[_tool(row)] += row["calls"]
        for row in replica.get("errors") or ():
            failed[_tool(row)][row["error_code"]] += row["calls"]
    if not calls:
        return
    table = Rows("project", "tool", "calls", "failed", "errors", title="calls by tool, the last minute")
    for key, count in calls.most_common(_MAX_ROWS):
        errors = failed[key]
        table.add(*key, count, errors.total(), ", ".join(f"{number} {code}" for code, number in errors.most_common()))
    yield table


def _tool(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["project"], row["tool"]


_OF_RESULTS = ("calls", "tokens", "requests", "cache_hits", "errors", "truncated", "retries", "p50_ms", "p95_ms")
_WITHOUT_RESULT = ("no_result", "no_result_tokens")
"""Requests and tokens that the accounts of the project hold, and no result counts."""

_FIGURES = (*_OF_RESULTS, *_WITHOUT_RESULT)
_SPAN = re.compile(r"([0-9]{1,4}+)([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_UNKNOWN = "\N{EN DASH}"
_MAX_BARS = 20


def show_usage(
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
    """Print what the calls of a project cost, from the result cards, or the rows of a gateway."""
    if as_json and as_csv:
        fail("--json and --csv exclude each other; name one")
    remedy = "" if project else "; name another project with --project"
    path = selected_state(state)
    project = project_or_default(project, path)
    if not is_token(project):
        fail(f"--project: {short(project)!r} is no project id: it is empty or contains blanks or `.*>`")
    now = datetime.now(UTC)
    start = _moment(since, now, "--since")
    end = _moment(until, now, "--until") if until else now
    if start >= end:
        fail("--since must be before --until")
    if path is not None:
        total, rows, beyond = gateway_usage(path, project, start, end, by)
    else:
        total, rows, beyond = _read(kernel_bootstrap(), project, start, end, by)
    total |= _beyond(list(beyond.values()))
    for row in rows:  # accounts are known by day only
        has_accounts = by is By.DAY and row["key"] in beyond
        row.update(_beyond([beyond[row["key"]]] if has_accounts else []))
    if plot is not None:
        _plot(plot, rows, f"{project} by {by}, {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC")
    if as_json:
        span = {"since": start.isoformat(), "until": end.isoformat()}
        print_json({"project_id": project, **span, "by": by, "total": total, "rows": rows})
    elif as_csv:
        _print_csv(by, rows)
    elif rows:
        _print_table(by, rows, total)
    else:
        print_status(f"no calls of project {short(project)!r} in this time{remedy}")


def _beyond(amounts: Sequence[Amount]) -> dict[str, int | None]:
    """Return the columns of what accounts hold and no result counts; None if no account is known."""
    if not amounts:
        return dict.fromkeys(_WITHOUT_RESULT)
    sums = [max(0, sum(column)) for column in zip(*amounts, strict=True)]
    return dict(zip(_WITHOUT_RESULT, sums, strict=True))


def _moment(text: str, now: datetime, option: str) -> datetime:
    if span := _SPAN.fullmatch(text):
        return now - timedelta(**{_UNITS[span[2]]: int(span[1])})
    return _absolute(text, option)


def moment_after(text: str, now: datetime, option: str) -> datetime:
    """Return the time that a span from now, or a date or time, names; exit with 2 if it is neither."""
    try:
        if span := _SPAN.fullmatch(text):
            return now + timedelta(**{_UNITS[span[2]]: int(span[1])})
    except OverflowError:
        fail(f"{option} {text!r} is too far away")
    return _absolute(text, option)


def _absolute(text: str, option: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        fail(f"{option} {text!r} is neither a span such as 7d, 24h or 30m nor a date or time such as 2030-01-31T12:00")


def _read(
    bootstrap: Bootstrap, project: str, start: datetime, end: datetime, by: By
) -> tuple[dict[str, Any], list[dict[str, Any]], WithoutResult]:
    """Return the sum over all calls, the rows by `by`, and what has no card; exits if the database is unavailable."""
    try:
        rows, beyond = asyncio.run(_read_both(bootstrap, project, start, end, by))
    except Unavailable as error:
        fail(bootstrap.redactor.text(located(str(error), bootstrap.pool)))
    figures = [{"key": row["key"], **{name: row[name] for name in _OF_RESULTS}} for row in rows]
    if len(figures) > MAX_ROWS:
        print_status(f"only the first {MAX_ROWS:,} rows are shown; name a shorter time with --since and --until")
    total = {name: figures[0][name] for name in _OF_RESULTS}
    return total, figures[1 : MAX_ROWS + 1], beyond


async def _read_both(
    bootstrap: Bootstrap, project: str, start: datetime, end: datetime, by: By
) -> tuple[list[dict[str, Any]], WithoutResult]:
    pool, actor_id = bootstrap.pool, bootstrap.settings.actor_id
    rows = await usage(pool, project, start, end, actor_id, by)
    try:
        held = await charged_in_nats(bootstrap, project, start, end)
    except Unavailable as error:
        reason = bootstrap.redactor.text(str(error))
        print_status(f"no data for requests without a card, which are in the accounts of budgets: {reason}")
        return rows, {}
    spans = [(datetime.fromtimestamp(one.start, UTC), datetime.fromtimestamp(one.end, UTC)) for one in held]
    stored = [Amount(*cards) for cards in await reported(pool, project, spans, actor_id)] if spans else []
    return rows, without_result(held, stored)


def _print_table(by: By, rows: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> None:
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
    # A formula in a spreadsheet would run: agents and models choose names and sessions.
    text = "" if value is None else printable_line(str(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _plot(file: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
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
