"""`openapi-tool top` and `usage`."""

from __future__ import annotations

import asyncio
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.common import fail, or_dash, print_json, print_status
from openapi_tool.cli.gateway import selected_state
from openapi_tool.cli.gateway import usage as gateway_usage
from openapi_tool.cli.kernels import kernel_bootstrap
from openapi_tool.cli.statistics import show_statistics_of
from openapi_tool.cli.tables import Rows, cell, output
from openapi_tool.kernel.failures import located
from openapi_tool.kernel.queries import MAX_ROWS, usage
from openapi_tool.kernel.usage_keys import By
from openapi_tool.protocol.dialect import ProtocolVersion
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import is_token
from openapi_tool.telemetry.logs import printable_line
from openapi_tool.tools.problems import counted, short

_MAX_ROWS = 20
_SLOW_DATABASE_MS = 1_000
_CLOCK_OFFSET_S = 2.0
_COLUMNS = ("rate", "p50_ms", "p95_ms", "failed", "running", "waiting", "held", "oldest_held_s")


def top(*, once: bool, every_s: float, as_json: bool, state: Path | None = None) -> None:
    """Print the statistics of all replicas, or processes of a gateway, once or every `every_s` seconds."""
    show_statistics_of(
        state,
        shown,
        lambda replicas: {"replicas": replicas, "problems": problems(replicas)},
        as_json=as_json,
        every_s=None if once else every_s,
    )


def shown(replicas: Sequence[Mapping[str, Any]]) -> Group:
    """Return tables of replicas, tools and errors, and the problems."""
    table = Rows("replica", *_COLUMNS, title=f"{counted(len(replicas), 'replica')}, the last minute")
    for replica in replicas:
        table.add(*(or_dash(replica.get(name)) for name in ("instance", *_COLUMNS)))
    problem_lines = [cell(f"! {text}") for text in problems(replicas)]
    errors = [_summed(replicas, "errors")] if any(replica.get("errors") for replica in replicas) else []
    return Group(table, *_lag(replicas), _summed(replicas, "tools"), *errors, *problem_lines)


def _lag(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    # Replicas share the durable of each kernel, so they report nearly the same numbers.
    kernels = [kernel for replica in replicas for kernel in replica.get("kernels") or ()]
    for protocol in sorted({kernel["protocol"] for kernel in kernels}):
        reported = [kernel for kernel in kernels if kernel["protocol"] == protocol]
        pending, unsettled = (max(kernel[name] for kernel in reported) for name in ("pending", "unacknowledged"))
        yield cell(f"durable of {protocol}: {counted(pending, 'command')} not delivered, {unsettled} not settled")


def _summed(replicas: Sequence[Mapping[str, Any]], name: str) -> Rows:
    counts: Counter[tuple[str, ...]] = Counter()
    for replica in replicas:
        for row in replica.get(name) or ():
            counts[row.get("protocol", ""), row["project"], row["tool"], row.get("error_code", "")] += row["calls"]
    table = Rows("protocol", "project", "tool", "error", "calls", title=f"{name}, the last minute")
    for key, count in counts.most_common(_MAX_ROWS):
        table.add(*key, count)
    return table


def problems(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the current problems, each with its replica or setting."""
    return list(dict.fromkeys(text for replica in replicas for text in _problems(replica)))


def _problems(replica: Mapping[str, Any]) -> Iterator[str]:
    yield from _suspicious_replies(replica)
    name, health = replica.get("instance"), replica.get("health") or {}
    for dependency, state in (health.get("dependencies") or {}).items():
        if not state.get("ok"):
            yield f"{name}: {dependency} is unavailable: {state.get('reason', '')}"
    if replica.get("waiting"):
        yield f"{name}: {replica['waiting']:g} commands wait for one of {replica.get('slots'):g} slots"
    if replica.get("waiting_for_memory"):
        yield f"{name}: {replica['waiting_for_memory']:g} responses wait for memory: raise egress.body_budget_bytes"
    yield from _limit_problems(replica)
    for kernel in replica.get("kernels") or ():
        maximum, unsettled = kernel["max_unacknowledged"], kernel["unacknowledged"]
        if 0 < maximum <= unsettled:
            about = f"the durable of {kernel['protocol']} has {unsettled} unsettled commands"
            yield f"{about}, its maximum: see durable.full in the log"
    phases = replica.get("phases_p95_ms") or {}
    for phase in ("load", "commit"):
        if (phases.get(phase) or 0) >= _SLOW_DATABASE_MS:
            yield f"{name}: the database is slow: {phase} takes {phases[phase]} ms (95th percentile)"
    if abs(health.get("clock_offset_s") or 0) >= _CLOCK_OFFSET_S:
        yield f"{name}: the local clock is {health['clock_offset_s']:+.1f} s off that of NATS; synchronize it"
    yield from _warnings(replica)


def _limit_problems(replica: Mapping[str, Any]) -> Iterator[str]:
    name = replica.get("instance")
    for limit in replica.get("upstream_limits") or ():
        about = f"the {limit.get('endpoint')} limit of {limit.get('variable')}"
        if limit.get("offline"):
            yield f"{name}: {about} cannot be shared: see limits.not_shared in the log"
        if limit.get("paused_s"):
            requests = f"{limit.get('endpoint')} requests with {limit.get('variable')}"
            yield f"{name}: the upstream answered 429: {requests} pause for {limit['paused_s']} s"
        if limit.get("waiting"):
            yield f"{name}: {counted(limit['waiting'], 'call')} wait for {about}: see openapi-tool limits"


def _suspicious_replies(replica: Mapping[str, Any]) -> Iterator[str]:
    name, answers, unreadable = replica.get("instance"), replica.get("answers", 1), replica.get("unreadable")
    if answers > 1:
        yield f"{name}: {answers} answers have this name: two replicas share it, or one is forged"
    if unreadable:
        yield f"{name}: its answer is not readable (another version, or forged): {unreadable}"


def _warnings(replica: Mapping[str, Any]) -> Iterator[str]:
    if replica.get("log_lines_dropped"):
        lines = counted(replica["log_lines_dropped"], "log line")
        yield f"{replica.get('instance')}: since its start {lines} were dropped: nobody reads them, or its disk is full"
    for warning in replica.get("warnings") or ():
        project = f" (project {warning['project_id']})" if warning.get("project_id") else ""
        often = counted(warning["count"], "time")
        if warning.get("ago_s") is not None:
            often += f", last {warning['ago_s']:.0f} s ago"
        yield f"{replica.get('instance')}: {warning['action']}, {often}{project}: {warning['message']}"


_FIGURES = ("calls", "tokens", "requests", "cache_hits", "errors", "truncated", "retries", "p50_ms", "p95_ms")
_SPAN = re.compile(r"([0-9]{1,4}+)([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_UNKNOWN = "\N{EN DASH}"
_MAX_BARS = 20


def show_usage(
    *,
    project: str,
    since: str,
    until: str | None,
    by: By,
    protocol: ProtocolVersion | None,
    as_json: bool,
    as_csv: bool,
    plot: Path | None,
    state: Path | None = None,
) -> None:
    """Print what the calls of a project cost, from the result cards, or the rows of a gateway."""
    if as_json and as_csv:
        fail("--json and --csv exclude each other; name one")
    if not is_token(project):
        fail(f"--project: {short(project)!r} is no project id: it is empty or contains blanks or `.*>`")
    now = datetime.now(UTC)
    start, end = _moment(since, now, "--since"), _moment(until, now, "--until") if until else now
    if start >= end:
        fail("--since must be before --until")
    if (path := selected_state(state)) is not None:
        total, rows = gateway_usage(path, project, start, end, by)
    else:
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
    pool = bootstrap.pool
    try:
        rows = asyncio.run(usage(pool, project, start, end, bootstrap.settings.actor_id, by))
    except Unavailable as error:
        fail(bootstrap.redactor.text(located(str(error), pool)))
    figures = [{"key": row["key"], **{name: row[name] for name in _FIGURES}} for row in rows]
    if len(figures) > MAX_ROWS:
        print_status(f"only the first {MAX_ROWS:,} rows are shown; name a shorter time with --since and --until")
    total = {name: figures[0][name] for name in _FIGURES}
    return total, figures[1 : MAX_ROWS + 1]


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
