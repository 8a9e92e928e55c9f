"""Run `gateway` as a child process whose upstream is the double."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import typer

from openapi_tool.cli.gateway_serve import GatewayFlags, serve
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.settings import SettingsError
from openapi_tool.signals import guard_service
from openapi_tool.telemetry.logs import guard_crashes


def main() -> None:
    """Serve clients against the double."""
    guard_service()
    parser = argparse.ArgumentParser(description="`openapi-tool gateway` against the Jina double.")
    parser.add_argument("--upstream-port", type=int, required=True, help="the double's HTTPS port on loopback")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--structured", action="store_true")
    given = vars(parser.parse_args())
    upstream_port = given.pop("upstream_port")
    guard_crashes()
    try:
        serve(GatewayFlags(**given), LoopbackResolver(upstream_port))
    except SettingsError as error:
        sys.exit(str(error))
    except typer.Exit as end:  # the reason is printed
        sys.exit(end.exit_code)


if __name__ == "__main__":
    main()
