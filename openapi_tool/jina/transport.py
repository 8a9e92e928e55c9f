"""An httpx transport over aiohttp's connection pool: httpx's API at a third of its pool's cost.

It re-sends nothing, follows nothing, stores no cookies and reads no proxy settings.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import aiohttp
import httpx
import yarl
from aiohttp.abc import AbstractResolver as Resolver

__all__ = ["ERRORS", "AiohttpTransport", "Resolver", "translate"]

_CHUNK_BYTES = 64 * 1024

ERRORS: tuple[tuple[type[BaseException], type[httpx.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.ServerFingerprintMismatch, httpx.ConnectError),
    (aiohttp.ServerDisconnectedError, httpx.RemoteProtocolError),
    (aiohttp.ClientResponseError, httpx.RemoteProtocolError),
    (aiohttp.ClientPayloadError, httpx.ReadError),
    (aiohttp.ClientConnectionError, httpx.ReadError),
    (aiohttp.ClientError, httpx.TransportError),
)
"""aiohttp's errors and what httpx calls them; the first match counts."""


def translate(error: BaseException) -> httpx.TransportError:
    """The httpx error for one of aiohttp's, without its text (which may show the URL)."""
    kind = next(translated for kind, translated in ERRORS if isinstance(error, kind))
    return kind(type(error).__name__)


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.content.iter_chunked(_CHUNK_BYTES):
                yield chunk
        except aiohttp.ClientError as error:
            raise translate(error) from error

    async def aclose(self) -> None:
        """Give a fully read connection back, close any other."""
        self._response.release()


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Connections to the upstream, verified by `tls`, at most `connections` at once.

    `resolver` says where a host is; only the embedded stack passes one.
    """

    def __init__(self, tls: ssl.SSLContext, connections: int, resolver: Resolver | None = None) -> None:
        self._tls = tls
        self._connections = connections
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            ssl=self._tls, limit=self._connections, limit_per_host=0, resolver=self._resolver, ttl_dns_cache=60
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )
        session._retry_connection = False  # noqa: SLF001 - no public switch: a GET would be sent, and billed, twice
        return session

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises httpx.TransportError for every failure of the network."""
        if self._session is None:
            self._session = self._open()
        try:
            response = await self._session.request(
                request.method,
                yarl.URL(str(request.url), encoded=True),
                headers=request.headers.multi_items(),
                data=request.content or None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise translate(error) from error
        return httpx.Response(response.status, headers=response.raw_headers, stream=_Body(response))

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None
