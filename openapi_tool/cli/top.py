"""`openapi-tool top`: what all replicas of a kernel's executor, or all processes of a gateway, do right now."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from openapi_tool.cli.output import or_dash
from openapi_tool.cli.selection import command_about_same
from openapi_tool.cli.statistics import Statistics, show_statistics
from openapi_tool.cli.tables import Rows, cell
from openapi_tool.telemetry.replica_problems import CommandLine, but_noticed, found_problems
from openapi_tool.tools.wording import counted

_MAX_TOOLS = 20
_COLUMNS = ("rate", "p50_ms", "p95_ms", "failed", "running", "waiting", "held", "oldest_held_s")
"""Statistics of a replica. Held are commands that it has received and that wait there for a free slot."""


def top(*, once: bool, every_s: float, expect: int, as_json: bool, state: Path | None = None) -> None:
    """Print the statistics of all replicas, or processes of a gateway, once or every `every_s` seconds.

    Less than `expect` replicas are a problem.
    """
    command = partial(command_about_same, state=state)
    show_statistics(
        state,
        draw=partial(shown, expect=expect, command=command),
        as_object=partial(_as_object, expect=expect, command=command),
        as_json=as_json,
        every_s=None if once else every_s,
        remark_on_gateway="no data for commands and lag: a gateway has no queue",
    )


def _as_object(replicas: Statistics, expect: int, command: CommandLine) -> dict[str, Any]:
    found = found_problems(replicas, expect, command)
    return {"replicas": replicas, "problems": found.now, "earlier": found.earlier}


def shown(replicas: Statistics, expect: int = 0, command: CommandLine = "openapi-tool {}".format) -> Group:
    """Return the problems, tables of replicas and tools, and what was wrong earlier.

    The present problems come first, because a terminal with too few lines shows the beginning.
    """
    found = found_problems(replicas, expect, command)
    parts: list[RenderableType] = [_line(f"! {text}", "bold red") for text in found.now]
    if not found.now:
        noticed = but_noticed(replicas)  # such as ", but 3 of 20 calls of the last minute failed"
        parts.append(_line(f"no problem is known now{noticed}", "yellow" if noticed else "green"))
    parts.append(_replica_table(replicas))
    parts += _lag_lines(replicas)
    parts += _tool_tables(replicas)
    if found.earlier:
        parts.append(Text("earlier, within ten minutes:"))
        parts += [_line(f"- {text}", "dim") for text in found.earlier]
    return Group(*parts)


def _line(text: str, style: str) -> Text:
    line = cell(text)
    line.stylize(style)
    return line


def _replica_table(replicas: Statistics) -> Rows:
    table = Rows("replica", *_COLUMNS, title=f"{counted(len(replicas), 'replica')}, the last minute")
    for replica in replicas:
        table.add(*(_figure(replica.get(name)) for name in ("instance", *_COLUMNS)))
    return table


def _figure(value: object) -> str:
    """Return a value as text: 2.0 as 2, a missing one as a dash."""
    if isinstance(value, float) and value.is_integer():
        return str(round(value))
    return or_dash(value)


def _lag_lines(replicas: Statistics) -> Iterator[Text]:
    """Yield a line with the commands that the durable still has to deliver; none for a gateway."""
    reports = [replica for replica in replicas if "pending" in replica and "unacknowledged" in replica]
    if reports:
        # Replicas share the durable, so they report nearly the same numbers.
        pending = max(replica["pending"] for replica in reports)
        unsettled = max(replica["unacknowledged"] for replica in reports)
        yield cell(f"durable: {counted(pending, 'command')} not delivered, {unsettled} not settled")


def _tool_tables(replicas: Statistics) -> Iterator[Rows]:
    """Yield a table of the calls by project and tool, and of how many of them failed and why; none without calls."""
    calls: Counter[tuple[str, ...]] = Counter()
    errors_by_tool: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for replica in replicas:
        for row in replica.get("tools") or ():
            calls[_project_and_tool(row)] += row["calls"]
        for row in replica.get("errors") or ():
            errors_by_tool[_project_and_tool(row)][row["error_code"]] += row["calls"]
    if not calls:
        return
    table = Rows("project", "tool", "calls", "failed", "errors", title="calls by tool, the last minute")
    for project_and_tool, count in calls.most_common(_MAX_TOOLS):
        errors = errors_by_tool[project_and_tool]
        codes = ", ".join(f"{number} {code}" for code, number in errors.most_common())
        table.add(*project_and_tool, count, errors.total(), codes)
    yield table


def _project_and_tool(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["project"], row["tool"]
