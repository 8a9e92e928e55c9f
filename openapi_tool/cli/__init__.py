"""What a person types: `openapi-tool serve`, `demo`, `dev`, `call`, `deadletters`, `sql`, `nats`, `tools`."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

import typer

from openapi_tool import __version__
from openapi_tool.cli import call, deadletters, demo, dev, nats, serve, sql, tools
from openapi_tool.confidential import likely_secrets
from openapi_tool.telemetry.logs import configure_logging, guard_crashes, log_crash
from openapi_tool.telemetry.redact import Redactor

app = typer.Typer(
    name="openapi-tool",
    help="Answers Jina search and reader tool calls of CommonGround agent kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.command()(serve.serve)
app.command()(demo.demo)
app.command()(dev.dev)
app.command()(call.call)
app.add_typer(deadletters.app, name="deadletters")
app.add_typer(sql.app, name="sql")
app.add_typer(nats.app, name="nats")
app.add_typer(tools.app, name="tools")


def _version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: bool = typer.Option(
        default=False,
        help="Print the version and exit.",
        is_eager=True,
        callback=lambda wanted: _version(wanted=wanted),
    ),
) -> None:
    del version


def main() -> None:
    """Run the command line: whatever ends it, its secrets stay in.

    A character that the terminal's encoding lacks is no reason to fail.
    """
    configure_logging("warning", "console", Redactor(likely_secrets(os.environ)))
    guard_crashes()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except Exception as error:  # noqa: BLE001 - typer would print it as it is
        log_crash(error)
        sys.exit(1)
