"""`serve`, `mcp` and `gateway`: the programs that run tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import ConfigOption, OwnStateOption
from openapi_tool.environment import CONFIG_VARIABLE, PREFIX

commands = Commands()

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


def _setting_flag(text: str, section: str, key: str) -> Any:
    """Return an option that overrides a setting; its help names the variable that sets the same."""
    return typer.Option(help=f"{text} [env: {PREFIX}{section.upper()}__{key.upper()}]", show_default=False)


@commands.command()
def serve(
    *,
    config: ConfigOption = None,
    nats_servers: Annotated[
        str | None, typer.Option(help="NATS servers, comma-separated. [env: NATS_SERVERS]", show_default=False)
    ] = None,
    target: Annotated[str | None, _setting_flag("Tool target to serve.", "protocol", "target")] = None,
    project: Annotated[str | None, _setting_flag("Serve this project only.", "protocol", "project")] = None,
    channel: Annotated[str | None, _setting_flag("Serve this channel only.", "protocol", "channel")] = None,
    durable: Annotated[str | None, _setting_flag("Name of the durable consumer.", "nats", "durable")] = None,
    concurrency: Annotated[int | None, _setting_flag("Concurrent calls.", "executor", "concurrency")] = None,
    log_level: Annotated[str | None, _setting_flag("debug, info, warning, error.", "telemetry", "log_level")] = None,
    log_format: Annotated[str | None, _setting_flag("json or console.", "telemetry", "log_format")] = None,
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


@commands.command(short_help="Run tool calls of an MCP client (stdio).")
def mcp(
    *,
    tools: ToolFolderOption = None,
    state: OwnStateOption = None,
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


@commands.command(short_help="Run tool calls of many clients (HTTP, MCP).")
def gateway(
    *,
    host: Annotated[
        str | None,
        _setting_flag("Address to listen on; any that other machines reach needs tokens.", "gateway", "host"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help=f"Port; 0 chooses a free one. [env: {PREFIX}GATEWAY__PORT]", show_default=False
        ),
    ] = None,
    tools: ToolFolderOption = None,
    state: OwnStateOption = None,
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
