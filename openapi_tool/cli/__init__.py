"""Commands of the service and of the local stack."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

from openapi_tool import __version__
from openapi_tool.cli import deadletters, inspect, limits, permissions, serve, tools, top
from openapi_tool.cli.common import USAGE, guard_output, print_status
from openapi_tool.settings import SettingsError
from openapi_tool.settings.loading import likely_secrets
from openapi_tool.telemetry.logs import configure_logging, guard_crashes, log_crash
from openapi_tool.telemetry.redact import Redactor


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; print the mistakes of invalid settings, reword typer's errors."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            for problem in error.problems:
                print_status(f"openapi-tool: {problem}")
            raise typer.Exit(USAGE) from None
        except Exception as error:
            _reword(error)
            raise


def _reword(error: Any) -> None:
    # typer quotes pydantic, and suggests unrelated options for `--version`.
    if isinstance(error, typer.BadParameter):
        words = error.message.removeprefix("Value error, ").partition(", unable to parse")[0]
        error.message = words.replace("Input should be", "must be")
    elif getattr(error, "option_name", None) == "--version":  # typer does not export this exception class
        error.message, error.possibilities = "put --version before the command: openapi-tool --version", None


app = typer.Typer(
    name="openapi-tool",
    cls=_Commands,
    help="Run Jina search and reader tool calls of CommonGround agent kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve.serve)
app.command(short_help="Show the timeline of one call.")(inspect.inspect)
app.command(short_help="Show what all replicas do right now.")(top.top)
app.command(short_help="Show limits of the upstream and who uses them.")(limits.limits)
app.command(short_help="Show budgets: used, left, when they renew.")(limits.budgets)
app.command("usage", short_help="Show what the calls of a project cost.")(top.show_usage)
app.command(short_help="Check what `serve` needs; change nothing.")(serve.check)
if find_spec("openapi_tool.local"):  # the image does not contain the embedded stack
    from openapi_tool.cli import call, dev

    app.command(short_help="Run a few calls on an embedded stack.")(call.demo)
    app.command(short_help="Keep an embedded stack running until Ctrl-C.")(dev.dev)
    app.command(short_help="Call a tool as the kernel does.")(call.call)
app.add_typer(deadletters.app, name="deadletters", short_help="List, show and replay commands that got no result.")
app.add_typer(permissions.sql_app, name="sql", short_help="Print the database privileges that the service needs.")
app.add_typer(permissions.nats_app, name="nats", short_help="Print NATS permissions; show or restore the durable.")
app.add_typer(tools.app, name="tools", short_help="Lint, apply, list and export tool definitions.")


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's own form
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: bool = typer.Option(
        False,  # noqa: FBT003 - typer's own form
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=_version,
    ),
) -> None:
    del version


def main() -> None:
    """Run the command line; mask secrets in logs, tracebacks and warnings, also in a crash.

    Characters that the terminal's encoding lacks are escaped.
    """
    configure_logging("warning", "console", Redactor(likely_secrets(os.environ)))
    guard_crashes()
    guard_output()
    try:
        app()
    except Exception as error:  # noqa: BLE001 - typer would print it unredacted
        log_crash(error)
        sys.exit(1)
    finally:
        sys.stdout.flush()
