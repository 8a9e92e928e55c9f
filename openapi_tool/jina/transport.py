"""Transport: sends httpx requests through aiohttp, which needs a fraction of the CPU of httpx's own transport (ADR 1).

Callers see only httpx: requests, responses and exceptions. The transport does not retry, redirect, store cookies or
read proxy settings from the environment.
"""

from __future__ import annotations

import logging
import socket
import ssl
from functools import lru_cache
from ipaddress import ip_address
from typing import Self
from weakref import WeakMethod

import aiohttp
import httpx
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

from openapi_tool.jina.connections import current_project, on_connected, open_session
from openapi_tool.jina.options import EgressOptions
from openapi_tool.jina.public_addresses import is_public
from openapi_tool.jina.upstream_connection import FirstResponseAborted, ResponseAborted

log = logging.getLogger(__name__)

Resolver = AbstractResolver
"""For modules outside of this package, which must not import aiohttp."""

PROJECT = "project"
"""Request extension with the project id, for fair shares of connections."""

ON_CONNECTED = "on_connected"
"""Request extension with a bound method, or None. It is called without arguments once the request has a connection."""

_CHUNK_BYTES = 64 * 1024  # of a body, at most, in one step of the stream
_RESPONSE_HEADERS = (b"content-encoding", b"content-length", b"retry-after")
"""Headers of a response that are read; to convert the others would only cost CPU."""


class AiohttpTransport(httpx.AsyncBaseTransport):
    """httpx transport with a pool of connections, whose certificates `tls` verifies.

    If the settings name a forward proxy, TLS to the upstream goes through a tunnel, in which the proxy sees only the
    host's name. Only the embedded stack passes a `resolver`, which replaces DNS.
    """

    def __init__(self, tls: ssl.SSLContext, options: EgressOptions, resolver: AbstractResolver | None = None) -> None:
        self._tls = tls
        self._options = options
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the body of the response is a stream. Raises httpx.TransportError."""
        if self._session is None:
            self._session = self._open_session()
        # The connector of the session reads both.
        current_project.set(request.extensions.get(PROJECT, ""))
        callback = request.extensions.get(ON_CONNECTED)
        on_connected.set(None if callback is None else WeakMethod(callback))
        try:
            response = await self._session.request(
                request.method,
                _yarl_url(str(request.url)),
                headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw],
                data=request.content or None,
                allow_redirects=False,
            )
        except _CAUGHT as error:
            raise translate(error) from error
        headers = [header for header in response.raw_headers if header[0].lower() in _RESPONSE_HEADERS]
        return httpx.Response(response.status, headers=headers, stream=_ResponseBody(response))

    def _open_session(self) -> aiohttp.ClientSession:
        """Open the pool of connections. It needs a running event loop, so the constructor cannot open it."""
        resolver = self._resolver
        if self._options.public_addresses_only:
            resolver = PublicResolver(resolver or DefaultResolver())
        return open_session(self._tls, self._options, resolver)

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@lru_cache(maxsize=64)
def _yarl_url(url: str) -> yarl.URL:
    """Return aiohttp's form of a URL, which is sent as it is. Most requests are POST, and have few URLs."""
    return yarl.URL(url, encoded=True)


class _ResponseBody(httpx.AsyncByteStream):
    """The body of a response as a stream, with httpx's exceptions."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._chunks = response.content.iter_chunked(_CHUNK_BYTES)

    def __aiter__(self) -> Self:  # no async generator, as the event loop would register it, which costs CPU
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._chunks)
        except _CAUGHT as error:
            raise translate(error) from error

    async def aclose(self) -> None:
        """Return the connection to the pool if the body was read to its end, else close it."""
        self._response.release()


class PublicResolver(AbstractResolver):
    """DNS resolver that refuses a host with an address that is not public.

    aiohttp connects to the very addresses that `resolve` returns. A check with a look-up of its own would not help: the
    DNS server could give the check other addresses than aiohttp (DNS rebinding).
    """

    def __init__(self, inner: AbstractResolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return all addresses. Raises OSError if one is not public."""
        found = await self._inner.resolve(host, port, family)
        refused = [address["host"] for address in found if not is_public(ip_address(address["host"]))]
        if refused:
            log.error(
                "host of the upstream resolves to an address that is not public; nothing sent",
                extra={"action": "egress.address_refused", "host": host, "addresses": refused},
            )
            raise OSError("an address that is not public")
        return found

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._inner.close()


class CertificateRefused(httpx.ConnectError):
    """The certificate of the upstream, or of a proxy that intercepts TLS, cannot be verified; a retry cannot help."""


class ResponseRefused(httpx.RemoteProtocolError):
    """The response is malformed or exceeds a limit of `UpstreamConnection`.

    What was received may be surplus data of an earlier response on the connection, so a retry may help.
    """


class OwnResponseRefused(ResponseRefused):
    """The refused response certainly answers this request. A retry would be billed, and get the same."""


ERRORS: tuple[tuple[type[BaseException], type[httpx.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientConnectorCertificateError, CertificateRefused),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.ServerFingerprintMismatch, httpx.ConnectError),
    (FirstResponseAborted, OwnResponseRefused),
    (ResponseAborted, ResponseRefused),
    (aiohttp.ServerDisconnectedError, httpx.RemoteProtocolError),
    (aiohttp.ClientResponseError, ResponseRefused),
    (aiohttp.ClientPayloadError, httpx.ReadError),
    (aiohttp.ClientConnectionError, httpx.ReadError),
    (TimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientError, httpx.TransportError),
)
"""httpx's equivalents of aiohttp's exceptions; the first match counts, so subclasses come before their bases."""

_CAUGHT = (aiohttp.ClientError, TimeoutError)


def translate(error: BaseException) -> httpx.TransportError:
    """Return httpx's equivalent. Its text is only the type's name, as the original text may contain the URL."""
    name = type(error).__name__
    for kind, translated in ERRORS:
        if isinstance(error, kind):
            return translated(name)
    return httpx.TransportError(name)
