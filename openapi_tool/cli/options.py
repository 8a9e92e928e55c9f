"""Options that several commands have, and the values of options; imports almost nothing, as `commands`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from openapi_tool.environment import CONFIG_VARIABLE, DEFAULT_AUTH_ENV
from openapi_tool.protocol.dialect import ProtocolVersion


class UpstreamChoice(StrEnum):
    """Upstream of the calls."""

    DOUBLE = "double"
    REAL = "real"


class DoorChoice(StrEnum):
    """Protocol of the calls."""

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
    """Purpose of a database role."""

    EXECUTOR = "executor"
    INSPECT = "inspect"
    USAGE = "usage"


ExportFormat = Literal["openai", "openai-responses", "anthropic", "mcp", "lobehub", "kernel"]

ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar=CONFIG_VARIABLE, help="TOML file with settings.", show_default=False)
]
SettingsFileOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=CONFIG_VARIABLE,
        help="TOML file with settings.",
        show_default=False,
        exists=True,
        dir_okay=False,
    ),
]
ToolFolderOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with definitions (YAML) instead of the built-in tools; watched.",
        show_default=False,
        file_okay=False,
        exists=True,
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        help="State file of a gateway, or nats; :memory: keeps nothing; default: the settings' NATS if they name one, "
        "else gateway.sqlite3 in the user's state folder.",
        show_default=False,
    ),
]
GatewayOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="State of a gateway instead of a kernel: its file, or nats; used if no kernel's database is configured.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
OneObjectOption = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]
ProtocolOption = Annotated[
    ProtocolVersion | None,
    typer.Option("--protocol", help="Protocol version of the simulated kernel.", show_default=False),
]
UpstreamOption = Annotated[UpstreamChoice, typer.Option(help=f"Upstream to use; real needs {DEFAULT_AUTH_ENV}.")]
Files = Annotated[list[Path], typer.Argument(help="YAML files with definitions, folders of them, or - for stdin.")]
ApiOption = Annotated[str | None, typer.Option("--api", help="URL of the kernel's management API.", show_default=False)]
DatabaseOption = Annotated[
    bool, typer.Option("--db", help="Use the kernel's database (PG_DSN). Without it and --api: the running `dev`.")
]
ProjectOption = Annotated[str, typer.Option(help="Project.", show_default=False)]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AbandonedOption = Annotated[
    bool,
    typer.Option("--abandoned", help="Include commands that were settled without a result and without a dead letter."),
]
NameArgument = Annotated[str | None, typer.Argument(help="Tool, by its name in the project; without it all of them.")]
SwitchProjectOption = Annotated[str | None, typer.Option(help="Project of the tool.")]
EverywhereOption = Annotated[bool, typer.Option("--all-projects", help="All projects instead of one.")]
ReasonOption = Annotated[str, typer.Option(help="Why; models and the log of every replica get it.")]
ByOption = Annotated[str | None, typer.Option(help="Who; by default the user of this machine.")]
