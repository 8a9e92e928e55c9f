"""Options that several modules of `commands` need, and the values that options may have.

It imports almost nothing, since `--version` and `--help` import it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from openapi_tool.cli.output import fail
from openapi_tool.environment import CONFIG_VARIABLE, DEV_VARIABLE, without_variable


class UpstreamChoice(StrEnum):
    """What answers the requests of calls: a double of Jina on this machine, or Jina."""

    DOUBLE = "double"
    REAL = "real"


class DoorChoice(StrEnum):
    """Who makes the calls of `demo`: a simulated kernel, or a client over MCP or HTTP."""

    KERNEL = "kernel"
    MCP = "mcp"
    HTTP = "http"


class Format(StrEnum):
    """Output format of `nats permissions`."""

    TEXT = "text"
    JSON = "json"
    SERVER_CONFIG = "server-config"
    ACCOUNTS = "accounts"


class RoleUser(StrEnum):
    """The command for which `sql grants` prints the privileges of a database role."""

    EXECUTOR = "executor"
    INSPECT = "inspect"
    USAGE = "usage"


ExportFormat = Literal["openai", "openai-responses", "anthropic", "mcp", "lobehub", "kernel"]

ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar=CONFIG_VARIABLE, help="TOML file with settings.", show_default=False)
]


def is_dev_option(program: Any) -> bool:
    """Return whether the option --dev of the program, not its variable, names a `dev`; `program` is its context."""
    return getattr(program.get_parameter_source("dev"), "name", "") == "COMMANDLINE"


def _instead_of_dev(context: typer.Context, state: Path | None) -> Path | None:
    """Let a command with --state use no `dev`: refuse the option --dev, ignore its variable."""
    if state is not None:
        if is_dev_option(context.find_root()):
            fail("--dev and --state name different things; give one")
        context.with_resource(without_variable(DEV_VARIABLE))
    return state


_DEFAULT_STATE = "default: the settings' NATS if they name one, else gateway.sqlite3 in the user's state folder."
_FILE_OR_NATS = "State file of a gateway, or nats; "

OwnStateOption = Annotated[
    Path | None,
    typer.Option("--state", help=f"{_FILE_OR_NATS}:memory: keeps nothing; {_DEFAULT_STATE}", show_default=False),
]
"""For `mcp` and `gateway`, which alone can keep a state in their memory."""

StateOption = Annotated[
    Path | None, typer.Option("--state", help=f"{_FILE_OR_NATS}{_DEFAULT_STATE}", show_default=False)
]
StateFileOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="State file of a gateway; default: gateway.sqlite3 in the user's state folder.",
        show_default=False,
    ),
]
# For commands about either a kernel or a gateway; those above are for commands about a gateway only.
GatewayStateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="State of a gateway instead of a kernel, whatever the settings name: its file, or nats.",
        show_default=False,
        callback=_instead_of_dev,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
OneObjectOption = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]
