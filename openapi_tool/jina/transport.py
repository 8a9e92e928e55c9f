"""httpx transport over aiohttp's connection pool, which needs a fraction of the CPU of httpx's own (ADR 1).

The transport does not retry, redirect, store cookies or read proxy settings from the environment.

aiohttp's own protocol class gives unsolicited data to the next request on the connection: a surplus response would go
to another project's call, and an endless one would fill the memory. So `UpstreamConnection` replaces it.
"""

from __future__ import annotations

import asyncio
import select
import ssl
import sys
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Self, cast

import aiohttp
import httpx
import yarl
from aiohttp import ClientConnectionError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.resolver import DefaultResolver
from aiohttp.streams import StreamReader

from openapi_tool.jina.connector import PROJECT, Connector, PublicResolver, Resolver, requesting_project
from openapi_tool.jina.options import EgressOptions

_PIECE_BYTES, _MAX_INFORMATIONAL = 8 * 1024, 8
_MAX_NON_BODY_BYTES = 32 * 1024
_FRAMING_SHARE = 1 / 4
"""Limit of chunk framing as a fraction of the body. Parsing a chunk costs as much as parsing a kilobyte of body."""

_MAX_FRAMING_BYTES = 20 * 1024  # two pieces with the ends of head and body, and some small chunks


class ResponseAborted(ClientConnectionError):
    """The connection was aborted because of what the upstream sent."""


class FirstResponseAborted(ResponseAborted):
    """The same for the first request of a connection: the data cannot be the surplus of an earlier response."""


class UpstreamConnection(ResponseHandler):
    """aiohttp protocol that aborts the connection on unsolicited or malicious data.

    It aborts on:
    - the first byte that no request asked for;
    - the ninth informational response. Data is parsed in pieces of 8 kB, since a single TLS read can contain 14,000
      of them, which take a second to parse;
    - 32 kB without a body byte: a head or trailers, which the parser buffers;
    - some 4,000 chunks that are mostly framing, wherever they are: 500,000 of one byte take a second.

    A pending request then fails with (First)ResponseAborted; a response that is already complete stays readable.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._aborted = False
        self._requests = 0
        self._has_head = False  # of the final response
        self._informational = self._non_body_bytes = self._framing_bytes = 0
        self._unparsed = bytearray()
        self._poll: select.poll | None = None

    def set_response_params(self, **params: Any) -> None:
        """Expect a response; called before each request is sent."""
        self._requests += 1
        self._has_head = False
        self._informational = self._non_body_bytes = self._framing_bytes = 0
        super().set_response_params(**params)

    def is_connected(self) -> bool:
        """Return whether the connection can be reused."""
        unexpected = self._aborted or self._unparsed or (self._is_idle() and self._has_unread())
        return super().is_connected() and not unexpected

    def data_received(self, data: bytes) -> None:
        """Parse received data; abort if no response is due. Empty data means that the paused reader resumes."""
        self._unparsed += data
        if not data and not self._aborted:
            self._parse(b"")
        # A paused parser would buffer a piece, and `_parse` would take that for framing.
        while self._unparsed and not self._reading_paused:
            self._parse_next()

    def _parse_next(self) -> None:
        # The last byte is a piece of its own: if it is surplus, the response is complete by then. Within a piece the
        # parser would ignore a blank line behind the response, and keep the beginning of a further one.
        size = min(_PIECE_BYTES, max(1, len(self._unparsed) - 1))
        piece = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        if self._is_idle():
            self._abort_now()
        if not self._aborted:
            self._parse(piece)

    def _parse(self, piece: bytes) -> None:
        before = self._body_bytes() if self._has_head else 0  # without a head the body is the previous response's
        super().data_received(piece)
        if self._is_idle():
            return
        body_bytes = self._body_bytes()
        self._non_body_bytes = self._non_body_bytes + len(piece) if body_bytes == before else 0
        if body := body_bytes - before:  # at least 0, as a large chunk must not allow many small ones later
            self._framing_bytes = max(0, self._framing_bytes + len(piece) - body - int(body * _FRAMING_SHARE))
        if self._non_body_bytes > _MAX_NON_BODY_BYTES or self._framing_bytes > _MAX_FRAMING_BYTES:
            self._abort_now()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Parse the data that waited for a paused reader, then fail the request if it is still pending."""
        if self._payload is not None and not self._payload.is_eof():
            self._payload._high_water = self._payload._high_water_chunks = sys.maxsize  # noqa: SLF001 - pause no more
            self._parse(b"")
        while self._unparsed:
            self._parse_next()
        super().connection_lost(self._reason() if self._aborted else exc)

    def _body_bytes(self) -> int:
        return self._payload.total_bytes if self._payload is not None else 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the head of a response (101 is final). A second means that surplus data followed the first response."""
        informational = data[0].code < HTTPStatus.OK and data[0].code != HTTPStatus.SWITCHING_PROTOCOLS
        self._informational += informational
        if self._has_head or self._informational > _MAX_INFORMATIONAL:
            self._abort_now()
        elif not informational:
            self._has_head = True
            super().feed_data(data, size)

    def _is_idle(self) -> bool:
        return self._has_head and (self._payload is None or self._payload.is_eof())

    def _has_unread(self) -> bool:
        """Return whether the event loop has not read bytes or an EOF of the socket yet."""
        if self.transport is None:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(self._poll.poll(0))

    def _abort_now(self) -> None:
        """Abort the connection at once; a graceful close would continue to read.

        Do not use `self.abort()`: it drops the body that is being received, and its reader would wait forever.
        """
        self._aborted = True
        if self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(self._reason())
        if self.transport is not None:
            self.transport.abort()

    def _reason(self) -> ResponseAborted:
        return FirstResponseAborted() if self._requests == 1 else ResponseAborted()


_CHUNK_BYTES, _MAX_HEADER_BYTES, _MAX_HEADERS = 64 * 1024, 8_190, 100
_RESPONSE_HEADERS = (b"content-encoding", b"content-length", b"retry-after")


class CertificateRefused(httpx.ConnectError):
    """The certificate of the upstream, or of a proxy that intercepts TLS, cannot be verified; a retry cannot help."""


class ResponseRefused(httpx.RemoteProtocolError):
    """The response is malformed or exceeds a limit of `UpstreamConnection`. It may be an earlier request's surplus."""


class OwnResponseRefused(ResponseRefused):
    """The refused response is certainly this request's; a retry would be billed, and get the same."""


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
    """Return httpx's equivalent, without the text, which may contain the URL."""
    kind = next((translated for kind, translated in ERRORS if isinstance(error, kind)), httpx.TransportError)
    return kind(type(error).__name__)


_yarl_url = lru_cache(maxsize=64)(partial(yarl.URL, encoded=True))


class _ResponseBody(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._chunks = response.content.iter_chunked(_CHUNK_BYTES)

    def __aiter__(self) -> Self:  # the event loop registers async generators
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._chunks)
        except _CAUGHT as error:
            raise translate(error) from error

    async def aclose(self) -> None:
        """Return the connection to the pool if the body was read completely, else close it."""
        self._response.release()


class AiohttpTransport(httpx.AsyncBaseTransport):
    """httpx transport with a pool of connections, whose certificates `tls` verifies.

    TLS to the upstream is tunnelled through a forward proxy, so that sees host names only. `resolver` replaces DNS;
    only the embedded stack passes one.
    """

    def __init__(self, tls: ssl.SSLContext, options: EgressOptions, resolver: Resolver | None = None) -> None:
        self._tls = tls
        self._options = options
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        resolver, options = self._resolver, self._options
        if options.public_addresses_only:
            resolver = PublicResolver(resolver or DefaultResolver())
        connector = Connector(
            ssl=self._tls, limit=options.max_connections, limit_per_host=0, resolver=resolver, ttl_dns_cache=60
        )
        connection = cast("partial[ResponseHandler]", partial(UpstreamConnection, loop=asyncio.get_running_loop()))
        connector._factory = connection  # noqa: SLF001 - aiohttp has no public option for its protocol class
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            proxy=options.proxy.get_secret_value() if options.proxy else None,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )
        session._retry_connection = False  # noqa: SLF001 - no public switch: a GET would be sent, and billed, twice
        return session

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the body of the response is a stream. Raises httpx.TransportError."""
        if self._session is None:
            self._session = self._open()
        requesting_project.set(request.extensions.get(PROJECT, ""))
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

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None
