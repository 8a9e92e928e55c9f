"""Every command: its name, options and help. One module has the commands of one subject.

The work of a command is done by a module of `openapi_tool.cli`, which is imported, as `work`, only when the command
runs. It takes a second to import what the work needs, and `--version`, `--help` and completion need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from openapi_tool import __version__
from openapi_tool.cli.commands import (
    dead_letters,
    embedded_stack,
    gateway_state,
    observing,
    servers,
    serving,
    settings,
    tools,
)
from openapi_tool.cli.commands.errors import ProgramGroup
from openapi_tool.cli.options import is_dev_option
from openapi_tool.cli.output import fail
from openapi_tool.environment import DEV_VARIABLE, temporary_variable, without_variable
from openapi_tool.protocol.printable import printable_lines

app = typer.Typer(
    name="openapi-tool",
    cls=ProgramGroup,
    help="Run Jina search and reader tool calls of MCP clients and CommonGround agent kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_WITHOUT_DEV = ("serve", "mcp", "gateway", "demo", "dev", "state", "tokens")
"""Commands that use no running `dev`. They ignore the variable, which may be set for a whole shell."""


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer's own form
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _print_all_help(context: typer.Context, wanted: bool) -> None:  # noqa: FBT001 - typer's own form
    if wanted:
        typer.echo(printable_lines("\n\n".join(_help_texts(context.command, context))))
        raise typer.Exit


def _help_texts(command: Any, context: Any) -> Iterator[str]:
    """Yield the help of a command, then of those inside it if it is a group."""
    yield command.get_help(context)
    for name, inner in getattr(command, "commands", {}).items():
        inner_context = type(context)(inner, info_name=name, parent=context)
        yield from _help_texts(inner, inner_context)


@app.callback()
def _global_options(
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
        callback=_print_all_help,
    ),
    version: bool = typer.Option(
        False,  # noqa: FBT003 - typer's own form
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=_print_version,
    ),
) -> None:
    del version, help_all  # their callbacks have done the work
    command = context.invoked_subcommand or ""
    is_option = is_dev_option(context)  # else the variable
    if is_option and command in _WITHOUT_DEV:
        raise typer.BadParameter(f"--dev: {command!r} uses no running `dev`; leave the option out")
    if is_option and dev == "":
        fail("--dev: is empty; give the name of a running `dev`")  # an empty variable is none
    uses_no_dev = command in _WITHOUT_DEV
    context.with_resource(without_variable(DEV_VARIABLE) if uses_no_dev else temporary_variable(DEV_VARIABLE, dev))


# Help lists the commands in this order, first all without a group. `add_typer` adds the commands of a nameless Typer
# to the program itself, and a Typer with a name as a group. Each group has a `short_help`, because typer truncates a
# summary that it makes from `help`.
app.add_typer(serving.commands)
app.add_typer(observing.commands)
if find_spec("openapi_tool.local"):  # the image does not contain the embedded stack
    app.add_typer(embedded_stack.commands)
app.add_typer(settings.config)
app.add_typer(dead_letters.deadletters)
app.add_typer(servers.sql)
app.add_typer(servers.nats)
app.add_typer(tools.tools)
app.add_typer(gateway_state.state_file)
app.add_typer(gateway_state.tokens)
