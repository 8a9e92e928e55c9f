"""Run `mcp` or `gateway` as a child process whose upstream is the double."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import typer

from openapi_tool.cli.output import USAGE, print_status
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.settings import SettingsError
from openapi_tool.signals import guard_service
from openapi_tool.telemetry.logs import guard_crashes


def main() -> None:
    """Serve clients against the double."""
    of_both = argparse.ArgumentParser(add_help=False)
    of_both.add_argument("--upstream-port", type=int, required=True, help="the double's HTTPS port on loopback")
    of_both.add_argument("--tools", type=Path)
    of_both.add_argument("--state", type=Path)
    of_both.add_argument("--structured", action="store_true")
    parser = argparse.ArgumentParser(description="`openapi-tool mcp` or `gateway` against the Jina double.")
    doors = parser.add_subparsers(dest="door", required=True)
    mcp = doors.add_parser("mcp", parents=[of_both])
    mcp.add_argument("--project", default="local")
    mcp.add_argument("--agent", default="local")
    gateway = doors.add_parser("gateway", parents=[of_both])
    gateway.add_argument("--host")
    gateway.add_argument("--port", type=int)
    flags = vars(parser.parse_args())
    door = flags.pop("door")
    resolver = LoopbackResolver(flags.pop("upstream_port"))
    if door == "gateway":
        guard_service()
    guard_crashes()
    try:
        _serve(door, flags, resolver)
    except SettingsError as error:
        for problem in error.problems:
            print_status(f"openapi-tool: {problem}")
        sys.exit(USAGE)
    except typer.Exit as end:  # the reason is printed
        sys.exit(end.exit_code)


def _serve(door: str, flags: dict[str, Any], resolver: LoopbackResolver) -> None:
    if door == "mcp":
        from openapi_tool.cli import mcp as work  # noqa: PLC0415 - each needs an extra of its own

        work.serve(work.McpFlags(**flags), resolver)
    else:
        from openapi_tool.cli import gateway_serve  # noqa: PLC0415

        gateway_serve.serve(gateway_serve.GatewayFlags(**flags), resolver)


if __name__ == "__main__":
    main()
