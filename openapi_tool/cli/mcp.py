"""`openapi-tool mcp`: tool calls of an MCP client over standard input and output."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.output import fail, print_status
from openapi_tool.cli.selection import chosen_state
from openapi_tool.cli.served_tools import ServedTools, served_tools
from openapi_tool.gateway.assembly import open_gateway
from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.opening import open_state
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.tools import Tools, watch
from openapi_tool.jina.transport import Resolver
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import is_token
from openapi_tool.reloading import Reloader
from openapi_tool.settings import Settings, given_values, load_settings
from openapi_tool.settings.sources import use_settings_file
from openapi_tool.shutdown import end_process
from openapi_tool.signals import ignore_meaningless
from openapi_tool.state.sqlite_file import StateUnusable
from openapi_tool.telemetry.logs import configure_logging, log_crash
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.tools.wording import short

_CONNECT_S = 5.0  # to NATS


@dataclass(frozen=True, slots=True)
class McpFlags:
    """Flags of the command; None for those that were not given."""

    config: Path | None = None
    tools: Path | None = None
    state: Path | None = None
    project: str = "local"
    agent: str = "local"
    structured: bool = False


def serve(flags: McpFlags, resolver: Resolver | None = None) -> NoReturn:
    """Serve one client until it closes its end, or SIGTERM or SIGINT; then end the process.

    `resolver` replaces DNS for the upstream's hosts in tests and demos. Raises SettingsError.
    """
    _check(flags)
    use_settings_file(flags.config)
    read_settings = partial(load_settings, NO_DATABASE)
    bootstrap = build_bootstrap(read_settings(), os.environ)
    level, log_format = _log_options(bootstrap.settings)
    configure_logging(level, log_format, bootstrap.redactor, background=True)
    RECENT_WARNINGS.install(bootstrap.redactor)
    tools = served_tools(flags.tools, bootstrap.settings)
    state = chosen_state(flags.state)
    _say_what_is_missing(bootstrap)
    reloader = Reloader(bootstrap, read_settings, os.environ)
    with asyncio.Runner() as runner:
        try:
            runner.run(_serve(flags, reloader, state, tools, resolver))
        except (StateUnusable, Unavailable) as outage:
            fail(str(outage))
        except Exception as error:  # noqa: BLE001 - a normal end of the process might wait for the client
            defect = error
            end_process(1, lambda: log_crash(defect))
        end_process(0)  # not a normal end: a thread may still wait for the client


def _check(flags: McpFlags) -> None:
    """Exit with 2 if the package is missing, or an option is wrong."""
    if not find_spec("mcp"):
        fail("`mcp` needs a package that is not installed; run: pip install 'openapi-tool[gateway]'")
    for option, value in (("--project", flags.project), ("--agent", flags.agent)):
        if not is_token(value):
            fail(f"{option}: {short(value)!r} is no id: it is empty, or contains blanks or `.*>`")


def _say_what_is_missing(bootstrap: Bootstrap) -> None:
    for variable in bootstrap.secrets.missing():
        print_status(f"openapi-tool: {variable} is not set, so calls that need it will fail")
    if sys.stdin.isatty():
        print_status("openapi-tool: waiting for an MCP client on standard input; end with Ctrl-D")


def _log_options(settings: Settings) -> tuple[Any, Any]:
    """Return level and format of the log.

    By default only warnings and errors are logged, as text: clients show standard error to people, or store it.
    """
    given: Mapping[str, Any] = given_values().get("telemetry", {})
    level = settings.telemetry.log_level if "log_level" in given else "warning"
    log_format = settings.telemetry.log_format if "log_format" in given else "console"
    return level, log_format


async def _serve(
    flags: McpFlags, reloader: Reloader, state_path: Path, served: ServedTools, resolver: Resolver | None
) -> None:
    from openapi_tool.mcp.server import McpServer, initialization  # noqa: PLC0415 - an extra
    from openapi_tool.mcp.stdio import StdioTransport, claim_standard_streams  # noqa: PLC0415

    caller = Caller(flags.project, flags.agent)
    stop = asyncio.Event()
    reload = asyncio.Event()
    _handle_signals(stop, reload)
    async with AsyncExitStack() as stack:
        state = await _open_state(stack, reloader.bootstrap, state_path)
        gateway: Gateway = await stack.enter_async_context(open_gateway(reloader, state, served.tools, resolver))
        transport = StdioTransport(*claim_standard_streams(), gateway.keep_soon)
        door = McpServer(gateway, lambda _: caller, structured=flags.structured, on_answer=transport.on_answer)
        server = door.server(gateway.tools_of(caller))
        background = [asyncio.create_task(reloader.run(reload), name="reload")]

        async def use_tools(changed: Tools) -> None:
            gateway.use_tools(changed)
            await door.tools_changed()

        if served.folder is not None:
            background.append(asyncio.create_task(watch(served.folder, use_tools), name="tools"))
        try:
            async with transport.streams(stop) as (incoming, outgoing):
                await server.run(incoming, outgoing, initialization(server))
        finally:
            for task in background:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


def _handle_signals(stop: asyncio.Event, reload: asyncio.Event) -> None:
    """Let the first signal to end set `stop`, the second one end the process at once, and SIGHUP set `reload`."""
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        if stop.is_set():
            end_process(128 + number)  # the exit status that shells show for a signal
        stop.set()

    ignore_meaningless()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, reload.set)


async def _open_state(stack: AsyncExitStack, bootstrap: Bootstrap, path: Path) -> GatewayState:
    """Open the state within a time limit, as the client waits for an answer. Raises Unavailable, StateUnusable."""
    reasons = ["no answer"]  # why NATS is unavailable, after each attempt to connect
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await stack.enter_async_context(open_state(bootstrap, path, reasons.append))
    except TimeoutError:
        raise Unavailable(f"cannot connect to NATS: {bootstrap.redactor.text(reasons[-1])}") from None
