"""An httpx transport over aiohttp's connection pool: httpx's API at a third of its pool's cost.

It re-sends nothing, follows nothing, stores no cookies and reads no proxy settings of the environment.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator
from ipaddress import ip_address

import aiohttp
import httpx
import yarl
from aiohttp.abc import AbstractResolver as Resolver
from aiohttp.abc import ResolveResult
from aiohttp.resolver import DefaultResolver
from pydantic import SecretStr

from openapi_tool.jina.addresses import is_public

__all__ = ["ERRORS", "AiohttpTransport", "PublicResolver", "Resolver", "translate"]

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
_MAX_HEADER_BYTES, _MAX_HEADERS = 8_190, 100

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


class PublicResolver(Resolver):
    """Passes on only public addresses; the connect uses just these, so nothing is looked up a second time."""

    def __init__(self, inner: Resolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Every address of a host. Raises OSError when one of them is not public."""
        found = await self._inner.resolve(host, port, family)
        refused = [address["host"] for address in found if not is_public(ip_address(address["host"]))]
        if refused:
            about = {"action": "egress.address_refused", "host": host, "addresses": refused}
            log.error("the upstream's host has an address that is not public; nothing is sent to it", extra=about)
            raise OSError("an address that is not public")
        return found

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._inner.close()


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Connections to the upstream, verified by `tls`, at most `connections` at once.

    `resolver` says where a host is; only the embedded stack passes one. `proxy` is the URL of a forward
    proxy; TLS to the upstream goes through it, so it sees host names and no more. With
    `public_addresses_only` nothing is sent to a host that resolves to any other address.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        connections: int,
        resolver: Resolver | None = None,
        *,
        proxy: SecretStr | None = None,
        public_addresses_only: bool = False,
    ) -> None:
        self._tls = tls
        self._connections = connections
        self._resolver = resolver
        self._proxy = proxy
        self._public_addresses_only = public_addresses_only
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        resolver = self._resolver
        if self._public_addresses_only:
            resolver = PublicResolver(resolver or DefaultResolver())
        connector = aiohttp.TCPConnector(
            ssl=self._tls, limit=self._connections, limit_per_host=0, resolver=resolver, ttl_dns_cache=60
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            proxy=self._proxy.get_secret_value() if self._proxy else None,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
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
                headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw],
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
