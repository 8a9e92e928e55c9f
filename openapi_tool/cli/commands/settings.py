"""Group `config`: the settings in effect."""

from __future__ import annotations

from typing import Annotated

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import ConfigOption, OneObjectOption

config = Commands(
    name="config",
    no_args_is_help=True,
    help="Show the settings in effect, and where each was set.",
    short_help="Show the settings in effect, and where each was set.",
)


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

    After --dev NAME the servers are those of that `dev`, as commands use them.

    Exit codes: 0, 2 invalid settings.
    """
    from openapi_tool.cli import config as work

    work.show(file, everything=everything, as_json=as_json)
