"""The HTTP server of a gateway: its end points behind the checks of `access.py`, served by uvicorn, and its end."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.tokens import Tokens
from openapi_tool.http.access import Access
from openapi_tool.http.connections import IDLE_S, Connections
from openapi_tool.http.idempotency import KEPT_S, Idempotency
from openapi_tool.http.mcp import PATH, McpDoor
from openapi_tool.http.oauth import ResourceMetadata
from openapi_tool.http.open_webui import OpenWebuiRoutes
from openapi_tool.http.problems import Problem, on_problem
from openapi_tool.http.senders import Senders
from openapi_tool.http.tools import ToolRoutes
from openapi_tool.options.gateway import GatewayOptions

if TYPE_CHECKING:
    from openapi_tool.gateway.jwts import Jwts

_MAX_HEAD_BYTES = 16_384  # request line and headers
_BACKLOG = 1_024  # connections that the system accepts before the process does

# Headers of requests that scripts of allowed web pages may set, and headers of responses that they may read (CORS).
_ALLOWED_HEADERS = ("authorization", "content-type", "idempotency-key", "x-agent-id", "last-event-id")
_ALLOWED_MCP_HEADERS = ("mcp-protocol-version", "mcp-session-id", "mcp-method", "mcp-name")
_EXPOSED_HEADERS = ("retry-after", "www-authenticate", "idempotent-replayed")


@dataclass(frozen=True, slots=True)
class HttpDoor:
    """The running HTTP server. `mcp` is its MCP end point, and `serving` the task that ends with the server."""

    mcp: McpDoor
    server: uvicorn.Server
    serving: asyncio.Task[None]

    async def drain(self) -> None:
        """Take no new request; return once those that run are answered, or their time is over."""
        self.mcp.server.end_subscriptions()
        self.server.should_exit = True
        await asyncio.wait([self.serving])


@asynccontextmanager
async def serve_http(
    gateway: Gateway,
    state: GatewayState,
    tokens: Tokens,
    options: GatewayOptions,
    listening: socket.socket,
    *,
    open_to_all: bool,
    structured: bool,
    drain_s: float,
    jwts: Jwts | None = None,
) -> AsyncIterator[HttpDoor]:
    """Serve requests on a listening socket until the context ends.

    - `open_to_all`: nobody needs a token, until there is one.
    - `structured`: MCP results have a structure beside their text.
    - `drain_s`: seconds that running requests get at the end.
    - `jwts`: finds the callers of an external issuer's tokens; None without one.
    """
    connections = Connections(options.max_connections)
    mcp = McpDoor(gateway, structured=structured)
    routes = [
        *ToolRoutes(gateway, Idempotency(state.texts("idempotent", KEPT_S))).routes,
        *OpenWebuiRoutes(gateway).routes,
        Route(PATH, mcp, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {Problem: on_problem, HTTPException: on_problem}
    end_points = Starlette(routes=routes, exception_handlers=handlers)
    end_points.router.redirect_slashes = False  # of `/mcp/` to `/mcp`
    metadata = ResourceMetadata(jwts.options) if jwts else None
    senders = Senders(options, tokens, open_to_all=open_to_all, jwts=jwts, metadata=metadata)
    access = Access(end_points, options, senders, connections, metadata)
    app = connections.answering(_with_cors(access, options.allowed_origins))
    config = uvicorn.Config(
        app,
        http=cast("Any", connections.protocol),
        ws="none",
        lifespan="off",
        log_config=None,  # the program has set up its log
        access_log=False,
        proxy_headers=False,  # any client can send them
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=math.ceil(2 * IDLE_S),  # never reached: `Connection` closes idle ones earlier
        timeout_graceful_shutdown=max(1, math.floor(drain_s)),
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
    server = _Server(config)
    async with mcp.manager.run():
        serving = asyncio.create_task(server.serve([listening]), name="http")
        door = HttpDoor(mcp, server, serving)
        try:
            yield door
        finally:
            await door.drain()


class _Server(uvicorn.Server):
    """uvicorn's server without its handlers of signals: `shutdown.py` has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Return the app, extended so that scripts of web pages of these origins may call it (CORS)."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=(*_ALLOWED_HEADERS, *_ALLOWED_MCP_HEADERS),
        expose_headers=_EXPOSED_HEADERS,
    )
