"""Commands that look at calls, replicas, limits, budgets and costs, and at what `serve` needs, and change none of it.

Those with the option `--state` are about a kernel, or about the gateway whose state file it names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import ConfigOption, GatewayStateOption, JsonOption, OneObjectOption
from openapi_tool.kernel.postgres.usage_keys import By

commands = Commands()

_PROJECT_HELP = "Project of the {}; by default `local` on a gateway's state file, `proj_dev` on a `dev`."


@commands.command(short_help="Show the timeline of one call.")
def inspect(
    tool_call_id: Annotated[str, typer.Argument(help="Id of the tool call.")],
    *,
    project: Annotated[str | None, typer.Option(help=_PROJECT_HELP.format("call"), show_default=False)] = None,
    as_json: JsonOption = False,
    state: GatewayStateOption = None,
) -> None:
    """Show the timeline of one call, and why it has no result if it has none. Changes nothing.

    Exit codes: 0, 2 no such call in this project, invalid settings, NATS or PostgreSQL cannot be reached.
    """
    from openapi_tool.cli import inspect as work

    work.inspect(tool_call_id, project=project, as_json=as_json, state=state)


@commands.command(short_help="Show what all replicas do right now.")
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between updates.", min=1.0, max=3600.0)] = 2.0,
    expect: Annotated[int, typer.Option(help="Replicas that should run; fewer answers are a problem.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, once.")] = False,
    state: GatewayStateOption = None,
) -> None:
    """Show rate, latency, running, held, lag and errors of all replicas; with --once or --json once, else until Ctrl-C.

    Exit codes: 0, 1 no replica answers, 2 invalid settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import top as work

    work.top(once=once, every_s=every_s, expect=expect, as_json=as_json, state=state)


@commands.command(short_help="Show limits of the upstream and who uses them.")
def limits(
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Update every 2 s until Ctrl-C or SIGTERM.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, once.")] = False,
    state: GatewayStateOption = None,
) -> None:
    """Show limits by key and endpoint: used, paused, the share of each replica, waiting calls by project; refused keys.

    Exit codes: 0, 1 no replica answers, 2 invalid settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import limits as work

    work.limits(watch=watch, as_json=as_json, state=state)


@commands.command(short_help="Show budgets: used, left, when they renew.")
def budgets(
    *,
    project: Annotated[str | None, typer.Option(help="Project of the accounts; by default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    state: GatewayStateOption = None,
) -> None:
    """Show the accounts that the replicas have used since their start: used, left, when they renew.

    Each replica reports at most 100 accounts: those of projects, then the most used. Exit codes: 0, 1 no replica
    answers, 2 invalid settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import budgets as work

    work.budgets(project=project, as_json=as_json, state=state)


@commands.command(short_help="Show what the calls of a project cost.")
def usage(
    *,
    project: Annotated[str | None, typer.Option(help=_PROJECT_HELP.format("calls"), show_default=False)] = None,
    since: Annotated[str, typer.Option(help="Start: 7d, 24h, 30m, or a date or time in ISO 8601 (UTC).")] = "7d",
    until: Annotated[str | None, typer.Option(help="End, in the same forms; by default now.")] = None,
    by: Annotated[By, typer.Option(help="What to sum up by.")] = By.TOOL,
    as_json: OneObjectOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV only.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens and calls as PNG; needs the extra [plot].")] = None,
    state: GatewayStateOption = None,
) -> None:
    """Sum up calls, tokens, requests, cache hits, errors, truncations, retries and latency from the result cards.

    no_result are requests that the project's accounts hold, and no card: their runs died, or have not ended. Days are
    in UTC. A dash means that no card or account records the value. Exit codes: 0, 2 invalid settings or options,
    or PostgreSQL cannot be reached.
    """
    from openapi_tool.cli import usage as work

    work.usage(
        project=project,
        since=since,
        until=until,
        by=by,
        as_json=as_json,
        as_csv=as_csv,
        plot=plot,
        state=state,
    )


@commands.command(short_help="Check what `serve` needs; change nothing.")
def check(
    *,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    project: Annotated[
        list[str] | None, typer.Option(help="Check this project's definitions; repeatable.", show_default=False)
    ] = None,
    upstream: Annotated[bool, typer.Option("--upstream", help="Connect to the upstream, without a key.")] = False,
) -> None:
    """Check settings, PostgreSQL, NATS and keys as `serve` would use them; change nothing.

    It stores an empty record in NATS, which expires after an hour, to see whether JetStream stores messages.
    After --dev NAME the keys are those that the executors of that `dev` have.

    Exit codes: 0 all usable, 1 a dependency is unusable, a key is missing or a definition would fail, 2 invalid
    settings.
    """
    from openapi_tool.cli import check as work

    work.check(config, as_json=as_json, project=project, upstream=upstream)
