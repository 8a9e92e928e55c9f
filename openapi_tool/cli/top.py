"""`openapi-tool top`: what all replicas do right now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.bus.connection import BusClient
from openapi_tool.bus.stats import gather_stats
from openapi_tool.cli.common import cell, fail, print_json
from openapi_tool.cli.kernels import with_nats
from openapi_tool.cli.tables import Rows, output, redraw
from openapi_tool.tools.problems import counted

_NO_REPLICA = 1
_REPLIES_S = 1.0
_MAX_ROWS = 20
_SLOW_DATABASE_MS = 1_000
_CLOCK_OFFSET_S = 2.0
_COLUMNS = ("rate", "p50_ms", "p95_ms", "failed", "running", "waiting", "held", "oldest_held_s")


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between updates.", min=1.0, max=3600.0)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, once.")] = False,
) -> None:
    """Show rate, latency, running, held, lag and errors of all replicas; with --once or --json once, else until Ctrl-C.

    Exit codes: 0, 1 no replica answers, 2 invalid settings, or NATS cannot be reached.
    """

    async def work(bootstrap: Bootstrap, client: BusClient) -> None:
        del bootstrap
        replicas = await gather_stats(client, _REPLIES_S)
        if not replicas:
            fail("no replica answers on openapi_tool.stats: none runs, or its user lacks permission", _NO_REPLICA)
        if as_json:
            print_json({"replicas": replicas, "problems": problems(replicas)})
            return
        console = output()
        if once:
            console.print(shown(replicas))
            return

        async def draw() -> Group:
            return shown(await gather_stats(client, _REPLIES_S))

        await redraw(console, shown(replicas), draw, every_s)

    with_nats(work, permissions_command="openapi-tool nats permissions --for top")


def shown(replicas: Sequence[Mapping[str, Any]]) -> Group:
    """Return the tables: replicas, tools by project, errors, problems."""
    table = Rows("replica", *_COLUMNS, title=f"{counted(len(replicas), 'replica')}, the last minute")
    for replica in replicas:
        table.add(*(_or_dash(replica.get(name)) for name in ("instance", *_COLUMNS)))
    problem_lines = [cell(f"! {text}") for text in problems(replicas)]
    errors = [_summed(replicas, "errors")] if any(replica.get("errors") for replica in replicas) else []
    return Group(table, *_lag(replicas), _summed(replicas, "tools"), *errors, *problem_lines)


def _lag(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line for the durable of each kernel. Replicas share it, so they report nearly the same numbers."""
    kernels = [kernel for replica in replicas for kernel in replica.get("kernels") or ()]
    for protocol in sorted({kernel["protocol"] for kernel in kernels}):
        reported = [kernel for kernel in kernels if kernel["protocol"] == protocol]
        pending, unsettled = (max(kernel[name] for kernel in reported) for name in ("pending", "unacknowledged"))
        yield cell(f"durable of {protocol}: {counted(pending, 'command')} not delivered, {unsettled} not settled")


def _summed(replicas: Sequence[Mapping[str, Any]], name: str) -> Rows:
    """Return the sum of the calls of all replicas by protocol, project, tool and error."""
    counts: Counter[tuple[str, ...]] = Counter()
    for replica in replicas:
        for row in replica.get(name) or ():
            counts[row.get("protocol", ""), row["project"], row["tool"], row.get("error_code", "")] += row["calls"]
    table = Rows("protocol", "project", "tool", "error", "calls", title=f"{name}, the last minute")
    for key, count in counts.most_common(_MAX_ROWS):
        table.add(*key, count)
    return table


def _or_dash(value: object) -> object:
    return "-" if value is None else value


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
    for warning in replica.get("warnings") or ():
        project = f" (project {warning['project_id']})" if warning.get("project_id") else ""
        often = counted(warning["count"], "time")
        if warning.get("ago_s") is not None:
            often += f", last {warning['ago_s']:.0f} s ago"
        yield f"{replica.get('instance')}: {warning['action']}, {often}{project}: {warning['message']}"
