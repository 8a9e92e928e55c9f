"""Options that several modules of `commands` need, and the values that options may have.

It imports almost nothing, since `--version` and `--help` import it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from openapi_tool.environment import CONFIG_VARIABLE


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
StateOption = Annotated[
    Path | None,
    typer.Option(
        help="State file of a gateway, or nats; :memory: keeps nothing; default: the settings' NATS if they name one, "
        "else gateway.sqlite3 in the user's state folder.",
        show_default=False,
    ),
]
# For commands about either a kernel or a gateway; `StateOption` is for those about a gateway only.
GatewayStateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="State of a gateway instead of a kernel: its file, or nats; used if no kernel's database is configured.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
OneObjectOption = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]
