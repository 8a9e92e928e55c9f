"""`demo --door mcp` and `demo --door http`: a few calls of a client, or, with --serve, a door for your own client.

A *door* is a program through which calls come in: `openapi-tool mcp`, or `openapi-tool gateway` (HTTP).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from openapi_tool.cli.embedded import extra_needed
from openapi_tool.cli.gateway_serve import bound_socket
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.options import DoorChoice, UpstreamChoice
from openapi_tool.cli.output import INTERRUPTED, fail
from openapi_tool.cli.tables import cell
from openapi_tool.environment import DEFAULT_AUTH_ENV, PREFIX
from openapi_tool.protocol.printable import printable_lines
from openapi_tool.settings import load_settings

_DOUBLE_NOTE = (
    "The upstream is a double on loopback that answers with recorded real responses. For the real one: "
    "JINA_API_KEY=… openapi-tool demo --door {door} --upstream real"
)
_PORT = f"{PREFIX}GATEWAY__PORT"
_COMMANDS = {DoorChoice.MCP: "mcp", DoorChoice.HTTP: "gateway"}  # that serve a door


def serve_door(door: DoorChoice, *, upstream: UpstreamChoice, tools: Path | None) -> NoReturn:
    """Serve a client of the user's own through this door until it ends."""
    if door not in _COMMANDS:
        fail("--serve needs --door mcp or --door http; for a kernel use: openapi-tool dev")
    _require_packages_and_key(upstream)
    if door is DoorChoice.HTTP:
        _require_free_port()
    from openapi_tool.local import door_demo as local_door  # noqa: PLC0415 - its packages are there
    from openapi_tool.local.servers import ServerFailed  # noqa: PLC0415 - the same

    options = [] if tools is None else ["--tools", str(tools)]
    try:
        code = local_door.serve(upstream.value, _COMMANDS[door], *options)
    except ServerFailed as failure:
        fail(str(failure))
    raise typer.Exit(code)


def _require_free_port() -> None:
    """Exit with 2 if the gateway could not listen, before it starts. Raises SettingsError."""
    options = load_settings(NO_DATABASE).gateway
    try:
        bound_socket(options.host, options.port).close()
    except OSError as error:
        where = f"gateway.host, gateway.port: cannot listen on {options.host}:{options.port}"
        why, _, _ = (error.strerror or str(error)).partition(" (while ")  # … attempting to bind on address …
        fail(f"{where}: {why}; set {_PORT}, 0 for any free port")


def door_demo(door: DoorChoice, *, upstream: UpstreamChoice, as_json: bool) -> None:
    """Run a few calls of a client of this door, and show what a model reads."""
    _require_packages_and_key(upstream)
    from openapi_tool.local import http_demo, mcp_demo  # noqa: PLC0415 - its packages are there
    from openapi_tool.local.servers import ServerFailed  # noqa: PLC0415 - the same

    try:
        demo = http_demo if door is DoorChoice.HTTP else mcp_demo
        played = asyncio.run(demo.play(upstream.value))
    except ServerFailed as failure:
        fail(str(failure))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        for call in played.calls:
            sys.stdout.write(json.dumps(asdict(call)) + "\n")
    else:
        console = Console(highlight=False)
        console.print(cell(f"{played.door}; tools: {', '.join(played.tools)}"))
        for call in played.calls:
            an_error = ": an error" if call.failed else ""
            title = cell(f"{call.tool} {json.dumps(dict(call.arguments))}{an_error}")
            console.print(Panel(Text(printable_lines(call.text)), title=title, title_align="left"))
        if upstream is UpstreamChoice.DOUBLE:
            console.print(_DOUBLE_NOTE.format(door=door.value))
    if any(call.failed for call in played.calls):
        raise typer.Exit(1)


def _require_packages_and_key(upstream: UpstreamChoice) -> None:
    """Exit with 2 if a package or the key is missing."""
    if not find_spec("mcp"):
        fail("the demo of this door needs two extras: pip install 'openapi-tool[local,gateway]'")
    with extra_needed("the demo"):
        from openapi_tool.local import http_demo, mcp_demo  # noqa: F401, PLC0415 - need the extras [local] and [gateway]
    if upstream is UpstreamChoice.REAL and DEFAULT_AUTH_ENV not in os.environ:
        fail(f"{DEFAULT_AUTH_ENV} is not set; --upstream real needs a key")
