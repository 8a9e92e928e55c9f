"""Every command: its options, its help, and the function that does its work.

That function is imported when the command runs, because the service takes a second to import: `--version`, `--help` and
completion need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from openapi_tool import __version__
from openapi_tool.cli.options import (
    AbandonedOption,
    ApiOption,
    ByOption,
    ConfigOption,
    DatabaseOption,
    DoorChoice,
    EverywhereOption,
    ExportFormat,
    Files,
    Format,
    GatewayOption,
    JsonOption,
    NameArgument,
    OneObjectOption,
    ProjectOption,
    ProtocolOption,
    ReasonOption,
    RoleUser,
    SettingsFileOption,
    StateOption,
    SwitchProjectOption,
    ToolFolderOption,
    UpstreamChoice,
    UpstreamOption,
    YesOption,
)
from openapi_tool.cli.output import USAGE, print_status
from openapi_tool.environment import DEV_VARIABLE, PREFIX, temporary_variable
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.settings_error import SettingsError
from openapi_tool.telemetry.printable import printable_lines


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; print the mistakes of invalid settings, reword typer's errors."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            for problem in error.problems:
                print_status(f"openapi-tool: {problem}")
            raise typer.Exit(USAGE) from None
        except Exception as error:  # typer exports no class of all its errors; others are raised as they are
            _reword(error)
            raise


def _reword(error: Any) -> None:
    # typer quotes pydantic, and suggests unrelated options for `--version`.
    if isinstance(error, typer.BadParameter):
        words = error.message.removeprefix("Value error, ").partition(", unable to parse")[0]
        error.message = words.replace("Input should be", "must be")
    elif getattr(error, "option_name", None) == "--version":  # typer does not export this exception class
        error.message = "put --version before the command: openapi-tool --version"
        error.possibilities = None


app = typer.Typer(
    name="openapi-tool",
    cls=_Commands,
    help="Run Jina search and reader tool calls of MCP clients and CommonGround agent kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's own form
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _help_all(context: typer.Context, wanted: bool) -> None:  # noqa: FBT001 - typer's own form
    if wanted:
        typer.echo(printable_lines("\n\n".join(_helps(context.command, context))))
        raise typer.Exit


def _helps(command: Any, context: Any) -> Iterator[str]:
    yield command.get_help(context)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _helps(inner, type(context)(inner, info_name=name, parent=context))


@app.callback()
def _options(
    context: typer.Context,
    *,
    dev: Annotated[
        str | None,
        typer.Option(
            "--dev",
            metavar="NAME",
            envvar=DEV_VARIABLE,
            help="Use the running `dev` of this name, before all settings.",
            show_default=False,
        ),
    ] = None,
    help_all: bool = typer.Option(
        False,  # noqa: FBT003 - typer's own form
        "--help-all",
        help="Print the help of every command and exit.",
        is_eager=True,
        callback=_help_all,
    ),
    version: bool = typer.Option(
        False,  # noqa: FBT003 - typer's own form
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=_version,
    ),
) -> None:
    del version, help_all
    context.with_resource(temporary_variable(DEV_VARIABLE, dev))


def _flag(text: str, section: str, key: str) -> Any:
    return typer.Option(help=f"{text} [env: {PREFIX}{section.upper()}__{key.upper()}]", show_default=False)


PROJECT_HELP = "Project of the {}; on a gateway's state file `local` by default."


@app.command()
def serve(
    *,
    config: ConfigOption = None,
    nats_servers: Annotated[
        str | None, typer.Option(help="NATS servers, comma-separated. [env: NATS_SERVERS]", show_default=False)
    ] = None,
    target: Annotated[str | None, _flag("Tool target to serve.", "protocol", "target")] = None,
    project: Annotated[str | None, _flag("Serve this project only.", "protocol", "project")] = None,
    channel: Annotated[str | None, _flag("Serve this channel only.", "protocol", "channel")] = None,
    durable: Annotated[str | None, _flag("Name of the durable consumer.", "nats", "durable")] = None,
    concurrency: Annotated[int | None, _flag("Concurrent calls.", "executor", "concurrency")] = None,
    log_level: Annotated[str | None, _flag("debug, info, warning, error.", "telemetry", "log_level")] = None,
    log_format: Annotated[str | None, _flag("json or console.", "telemetry", "log_format")] = None,
) -> None:
    """Run tool calls until SIGTERM.

    Set the database in PG_DSN and the API key in JINA_API_KEY; there are no flags for them, because process
    lists show flags. Exit codes: 0 stopped cleanly, 2 invalid settings.
    """
    from openapi_tool.cli import serve as work

    flags: dict[str, dict[str, Any]] = {
        "protocol": {"target": target, "project": project, "channel": channel},
        "nats": {"servers": nats_servers, "durable": durable},
        "executor": {"concurrency": concurrency},
        "telemetry": {"log_level": log_level, "log_format": log_format},
    }
    work.serve(config, flags)


@app.command(short_help="Run tool calls of an MCP client (stdio).")
def mcp(
    *,
    tools: ToolFolderOption = None,
    state: StateOption = None,
    project: Annotated[str, typer.Option(help="Project whose budgets and policy apply.")] = "local",
    agent: Annotated[str, typer.Option(help="Agent in the project, with budgets and cursors of its own.")] = "local",
    structured: Annotated[
        bool, typer.Option("--structured", help="Add output schemas and structured content to tools and results.")
    ] = False,
    config: SettingsFileOption = None,
) -> None:
    """Run the tool calls of one MCP client over standard input and output, until the client closes its end.

    Set the API key in JINA_API_KEY; nothing else is needed. Processes with the same state file share limits and
    budgets. The log is on standard error. Exit codes: 0 the client has ended, or SIGTERM, 2 invalid settings, tools or
    state file.
    """
    from openapi_tool.cli import mcp as work

    work.serve(work.McpFlags(config, tools, state, project, agent, structured))


@app.command(short_help="Run tool calls of many clients (HTTP, MCP).")
def gateway(
    *,
    host: Annotated[
        str | None, _flag("Address to listen on; any that other machines reach needs tokens.", "gateway", "host")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help=f"Port; 0 chooses a free one. [env: {PREFIX}GATEWAY__PORT]", show_default=False
        ),
    ] = None,
    tools: ToolFolderOption = None,
    state: StateOption = None,
    structured: Annotated[
        bool, typer.Option("--structured", help="Add output schemas and structured content to MCP tools and results.")
    ] = False,
    config: SettingsFileOption = None,
) -> None:
    """Run tool calls of many clients over HTTP until SIGTERM: plain HTTP, MCP at /mcp, and open-webui.

    Set the API key in JINA_API_KEY. Each client has a token of its own (`tokens create`); without tokens only this
    machine is served. Exit codes: 0 stopped cleanly, 2 invalid settings, tools, tokens or state file.
    """
    from openapi_tool.cli import gateway_serve as work

    work.serve(work.GatewayFlags(config, host, port, tools, state, structured))


@app.command(short_help="Show the timeline of one call.")
def inspect(
    tool_call_id: Annotated[str, typer.Argument(help="Id of the tool call.")],
    *,
    project: Annotated[str | None, typer.Option(help=PROJECT_HELP.format("call"), show_default=False)] = None,
    as_json: JsonOption = False,
    state: GatewayOption = None,
) -> None:
    """Show the timeline of one call, and why it has no result if it has none. Changes nothing.

    Exit codes: 0, 2 no such call in this project, invalid settings, NATS or PostgreSQL cannot be reached.
    """
    from openapi_tool.cli import inspect as work

    work.inspect(tool_call_id, project=project, as_json=as_json, state=state)


@app.command(short_help="Show what all replicas do right now.")
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between updates.", min=1.0, max=3600.0)] = 2.0,
    expect: Annotated[int, typer.Option(help="Replicas that should run; fewer answers are a problem.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, once.")] = False,
    state: GatewayOption = None,
) -> None:
    """Show rate, latency, running, held, lag and errors of all replicas; with --once or --json once, else until Ctrl-C.

    Exit codes: 0, 1 no replica answers, 2 invalid settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import top as work

    work.top(once=once, every_s=every_s, expect=expect, as_json=as_json, state=state)


@app.command(short_help="Show limits of the upstream and who uses them.")
def limits(
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Update every 2 s until Ctrl-C or SIGTERM.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, once.")] = False,
    state: GatewayOption = None,
) -> None:
    """Show limits by key and endpoint: used, paused, the share of each replica, waiting calls by project; refused keys.

    Exit codes: 0, 1 no replica answers, 2 invalid settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import limits as work

    work.limits(watch=watch, as_json=as_json, state=state)


@app.command(short_help="Show budgets: used, left, when they renew.")
def budgets(
    *,
    project: Annotated[str | None, typer.Option(help="Project of the accounts; by default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    state: GatewayOption = None,
) -> None:
    """Show the accounts that the replicas have used since their start: used, left, when they renew.

    Each replica reports at most 100 accounts: those of projects, then the most used. Exit codes: 0, 1 no replica
    answers, 2 invalid settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import limits as work

    work.budgets(project=project, as_json=as_json, state=state)


@app.command(short_help="Show what the calls of a project cost.")
def usage(
    *,
    project: Annotated[str | None, typer.Option(help=PROJECT_HELP.format("calls"), show_default=False)] = None,
    since: Annotated[str, typer.Option(help="Start: 7d, 24h, 30m, or a date or time in ISO 8601 (UTC).")] = "7d",
    until: Annotated[str | None, typer.Option(help="End, in the same forms; by default now.")] = None,
    by: Annotated[By, typer.Option(help="What to sum up by.")] = By.TOOL,
    as_json: OneObjectOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV only.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens and calls as PNG; needs the extra [plot].")] = None,
    state: GatewayOption = None,
) -> None:
    """Sum up calls, tokens, requests, cache hits, errors, truncations, retries and latency from the result cards.

    no_result are requests that the project's accounts hold, and no card: their runs died, or have not ended. Days are
    in UTC. A dash means that no card or account records the value. Exit codes: 0, 2 invalid settings or options,
    or PostgreSQL cannot be reached.
    """
    from openapi_tool.cli import top as work

    work.show_usage(
        project=project,
        since=since,
        until=until,
        by=by,
        as_json=as_json,
        as_csv=as_csv,
        plot=plot,
        state=state,
    )


@app.command(short_help="Check what `serve` needs; change nothing.")
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

    Exit codes: 0 all usable, 1 a dependency is unusable, a key is missing or a definition would fail, 2 invalid
    settings.
    """
    from openapi_tool.cli import check as work

    work.check(config, as_json=as_json, project=project, upstream=upstream)


def demo(
    *,
    door: Annotated[
        DoorChoice, typer.Option(help="Who calls: a kernel, an MCP client, or a client over HTTP.")
    ] = DoorChoice.KERNEL,
    upstream: UpstreamOption = UpstreamChoice.DOUBLE,
    protocol: ProtocolOption = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a client of yours through --door mcp or http instead.")
    ] = False,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="With --serve: folder with definitions (YAML) instead of the built-in tools.",
            show_default=False,
            file_okay=False,
            exists=True,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per call only.")] = False,
) -> None:
    """Start the embedded stack and an executor, run a few calls, and show every step of each.

    With --door mcp or http no server is needed: a client of `openapi-tool mcp` or `openapi-tool gateway` shows what a
    model reads. With --serve a client of yours calls: over standard input and output, or http://127.0.0.1:8090.

    Exit codes: 0 every call succeeded, 1 one did not, 2 a server cannot start or a key is missing.
    """
    if tools is not None and not serve:
        raise typer.BadParameter("--tools needs --serve")
    if serve:
        from openapi_tool.cli import door_demo

        door_demo.serve_door(door, upstream=upstream, tools=tools)
    elif door is not DoorChoice.KERNEL:
        from openapi_tool.cli import door_demo

        door_demo.door_demo(door, upstream=upstream, as_json=as_json)
    else:
        from openapi_tool.cli import demo as work

        work.demo(upstream=upstream, protocol=protocol, as_json=as_json)


def _port(of: str) -> Any:
    return typer.Option(min=0, max=65535, help=f"Loopback port of {of}; 0 chooses a free one.")


def dev(
    *,
    upstream: UpstreamOption = UpstreamChoice.DOUBLE,
    protocol: ProtocolOption = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep the data in this folder for the next run; default: delete it."),
    ] = None,
    nats_port: Annotated[int, _port("NATS")] = 0,
    pg_port: Annotated[int, _port("PostgreSQL")] = 0,
    page_port: Annotated[int, _port("the page")] = 0,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name for `openapi-tool --dev NAME …`; default: dev; beside others dev2 …", show_default=False
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=16, help="Executors that share the calls; further ones serve no health server.")
    ] = 1,
) -> None:
    """Run the embedded stack and an executor until Ctrl-C, and print every call.

    One line per event: → call started, ← result, ↻ retry or redelivery, ! failure. A page on loopback
    shows numbers and the last results. `openapi-tool call` finds the stack automatically. Exit codes:
    0 stopped by Ctrl-C or SIGTERM, 1 a server ended unexpectedly, 2 something is missing or in use.
    """
    from openapi_tool.cli import dev as work

    work.dev(
        upstream=upstream,
        protocol=protocol,
        keep=keep,
        name=name,
        nats_port=nats_port,
        pg_port=pg_port,
        page_port=page_port,
        replicas=replicas,
    )


def call(
    tool: Annotated[str, typer.Argument(help="Name of the tool.", show_default=False)],
    *,
    args: Annotated[str, typer.Option(help="Arguments as a JSON object; @FILE reads a file, - standard input.")] = "{}",
    project: Annotated[
        str | None, typer.Option(help="Project; by default that of the dev stack.", show_default=False)
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Calling agent; by default that of the dev stack.", show_default=False)
    ] = None,
    channel: Annotated[str, typer.Option(help="Channel.")] = "public",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the result.", min=0.1)] = 60,
    yes: Annotated[
        bool, typer.Option("--yes", help="Allow a real kernel: its workers get doorbells and resume turns.")
    ] = False,
    as_json: OneObjectOption = False,
) -> None:
    """Call a tool as the kernel does, and print what the model would read.

    Uses the running dev stack, or the servers in PG_DSN and NATS_SERVERS. Exit codes: 0 success, 1 the
    result is an error, 2 wrong usage or settings, or nothing reachable (nothing was written), 3 no result
    in time, 130 interrupted.
    """
    from openapi_tool.cli import call as work

    work.call(
        tool,
        args=args,
        project=project,
        agent=agent,
        channel=channel,
        timeout=timeout,
        yes=yes,
        as_json=as_json,
    )


if find_spec("openapi_tool.local"):  # the image does not contain the embedded stack
    app.command(short_help="Run a few calls on an embedded stack.")(demo)
    app.command(short_help="Keep an embedded stack running until Ctrl-C.")(dev)
    app.command(short_help="Call a tool as the kernel does.")(call)


config = typer.Typer(no_args_is_help=True, help="Show the settings in effect, and where each was set.")
app.add_typer(config, name="config", short_help="Show the settings in effect, and where each was set.")


@config.callback()
def _config() -> None:
    """Make `show` a subcommand: typer merges a single command into its group."""


@config.command("show", short_help="Print settings with values and sources.")
def show_config(
    *,
    file: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Include settings that have their defaults.")] = False,
    as_json: OneObjectOption = False,
) -> None:
    """Print the settings that `serve` would use, and the variable or file that sets each; credentials are masked.

    Exit codes: 0, 2 invalid settings.
    """
    from openapi_tool.cli import config as work

    work.show(file, everything=everything, as_json=as_json)


deadletters = typer.Typer(no_args_is_help=True, help="List, show and replay commands that got no result.")
app.add_typer(deadletters, name="deadletters", short_help="List, show and replay commands that got no result.")


@deadletters.command("list", short_help="List dead letters, newest first.")
def list_dead_letters(
    *,
    project: Annotated[str | None, typer.Option(help="List this project only.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(help="Newest N only [default: 100; with --json: all].", min=1)] = None,
    abandoned: AbandonedOption = False,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest first; with --json and without --limit oldest first, as they are read.

    Exit codes: 0, or 2 if NATS cannot be reached or the settings are invalid.
    """
    from openapi_tool.cli import deadletters as work

    work.list_(project=project, limit=limit, abandoned=abandoned, as_json=as_json)


@deadletters.command("show", short_help="Show a dead letter in full.")
def show_dead_letter(
    letter: Annotated[str, typer.Argument(help="Id from `list`.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show a dead letter in full. Exit codes: 0, 2 there is no such id."""
    from openapi_tool.cli import deadletters as work

    work.show(letter, as_json=as_json)


@deadletters.command(short_help="Publish commands again and delete their records.")
def replay(
    letters: Annotated[list[str], typer.Argument(help="Ids from `list`.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Publish; without it nothing is changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish commands again and delete their records.

    A command over 64 KiB is read from the command stream, where it may have expired. If its turn no longer waits, it
    becomes a dead letter again. Exit codes: 0 published (or shown, without --yes), 1 one could not be published, 2 an
    id does not exist.
    """
    from openapi_tool.cli import deadletters as work

    work.replay(letters, yes=yes, as_json=as_json)


_FOR = typer.Option("--for", help="`serve`, or the command that it is for.")

sql = typer.Typer(no_args_is_help=True, help="Print the database privileges that the service needs.")
app.add_typer(sql, name="sql", short_help="Print the database privileges that the service needs.")


@sql.callback()
def _sql() -> None:
    """Make `grants` a subcommand: typer merges a single command into its group."""


@sql.command(short_help="Print the GRANT statements for a role.")
def grants(
    *,
    role: Annotated[
        str | None,
        typer.Option(help="Database role of the executor; by default the user in PG_DSN.", show_default=False),
    ] = None,
    registration: Annotated[
        bool, typer.Option("--registration", help="Include the privileges to register tools.")
    ] = False,
    user: Annotated[RoleUser, _FOR] = RoleUser.EXECUTOR,
    as_json: OneObjectOption = False,
) -> None:
    """Print the GRANT statements for a role: the least privileges for `serve` and `deadletters`.

    Changes nothing; the operator of the database runs them. They are the same for every protocol version. Exit codes:
    0, 2 invalid role name, or `--registration` with a command that only reads.
    """
    from openapi_tool.cli import permissions as work

    work.grants(role=role, registration=registration, user=user, as_json=as_json)


nats = typer.Typer(no_args_is_help=True, help="Print NATS permissions; show or restore the durable.")
app.add_typer(nats, name="nats", short_help="Print NATS permissions; show or restore the durable.")


@nats.command(short_help="Print the subjects that a user must be permitted.")
def permissions(
    *,
    user: Annotated[NatsUser, _FOR] = NatsUser.EXECUTOR,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    stream: Annotated[
        str | None, typer.Option(help="Name of the command stream if it is not the kernel's default.")
    ] = None,
) -> None:
    """Print the subjects that a NATS user must be permitted, for the current settings.

    With --for quotas those of the login in `quotas.nats`. Makes no connection, and does not need PG_DSN. Exit codes: 0,
    2 invalid settings.
    """
    from openapi_tool.cli import permissions as work

    work.permissions(user=user, form=Format.JSON if as_json else form, stream=stream)


@nats.command(short_help="Show the durable, or restore it for the kernel.")
def durable(
    *,
    restore: Annotated[
        bool, typer.Option("--restore", help="Set what the kernel's own executor needs; stop every replica first.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the durable consumer, or restore it for the kernel's own executor.

    With PG_DSN --restore also acknowledges the commands that already have a result, on which the kernel's executor
    would fail. Exit codes: 0, 1 refused while an executor still consumes, 2 a server cannot be reached or there is no
    durable.
    """
    from openapi_tool.cli import durable as work

    work.durable(restore=restore, as_json=as_json)


tools = typer.Typer(no_args_is_help=True, help="Lint, apply, list, export, disable … tool definitions.")
app.add_typer(tools, name="tools", short_help="Lint, apply, list and export tool definitions.")


@tools.command(short_help="Print every problem of definitions as FILE:LINE:COLUMN.")
def lint(
    files: Files,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="The executor's TOML file: variables that it lacks are errors.", dir_okay=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print every problem of definitions as FILE:LINE:COLUMN.

    Limits (longest call, the worker's timeout, batch items, target, variables) come from --config, else from this
    machine's settings.
    Exit codes: 0 no errors, 1 errors, 2 a file cannot be read.
    """
    from openapi_tool.cli import tools as work

    work.lint(files, strict=strict, config=config, as_json=as_json)


@tools.command(short_help="Print what is stored, and what a model is shown.")
def render(
    file: Annotated[Path, typer.Argument(help="YAML file with a definition, or - for stdin.")],
    *,
    project: ProjectOption,
    as_json: JsonOption = False,
) -> None:
    """Print the row that will be stored for a project, and the schema that a model will see.

    Exit codes: 0, 1 the definition has errors, 2 the file cannot be read.
    """
    from openapi_tool.cli import tools as work

    work.render(file, project=project, as_json=as_json)


@tools.command(short_help="Print tools in the form of a model provider.")
def export(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML files, folders or -; default: the built-in tools."),
    ] = None,
    *,
    form: Annotated[ExportFormat, typer.Option("--format", help="Output format.")] = "openai",
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="With --format kernel: write a file per tool, as the kernel's API takes them.", show_default=False
        ),
    ] = None,
) -> None:
    """Print tools for OpenAI (Chat Completions, Responses), Anthropic, MCP, LobeHub, or as YAML for the kernel.

    Leaves out `fixed` and `envs` arguments, shows defaults. The kernel's API takes one definition per file, so it
    refuses the output for several tools: use --output-dir. Exit codes: 0, 1 a definition has errors, 2 wrong usage or
    a file cannot be written.
    """
    from openapi_tool.cli import tools as work

    work.export(files, form=form, output_dir=output_dir)


@tools.command(short_help="Register definitions; show differences first.")
def apply(
    files: Files,
    *,
    project: Annotated[list[str] | None, typer.Option(help="Project; repeatable.", show_default=False)] = None,
    projects_file: Annotated[
        Path | None, typer.Option(help="File with one project per line; # for comments.", dir_okay=False, exists=True)
    ] = None,
    api: ApiOption = None,
    db: DatabaseOption = False,
    yes: YesOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare and show; change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Register definitions: lint, compare with the stored ones, show differences, confirm, write.

    Subjects are stored in the kernel's protocol version; with --api name it if it is not that of the files. A failure
    in one project does not affect the others. Exit codes: 0 projects match the files (or differences shown, with
    --dry-run), 1 a failure, an error in a file, or not confirmed, 2 usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_apply as work

    work.apply(
        files,
        project=project,
        projects_file=projects_file,
        api=api,
        db=db,
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
    )


@tools.command("list", short_help="List a project's definitions and their mistakes.")
def list_tools(
    *,
    project: ProjectOption,
    api: ApiOption = None,
    db: DatabaseOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the definitions of a project, and their mistakes as an executor with these settings sees them.

    Exit codes: 0, 2 there is no such project, usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_registry as work

    work.list_(project=project, api=api, db=db, as_json=as_json)


@tools.command("show", short_help="Print one definition as YAML.")
def show_tool(
    tool: Annotated[str, typer.Argument(help="Name of a tool.")],
    *,
    project: ProjectOption,
    api: ApiOption = None,
    db: DatabaseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print one definition as YAML; keys pasted into it are masked.

    Exit codes: 0, 2 there is no such tool, usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_registry as work

    work.show(tool, project=project, api=api, db=db, as_json=as_json)


@tools.command("delete", short_help="Delete definitions; running calls finish.")
def delete_tools(
    tools: Annotated[list[str], typer.Argument(help="Names of tools.")],
    *,
    project: ProjectOption,
    api: ApiOption = None,
    db: DatabaseOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete definitions; running calls finish.

    Exit codes: 0, 1 one could not be deleted, or not confirmed, 2 there is no such tool (nothing is deleted then),
    usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_registry as work

    work.delete(tools, project=project, api=api, db=db, yes=yes, as_json=as_json)


@tools.command(short_help="Disable a tool, a project or all tools at once.")
def disable(
    name: NameArgument = None,
    *,
    project: SwitchProjectOption = None,
    all_projects: EverywhereOption = False,
    reason: ReasonOption,
    by: ByOption = None,
    as_json: JsonOption = False,
    state: GatewayOption = None,
) -> None:
    """Disable a tool within two seconds on all replicas: its calls fail with tool_not_available and the reason.

    Nothing is sent upstream for them. Running calls are finished. It applies to every kernel on these NATS servers.
    Exit codes: 0, 2 invalid options or settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import tools as work

    work.disable(
        name,
        project=project,
        all_projects=all_projects,
        reason=reason,
        by=by,
        as_json=as_json,
        state=state,
    )


@tools.command(short_help="Enable again what was disabled.")
def enable(
    name: NameArgument = None,
    *,
    project: SwitchProjectOption = None,
    all_projects: EverywhereOption = False,
    reason: ReasonOption,
    by: ByOption = None,
    as_json: JsonOption = False,
    state: GatewayOption = None,
) -> None:
    """Enable again exactly what was disabled, within two seconds on all replicas.

    Exit codes: 0, 1 it is not disabled, 2 invalid options or settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import tools as work

    work.enable(
        name,
        project=project,
        all_projects=all_projects,
        reason=reason,
        by=by,
        as_json=as_json,
        state=state,
    )


@tools.command(short_help="List what is disabled, by whom and why.")
def disabled(
    *,
    as_json: JsonOption = False,
    state: GatewayOption = None,
) -> None:
    """List what is disabled, since when, by whom and why. Exit codes: 0, 2 invalid settings, NATS cannot be reached."""
    from openapi_tool.cli import tools as work

    work.disabled(as_json=as_json, state=state)


state_file = typer.Typer(no_args_is_help=True, help="Delete what a gateway has stored.")
app.add_typer(state_file, name="state", short_help="Delete what a gateway has stored.")


@state_file.callback()
def _state() -> None:
    """Make `purge` a subcommand: typer merges a single command into its group."""


@state_file.command(short_help="Delete everything from a gateway's state file.")
def purge(
    *,
    state: StateOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it nothing is changed.")] = False,
) -> None:
    """Delete everything from a gateway's state file, also its tokens, and from its free pages.

    Running processes of the gateway go on with empty budgets. Exit codes: 0, 1 not confirmed, 2 the file is unusable.
    """
    from openapi_tool.cli import gateway as work

    work.purge(state, yes=yes)


TOKENS_FILE = typer.Option("--file", help="File of tokens (JSON) instead of the state file.", show_default=False)

tokens = typer.Typer(no_args_is_help=True, help="Create, list and revoke the tokens of a gateway.")
app.add_typer(tokens, name="tokens", short_help="Create, list and revoke the tokens of a gateway.")


@tokens.command("create", short_help="Create a token and print it, once.")
def create_token(
    *,
    project: Annotated[str, typer.Option(help="Project whose budgets and policy apply.", show_default=False)],
    agent: Annotated[str, typer.Option(help="Agent in the project, with budgets and cursors of its own.")] = "default",
    tool: Annotated[
        list[str] | None,
        typer.Option("--tools", help="Names of tools, or patterns such as jina_*; repeatable.", show_default=False),
    ] = None,
    any_agent: Annotated[
        bool, typer.Option("--any-agent", help="Let the caller name another agent of the project in X-Agent-Id.")
    ] = False,
    expires: Annotated[
        str | None, typer.Option(help="30d, 12h, or a date or time in ISO 8601 (UTC).", show_default="never")
    ] = None,
    state: StateOption = None,
    file: Annotated[Path | None, TOKENS_FILE] = None,
    as_json: OneObjectOption = False,
) -> None:
    """Create a token and print it, once: only a hash is stored.

    Exit codes: 0, 2 invalid options, or an unusable file.
    """
    from openapi_tool.cli import tokens as work

    work.create(
        project=project,
        agent=agent,
        tools=tool or [],
        any_agent=any_agent,
        expires=expires,
        state=state,
        file=file,
        as_json=as_json,
    )


@tokens.command("list", short_help="List tokens, without their secrets.")
def list_tokens(
    *,
    state: StateOption = None,
    file: Annotated[Path | None, TOKENS_FILE] = None,
    as_json: JsonOption = False,
) -> None:
    """List tokens, without their secrets, the oldest first. Exit codes: 0, 2 an unusable file."""
    from openapi_tool.cli import tokens as work

    work.list_(state=state, file=file, as_json=as_json)


@tokens.command("revoke", short_help="Revoke a token, within two seconds.")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Id from `list`, or the token itself.", show_default=False)],
    *,
    state: StateOption = None,
    file: Annotated[Path | None, TOKENS_FILE] = None,
) -> None:
    """Revoke a token; all running processes refuse it within two seconds.

    Exit codes: 0, 1 there is no such token, 2 an unusable file.
    """
    from openapi_tool.cli import tokens as work

    work.revoke(token, state=state, file=file)
