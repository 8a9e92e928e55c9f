"""The connections to the upstream: aiohttp's session with three changes, for which aiohttp has no public options.

- Each connection is an `UpstreamConnection`, which limits what the upstream may send.
- `_Connector` shares the connections fairly among projects.
- A GET without a response is not sent again, since it would be billed twice (ADR 1).

No other module uses private names of aiohttp. Those may change in any minor version, so `__main__.py` refuses any other
than the one that was tested.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, cast
from weakref import WeakMethod, WeakSet

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.jina.options import EgressOptions
from openapi_tool.jina.upstream_connection import UpstreamConnection
from openapi_tool.open_files import with_free_file
from openapi_tool.telemetry import metrics

_MAX_HEADER_BYTES = 8_190  # of one header
_MAX_HEADERS = 100  # of one response
_CLOSE_S = 1.0  # until aborted connections have ended, which takes some iterations of the event loop
_DNS_CACHE_S = 60  # for which an address of a host is used
_CONNECT_S = 10.0  # for a connection to be made

MAX_HANDSHAKES = 16
"""Maximum attempts to connect at once: in one iteration of the event loop, TLS handshakes then take 10 ms at most."""

current_project: ContextVar[str] = ContextVar("project", default="")
"""Project of the request that the current task sends."""

on_connected: ContextVar[WeakMethod[Callable[[], None]] | None] = ContextVar("on_connected", default=None)
"""What to call once the current task's request has a connection.

The reference is weak, because a connection keeps the context of the task that opened it, and must not keep that task's
call in memory.
"""


def open_session(
    tls: ssl.SSLContext, options: EgressOptions, resolver: AbstractResolver | None
) -> aiohttp.ClientSession:
    """Return a session without retries, cookies and settings of the environment; `tls` verifies certificates."""
    connector = _Connector(
        ssl=tls,
        limit=options.max_connections,
        limit_per_host=0,  # none beside `limit`
        resolver=resolver,
        ttl_dns_cache=_DNS_CACHE_S,
    )
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        proxy=options.proxy.get_secret_value() if options.proxy else None,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        max_headers=_MAX_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
    )
    session._retry_connection = False  # noqa: SLF001 - no public switch: a GET would be sent, and billed, twice
    return session


class _Connector(aiohttp.TCPConnector):
    """Connector that shares two things fairly among projects: connections in use, and attempts to open one.

    Without the first share, batches of one project could use all connections for as long as slow pages load. Without
    the second one, 300 TLS handshakes of one project, of 0.5 ms each, delayed all other projects by 150 ms.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._handshakes = _measured(FairSemaphore(MAX_HANDSHAKES), "tls_handshakes")
        self._in_use = _measured(FairSemaphore(self.limit), "upstream_connections")
        # Weak, since the connection to a proxy is never told that it ends once a tunnel through it is open.
        self._open_connections = WeakSet[UpstreamConnection]()
        connection = partial(
            UpstreamConnection,
            loop=asyncio.get_running_loop(),
            turns=FairSemaphore(1),
            open_connections=self._open_connections,
        )
        self._factory = cast("partial[ResponseHandler]", connection)  # aiohttp makes each connection with it

    async def close(self, *, abort_ssl: bool = False) -> None:
        """Close all connections, and wait until they have ended; aiohttp does not wait for cancelled requests."""
        await super().close(abort_ssl=abort_ssl)
        ends = [connection.end_now() for connection in list(self._open_connections)]
        pending = [end for end in ends if end is not None]
        if pending:
            await asyncio.wait(pending, timeout=_CLOSE_S)

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> ResponseHandler:
        """Open a connection, once fewer than MAX_HANDSHAKES attempts run. aiohttp calls it if none is idle."""
        create = super()._create_connection
        async with self._handshakes.permit(current_project.get()):
            return await with_free_file(lambda: create(req, traces, timeout))

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> Connection:
        """Return a connection for a request, idle or new, once fewer than `limit` are in use. aiohttp calls it."""
        project = current_project.get()
        await self._in_use.take(project)
        try:
            connection = await super().connect(req, traces, timeout)
        except BaseException:
            self._in_use.give(project)
            raise
        connection.add_callback(partial(self._in_use.give, project))
        if isinstance(connection.protocol, UpstreamConnection):
            connection.protocol.project = project
        _call_on_connected()
        return connection


def _call_on_connected() -> None:
    """Call what `on_connected` refers to, if anything, and if that still exists."""
    reference = on_connected.get()
    callback = None if reference is None else reference()
    if callback is not None:
        callback()


def _measured(semaphore: FairSemaphore, name: str) -> FairSemaphore:
    """Return a semaphore whose use is a metric."""
    metrics.SEMAPHORE_USED.labels(name).set_function(lambda: semaphore.used)
    metrics.SEMAPHORE_WAITING.labels(name).set_function(lambda: semaphore.waiting)
    return semaphore
