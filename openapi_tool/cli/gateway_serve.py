"""`openapi-tool gateway`: tool calls of many clients over HTTP.

`serve` reads settings and tools, `_serve` opens the state and serves. A client shows a token: one of this gateway,
which is in its state or in a file, or one of an external issuer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

try:
    from uvloop import new_event_loop
except ImportError:  # not built for this platform
    from asyncio import new_event_loop  # type: ignore[assignment]
from openapi_tool import __version__
from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.output import fail
from openapi_tool.cli.selection import DEFAULT_PROJECT, chosen_state
from openapi_tool.cli.served_tools import ServedTools, served_tools
from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.environment import CONFIG_VARIABLE, PREFIX
from openapi_tool.gateway.assembly import INSTANCE, open_gateway
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.opening import NATS, open_state
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.token_record import TokensInvalid
from openapi_tool.gateway.token_stores import StoredTokens, TokenFile, TokenStore
from openapi_tool.gateway.tokens import Tokens
from openapi_tool.gateway.tools import Tools, watch
from openapi_tool.jina.transport import Resolver
from openapi_tool.options.gateway import GatewayOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.reloading import Reloader
from openapi_tool.service.file_limit import raise_file_limit
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.settings.model import with_values
from openapi_tool.settings.sources import use_settings_file
from openapi_tool.shutdown import Shutdown, end_process
from openapi_tool.state.sqlite import MEMORY
from openapi_tool.state.sqlite_file import StateUnusable
from openapi_tool.telemetry.health import Dependency, Health
from openapi_tool.telemetry.health_server import health_server
from openapi_tool.telemetry.logs import configure_logging, log_crash
from openapi_tool.telemetry.loop_lag import monitor_loop_lag
from openapi_tool.telemetry.metrics import list_projects
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.telemetry.snapshots import Snapshots

if TYPE_CHECKING:
    from openapi_tool.gateway.jwts import Jwts
    from openapi_tool.http.server import HttpDoor

log = logging.getLogger(__name__)

_REFRESH_S = 1.0
_STATE = "state"
_TOKENS_FILE = f"{PREFIX}GATEWAY__TOKENS_FILE"


@dataclass(frozen=True, slots=True)
class GatewayFlags:
    """Flags of the command; None for those that were not given."""

    config: Path | None = None
    host: str | None = None
    port: int | None = None
    tools: Path | None = None
    state: Path | None = None
    structured: bool = False


def serve(flags: GatewayFlags, resolver: Resolver | None = None) -> NoReturn:
    """Serve until SIGTERM, SIGINT or SIGQUIT; then end the process.

    `resolver` replaces DNS for the upstream's hosts in tests and demos. Raises SettingsError.
    """
    if not find_spec("mcp"):
        fail("`gateway` needs packages that are not installed; run: pip install 'openapi-tool[gateway]'")
    use_settings_file(flags.config)
    open_files = raise_file_limit()
    read_settings = partial(_read_settings, flags)
    bootstrap = build_bootstrap(read_settings(), os.environ)
    settings = bootstrap.settings
    _start_telemetry(bootstrap)
    state = chosen_state(flags.state)
    parts = _Parts(
        served=served_tools(flags.tools, settings),
        state=state,
        create_token=_create_token(flags, state, settings.gateway.tokens_file),
        options=_with_possible_connections(settings.gateway, open_files),
        reloader=Reloader(bootstrap, read_settings, os.environ),
        resolver=resolver,
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(_serve(parts, structured=flags.structured))
        except SettingsError:
            raise
        except (StateUnusable, Unavailable, TokensInvalid) as error:
            fail(str(error))
        except Exception as error:  # noqa: BLE001 - a normal end of the process might take minutes
            defect = error
            end_process(1, lambda: log_crash(defect))
        end_process(0)


def _read_settings(flags: GatewayFlags) -> Settings:
    flags_of_settings = {"host": flags.host, "port": flags.port}
    given = {name: value for name, value in flags_of_settings.items() if value is not None}
    return load_settings(NO_DATABASE | {"gateway": given} if given else NO_DATABASE)


def _start_telemetry(bootstrap: Bootstrap) -> None:
    telemetry = bootstrap.settings.telemetry
    configure_logging(telemetry.log_level, telemetry.log_format, bootstrap.redactor, background=True)
    RECENT_WARNINGS.install(bootstrap.redactor)
    list_projects(telemetry.projects)
    for variable in bootstrap.secrets.missing():
        log.warning(
            "%s is not set: calls of tools that need it will fail", variable, extra={"action": "secret.missing"}
        )


def _with_possible_connections(options: GatewayOptions, open_files: int) -> GatewayOptions:
    """Return the options with no more connections of clients than half of the files that may be open.

    The other half is for the upstream, the health server and the state.
    """
    possible_connections = max(1, open_files // 2)
    return with_values(options, max_connections=min(options.max_connections, possible_connections))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `_serve` works with; `state` says where the state is, `create_token` how to make a token for it."""

    served: ServedTools
    state: Path
    create_token: str
    options: GatewayOptions
    reloader: Reloader
    resolver: Resolver | None


async def _serve(parts: _Parts, *, structured: bool) -> None:
    from openapi_tool.http.server import serve_http  # noqa: PLC0415 - an extra

    options = parts.options
    bootstrap = parts.reloader.bootstrap
    settings = bootstrap.settings
    health = bootstrap.health
    opened: list[Gateway] = []  # empty until the gateway is open, then with it alone
    shutdown = Shutdown(settings.executor, lambda: sum(gateway.running for gateway in opened))
    reload = asyncio.Event()
    shutdown.handle_signals(reload)
    health.dependencies = {_STATE: Dependency()}
    async with AsyncExitStack() as stack:
        await _serve_health(stack, settings, health)
        on_unavailable = partial(_record_state, health)
        opening = stack.enter_async_context(open_state(bootstrap, parts.state, on_unavailable))
        state = await shutdown.unless_requested(opening)  # it waits while NATS is unavailable
        if state is None:
            return
        tokens = _tokens(state, options)
        await tokens.load()
        jwts = _issuer_tokens(bootstrap)
        open_to_all = len(tokens) == 0 and jwts is None
        if open_to_all:
            _require_loopback(options.host, parts.create_token)
        listening = _listen(options)
        gateway = await stack.enter_async_context(
            open_gateway(parts.reloader, state, parts.served.tools, parts.resolver)
        )
        opened.append(gateway)
        door = await stack.enter_async_context(
            serve_http(
                gateway,
                state,
                tokens,
                options,
                listening,
                open_to_all=open_to_all,
                jwts=jwts,
                structured=structured,
                drain_s=settings.executor.drain_timeout_s - settings.executor.hand_back_s,
            )
        )
        _record_state(health, "")
        _log_serving(listening, len(tokens), open_to_all=open_to_all)
        background = asyncio.create_task(
            _run_background_tasks(parts, gateway, door, tokens, reload), name="background tasks"
        )
        try:
            await shutdown.requested_or_done(background)
            if background.done():
                background.result()  # raises the defect
        finally:
            health.draining = True
            shutdown.begin()
            await cancel_until_ended(background)
            with shutdown.step("drain"):
                await door.drain()
    log.info("stopped", extra={"action": "service.stopped"})


async def _run_background_tasks(
    parts: _Parts, gateway: Gateway, door: HttpDoor, tokens: Tokens, reload: asyncio.Event
) -> None:
    """Run until cancelled what a gateway does beside requests; `reload` asks to read the settings again."""

    async def use_tools(changed: Tools) -> None:
        gateway.use_tools(changed)
        await door.mcp.server.tools_changed()

    async with asyncio.TaskGroup() as group:
        group.create_task(parts.reloader.run(reload), name="reload")
        group.create_task(_refresh_tokens(tokens, parts.reloader.bootstrap.health), name="tokens")
        group.create_task(monitor_loop_lag(lambda _: None), name="loop lag")  # only for the metrics
        group.create_task(_until_it_ends(door.serving), name="end of the server")
        if parts.served.folder is not None:
            group.create_task(watch(parts.served.folder, use_tools), name="tools")


def _log_serving(listening: socket.socket, tokens: int, *, open_to_all: bool) -> None:
    """Log the address of the gateway, and how many tokens it knows."""
    host, port, *_ = listening.getsockname()
    log.info(
        "openapi-tool %s serves http://%s:%s, MCP at /mcp%s",
        __version__,
        f"[{host}]" if ":" in host else host,  # IPv6
        port,
        "; without tokens, for this machine only" if open_to_all else "",
        extra={"action": "gateway.serving", "host": host, "port": port, "tokens": tokens},
    )


def _record_state(health: Health, problem: str) -> None:
    """Show in the health whether the state can be read; `problem` is empty if it can."""
    health.record(_STATE, ok=not problem, reason=problem)


def _tokens(state: GatewayState, options: GatewayOptions) -> Tokens:
    stores: list[TokenStore] = [StoredTokens(state.tokens)]
    if options.tokens_file is not None:
        stores.append(TokenFile(options.tokens_file))
    return Tokens(stores, grace_s=options.token_grace_s)


def _issuer_tokens(bootstrap: Bootstrap) -> Jwts | None:
    """Return what checks the tokens of an external issuer, None if the settings name none."""
    options, egress = bootstrap.settings.gateway.oauth, bootstrap.settings.egress
    if options is None:
        return None
    from openapi_tool.gateway.issuer_keys import IssuerKeys  # noqa: PLC0415 - few deployments need it
    from openapi_tool.gateway.jwts import Jwts  # noqa: PLC0415
    from openapi_tool.jina.document import read_document  # noqa: PLC0415

    proxy = egress.proxy.get_secret_value() if egress.proxy else None
    read = partial(read_document, options.jwks_url, bootstrap.upstream_tls, proxy)
    return Jwts(options, IssuerKeys(read, bootstrap.settings.gateway.token_grace_s))


async def _until_it_ends(serving: asyncio.Task[None]) -> None:
    """Raise RuntimeError once the HTTP server ends, which it does not do before it is told to."""
    await asyncio.shield(serving)
    raise RuntimeError("the HTTP server has ended by itself")


async def _refresh_tokens(tokens: Tokens, health: Health) -> None:
    """Read the tokens again and again, so that changes take effect."""
    while True:
        _record_state(health, await tokens.refresh())
        await asyncio.sleep(_REFRESH_S)


async def _serve_health(stack: AsyncExitStack, settings: Settings, health: Health) -> None:
    """Serve the health until the stack is closed, if the settings name a port. Raises SettingsError."""
    options = settings.health
    if not options.port:
        return
    page = None
    if options.page:
        page = Snapshots(INSTANCE, health, {"executor.concurrency": settings.executor.concurrency})
    try:
        server = health_server(options.host, options.port, health, page, allowed_hosts=options.allowed_hosts)
        await stack.enter_async_context(server)
    except OSError as error:
        raise SettingsError([f"health.host, health.port: cannot listen: {error.strerror or error}"]) from error


def _create_token(flags: GatewayFlags, state: Path, tokens_file: Path | None) -> str:
    """Return advice with a command that creates the first token where this gateway will find it."""
    words = ["openapi-tool", "tokens", "create", "--project", DEFAULT_PROJECT]
    if tokens_file is not None:
        return f"create a token ({shlex.join([*words, '--file', str(tokens_file)])})"
    if state == MEMORY:
        create = shlex.join([*words, "--file", "tokens.json"])
        return f"create a token ({create}) and name its file in gateway.tokens_file ({_TOKENS_FILE}=tokens.json)"
    variable = ""
    if flags.state is not None:
        words += ["--state", str(flags.state)]
    elif state == NATS and flags.config is not None:  # which `tokens` reads from the variable only
        variable = f"{CONFIG_VARIABLE}={shlex.quote(str(flags.config))} "
    return f"create a token ({variable}{shlex.join(words)}), name gateway.tokens_file"


def _require_loopback(host: str, create_token: str) -> None:
    """Raise SettingsError if other machines reach this address, which a gateway without tokens does not serve."""
    if not _is_loopback(host):
        why = f"gateway.host: without tokens anyone who reaches {host} could spend the key"
        raise SettingsError([f"{why}: {create_token}, or listen on 127.0.0.1"])


def _listen(options: GatewayOptions) -> socket.socket:
    """Return the listening socket. Raises SettingsError."""
    try:
        return bound_socket(options.host, options.port)
    except OSError as error:
        why = f"gateway.host, gateway.port: cannot listen on {options.host}:{options.port}: {error.strerror or error}"
        raise SettingsError([f"{why}; set another one (--host, --port)"]) from error


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    host_and_port = address[:2]  # an address of IPv6 has more
    return socket.create_server(host_and_port, family=family, backlog=1_024)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
