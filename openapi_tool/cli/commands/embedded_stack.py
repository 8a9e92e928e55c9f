"""`demo` and `dev`, which start servers and a double of Jina on this machine, and `call`, which uses those of `dev`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import DoorChoice, OneObjectOption, UpstreamChoice
from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.protocol.dialect import ProtocolVersion

commands = Commands()

ProtocolOption = Annotated[
    ProtocolVersion | None,
    typer.Option("--protocol", help="Protocol version of the simulated kernel.", show_default=False),
]
UpstreamOption = Annotated[UpstreamChoice, typer.Option(help=f"Upstream to use; real needs {DEFAULT_AUTH_ENV}.")]


def _port_option(server: str) -> Any:
    return typer.Option(min=0, max=65535, help=f"Loopback port of {server}; 0 chooses a free one.")


@commands.command(short_help="Run a few calls on an embedded stack.")
def demo(
    *,
    door: Annotated[
        DoorChoice, typer.Option(help="Who calls: a kernel, an MCP client, or a client over HTTP.")
    ] = DoorChoice.KERNEL,
    upstream: UpstreamOption = UpstreamChoice.DOUBLE,
    protocol: ProtocolOption = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a client of yours through --door mcp or http instead.")
    ] = False,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="With --serve: folder with definitions (YAML) instead of the built-in tools.",
            show_default=False,
            file_okay=False,
            exists=True,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per call only.")] = False,
) -> None:
    """Start the embedded stack and an executor, run a few calls, and show every step of each.

    With --door mcp or http no server is needed: a client of `openapi-tool mcp` or `openapi-tool gateway` shows what a
    model reads. With --serve a client of yours calls: over standard input and output, or http://127.0.0.1:8090.

    Exit codes: 0 every call succeeded, 1 one did not, 2 a server cannot start or a key is missing.
    """
    if tools is not None and not serve:
        raise typer.BadParameter("--tools needs --serve")
    if serve:
        from openapi_tool.cli import door_demo

        door_demo.serve_door(door, upstream=upstream, tools=tools)
    elif door is not DoorChoice.KERNEL:
        from openapi_tool.cli import door_demo

        door_demo.door_demo(door, upstream=upstream, as_json=as_json)
    else:
        from openapi_tool.cli import demo as work

        work.demo(upstream=upstream, protocol=protocol, as_json=as_json)


@commands.command(short_help="Keep an embedded stack running until Ctrl-C.")
def dev(
    *,
    upstream: UpstreamOption = UpstreamChoice.DOUBLE,
    protocol: ProtocolOption = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep the data in this folder for the next run; default: delete it."),
    ] = None,
    nats_port: Annotated[int, _port_option("NATS")] = 0,
    pg_port: Annotated[int, _port_option("PostgreSQL")] = 0,
    page_port: Annotated[int, _port_option("the page")] = 0,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name for `openapi-tool --dev NAME …`; default: dev; beside others dev2 …", show_default=False
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=16, help="Executors that share the calls; further ones serve no health server.")
    ] = 1,
) -> None:
    """Run the embedded stack and an executor until Ctrl-C, and print every call.

    One line per event: → call started, ← result, ↻ retry or redelivery, ! failure. A page on loopback
    shows numbers and the last results. `openapi-tool call` finds the stack automatically. Exit codes:
    0 stopped by Ctrl-C or SIGTERM, 1 a server ended unexpectedly, 2 something is missing or in use.
    """
    from openapi_tool.cli import dev as work

    work.dev(
        upstream=upstream,
        protocol=protocol,
        keep=keep,
        name=name,
        nats_port=nats_port,
        pg_port=pg_port,
        page_port=page_port,
        replicas=replicas,
    )


@commands.command(short_help="Call a tool as the kernel does.")
def call(
    tool: Annotated[str, typer.Argument(help="Name of the tool.", show_default=False)],
    *,
    args: Annotated[str, typer.Option(help="Arguments as a JSON object; @FILE reads a file, - standard input.")] = "{}",
    project: Annotated[
        str | None, typer.Option(help="Project; by default that of the dev stack.", show_default=False)
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Calling agent; by default that of the dev stack.", show_default=False)
    ] = None,
    channel: Annotated[str, typer.Option(help="Channel.")] = "public",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the result.", min=0.1)] = 60,
    yes: Annotated[
        bool, typer.Option("--yes", help="Allow a real kernel: its workers get doorbells and resume turns.")
    ] = False,
    as_json: OneObjectOption = False,
) -> None:
    """Call a tool as the kernel does, and print what the model would read.

    Uses the servers of the settings (PG_DSN and NATS_SERVERS), else the running dev stack. Exit codes: 0 success, 1 the
    result is an error, 2 wrong usage or settings, or nothing reachable (nothing was written), 3 no result
    in time, 130 interrupted.
    """
    from openapi_tool.cli import call as work

    work.call(
        tool,
        args=args,
        project=project,
        agent=agent,
        channel=channel,
        timeout=timeout,
        yes=yes,
        as_json=as_json,
    )
