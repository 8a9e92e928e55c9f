"""HTTP server for probes (/livez, /readyz), metrics and a status page, bounded against hostile clients.

Clients do not authenticate, and their sockets use file descriptors that calls need, too. So a connection carries one
request and lasts a few seconds, and the oldest is closed when there are too many: probes are answered however many
connections send nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from cachetools import TTLCache, cached
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from openapi_tool.host_names import host_of_header, is_internal
from openapi_tool.telemetry.health import Health
from openapi_tool.telemetry.status_page import HEADERS, page, with_problems

MAX_CONNECTIONS = 64  # at a time; more are closed
LIFE_S = 5.0
"""Lifetime of a connection in seconds."""
MAX_REQUEST_BYTES = 128 * 1024
"""Bytes that a connection may receive; the limits of aiohttp allow a request of at most 70 kB."""
METRICS_CACHE_S = 1.0  # for which the text of /metrics is used again
_LIVE = "/livez"
_AIOHTTP_LIMITS: dict[str, Any] = {
    "max_line_size": 2_048,
    "max_field_size": 2_048,
    "max_headers": 32,
    "lingering_time": 0,
}

Routes = dict[str, Callable[[web.Request], Any]]


class Statistics(Protocol):
    """Data of the HTML page."""

    def now(self) -> Mapping[str, Any]:
        """Return a JSON object."""


@asynccontextmanager
async def health_server(
    host: str,
    port: int,
    health: Health | None,
    snapshots: Statistics | None = None,
    max_connections: int = MAX_CONNECTIONS,
    allowed_hosts: Collection[str] = (),
) -> AsyncIterator[int]:
    """Serve probes and metrics of `health` and the page of `snapshots`; yield the port. Raises OSError.

    `allowed_hosts` are public names in lower case under which more than /livez is served.
    """
    app = web.Application(middlewares=[_close_afterwards, _refusing_public_names(allowed_hosts)])
    handlers: Routes = {}
    if health is not None:
        handlers |= _probes(health)
    if snapshots is not None:
        handlers |= _page(snapshots)
    app.add_routes(web.get(path, handler) for path, handler in handlers.items())
    runner = web.AppRunner(app, access_log=None, handle_signals=False, **_AIOHTTP_LIMITS)
    await runner.setup()
    connections: dict[_Connection, None] = {}  # open ones, the oldest first
    new_http_protocol = cast("Callable[[], asyncio.Protocol]", runner.server)
    loop = asyncio.get_running_loop()
    # How many connections may be accepted together. Below the maximum, so that they do not close each other before
    # they are read.
    backlog = max(1, max_connections // 2)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        listening = await loop.create_server(
            lambda: _Connection(new_http_protocol(), connections, max_connections), host, port, backlog=backlog
        )
        stack.callback(listening.close)
        yield listening.sockets[0].getsockname()[1]


class _Connection(asyncio.Protocol):
    """Connection with limits of time, number and bytes around one of aiohttp, which alone waits an hour for a request.

    It is a protocol of asyncio: a transport calls its methods, which call those of aiohttp's protocol (`inner`).
    """

    def __init__(self, inner: asyncio.Protocol, connections: dict[_Connection, None], max_connections: int) -> None:
        self._inner = inner
        self._max_connections = max_connections
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._end: asyncio.TimerHandle | None = None
        self._received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._connections) >= self._max_connections:
            oldest = next(iter(self._connections))
            oldest.abort()
        self._connections[self] = None
        self._transport = cast("asyncio.Transport", transport)
        self._end = asyncio.get_running_loop().call_later(LIFE_S, self.abort)
        self._inner.connection_made(transport)

    def abort(self) -> None:
        """Close the connection immediately."""
        self._connections.pop(self, None)
        if self._transport:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.pop(self, None)
        if self._end:
            self._end.cancel()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data on, up to a limit: aiohttp buffers everything that follows a refused request."""
        self._received_bytes += len(data)
        if self._received_bytes > MAX_REQUEST_BYTES:
            self.abort()
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


@web.middleware
async def _close_afterwards(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response


def _refusing_public_names(allowed: Collection[str]) -> Middleware:
    """Refuse requests to a public name that is not allowed, against DNS rebinding.

    That is an attack by a web page whose own host name resolves to this server. The browser would let the page read the
    names of projects and keys. Probes and scrapers use addresses or internal names. Some load balancers send no Host,
    which no browser does.
    """

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", [])
        name = host_of_header(hosts[0]) if len(hosts) == 1 else None
        may_be_browser = bool(hosts)
        if request.path != _LIVE and may_be_browser and not is_internal(name) and name not in allowed:
            raise web.HTTPMisdirectedRequest(
                text="use an address or an internal name, or add the name in Host to health.allowed_hosts\n"
            )
        return await handler(request)

    return refuse


def _probes(health: Health) -> Routes:
    cached_exposition = cached(TTLCache(1, METRICS_CACHE_S))(exposition)  # to make it takes milliseconds

    async def live(_: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def ready(_: web.Request) -> web.Response:
        return web.json_response(health.as_json(), status=200 if health.ready else 503)

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=cached_exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return {_LIVE: live, "/readyz": ready, "/metrics": scrape}


def _page(snapshots: Statistics) -> Routes:
    async def html(_: web.Request) -> web.Response:
        return web.Response(text=page(snapshots.now()), content_type="text/html", headers=HEADERS)

    async def stats(_: web.Request) -> web.Response:
        return web.json_response(with_problems(snapshots.now()), headers=HEADERS)

    return {"/": html, "/stats.json": stats}


def exposition() -> bytes:
    """Return the text of /metrics."""
    return generate_latest(REGISTRY)
