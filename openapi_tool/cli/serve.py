"""`openapi-tool serve`: run the executor against a kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from openapi_tool.cli.common import print_status
from openapi_tool.service import run
from openapi_tool.settings import CONFIG_VARIABLE, PREFIX, SettingsError, load_settings

_USAGE = 2


def _flag(text: str, section: str, key: str) -> Any:
    return typer.Option(help=f"{text} [env: {PREFIX}{section.upper()}__{key.upper()}]", show_default=False)


def serve(
    *,
    config: Annotated[
        Path | None, typer.Option(envvar=CONFIG_VARIABLE, help="TOML file with settings.", show_default=False)
    ] = None,
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
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config)
    flags: dict[str, dict[str, Any]] = {
        "protocol": {"target": target, "project": project, "channel": channel},
        "nats": {"servers": nats_servers, "durable": durable},
        "executor": {"concurrency": concurrency},
        "telemetry": {"log_level": log_level, "log_format": log_format},
    }
    try:
        run(lambda: load_settings(_given(flags)), os.environ)
    except SettingsError as error:
        for problem in error.problems:
            print_status(f"openapi-tool: {problem}")
        raise typer.Exit(_USAGE) from None


def _given(flags: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return only the flags that were given, so that defaults do not override the environment or the file."""
    sections = {
        section: {key: value for key, value in values.items() if value is not None} for section, values in flags.items()
    }
    return {section: values for section, values in sections.items() if values}
