"""aiohttp's session with changes for which it has no public option; no other module uses private names of aiohttp.

Its own protocol class gives unsolicited data to the next request on the connection: a surplus response would go to
another project's call, and an endless one would fill the memory. So `UpstreamConnection` replaces it. And it would send
a GET again that got no response, which would be billed twice (ADR 1).

`__main__.py` refuses another minor version of aiohttp.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from weakref import WeakMethod, WeakSet

import aiohttp
from aiohttp import ClientConnectionError
from aiohttp.abc import AbstractResolver
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader
from aiohttp.tracing import Trace

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.jina.options import EgressOptions
from openapi_tool.open_files import with_free_file
from openapi_tool.telemetry import metrics

_PIECE_BYTES = 8 * 1024
_MAX_INFORMATIONAL = 8
_MAX_NON_BODY_BYTES = 32 * 1024
_FRAMING_SHARE = 1 / 100
"""Chunk framing that costs no turn, as a fraction of the body: one chunk per 500 bytes of body, as a chunk has at least
5 bytes of it. Parsing a chunk costs as much as parsing a kilobyte of body."""

_MAX_FRAMING_BYTES = 10 * 1024
"""Framing beyond that share that costs no turn: a piece with the end of a head, and up to 2,000 chunks, or 4 ms."""

_TURN_S = 2.5e-6
"""Seconds until the next turn for each byte of framing in this one. Parsing a chunk takes 2 to 3 µs of CPU and it has 5
bytes of framing or more, so that small chunks use about a fifth of the event loop; those of 64 bytes pass at 4 MB/s."""

_MAX_HEADER_BYTES, _MAX_HEADERS = 8_190, 100

_CLOSE_S = 1.0  # of a connection that was aborted, which takes some iterations of the event loop

HANDSHAKES = 16
"""Maximum concurrent connection attempts: handshakes then take at most 10 ms of an iteration of the event loop."""

current_project: ContextVar[str] = ContextVar("project", default="")
"""Project of the request that the current task sends."""

on_connected: ContextVar[WeakMethod[Callable[[], None]] | None] = ContextVar("on_connected", default=None)
"""What to call once the current task's request has a connection.

The reference is weak, because a connection keeps the context of the task that opened it, and must not keep that task's
call in memory.
"""


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
    - 32 kB without a body byte: a head or trailers, which the parser buffers.

    A pending request then fails with (First)ResponseAborted; a response that is already complete stays readable.

    After some 2,000 chunks, and one more per 500 bytes of body, each piece waits for a turn: 400,000 chunks take a
    second, whatever their size. All connections share the `turns`, and the projects of their requests take turns.
    """

    project = ""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, turns: FairSemaphore, opened: WeakSet[UpstreamConnection]
    ) -> None:
        super().__init__(loop)
        self._turns = turns
        self._opened = opened
        self._made: asyncio.Transport | None = None  # aiohttp forgets its own when it begins to close
        self._turn: asyncio.Task[None] | None = None
        self._aborted = False
        self._requests = 0
        self._has_head = False  # of the final response
        self._body: StreamReader | None = None
        self._informational = self._non_body_bytes = self._framing_bytes = 0
        self._unparsed = bytearray()
        self._is_paused = self._is_lost = False
        self._lost_by: BaseException | None = None
        self._poll: select.poll | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self._made = cast("asyncio.Transport", transport)
        self._opened.add(self)

    def set_response_params(self, **params: Any) -> None:
        """Expect a response; called before each request is sent."""
        self._requests += 1
        self._has_head = False
        self._body = None
        self._informational = self._non_body_bytes = self._framing_bytes = 0
        super().set_response_params(**params)

    def pause_reading(self) -> None:
        """Stop parsing, as the reader of the body is slow; a lost connection has nothing to wait for."""
        if not self._is_lost:
            self._is_paused = True
            super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 - aiohttp's
        """Continue to parse."""
        self._is_paused = False
        super().resume_reading(resume_parser)
        if self._waits_for_turn() and self.transport is not None:
            self.transport.pause_reading()  # it would be read into memory

    def is_connected(self) -> bool:
        """Return whether the connection can be reused."""
        unexpected = self._aborted or self._unparsed or (self._is_idle() and self._has_unread())
        return super().is_connected() and not unexpected

    def data_received(self, data: bytes) -> None:
        """Parse received data; abort if no response is due. Empty data means that the paused reader resumes."""
        self._unparsed += data
        if not data and not self._aborted:
            self._parse(b"")
        self._parse_received()

    def _parse_received(self) -> None:
        """Parse until the reader pauses, or a piece must wait for a turn."""
        # A paused parser would buffer a piece, and `_parse` would take that for framing.
        while self._unparsed and not self._is_paused and self._turn is None:
            if self._framing_bytes > _MAX_FRAMING_BYTES and not self._aborted:
                self._turn = in_background(self._take_turn(), "turn for small chunks")
                if self.transport is not None:
                    self.transport.pause_reading()
            else:
                self._parse_next()

    async def _take_turn(self) -> None:
        project = self.project
        before = self._framing_bytes
        await self._turns.take(project)
        try:
            if self._unparsed and not self._is_paused:
                self._parse_next()
        finally:
            wait_s = _TURN_S * max(0, self._framing_bytes - before)
            asyncio.get_running_loop().call_later(wait_s, self._turns.give, project)
        self._turn = None
        self._parse_received()
        if self._waits_for_turn():
            return
        if self._is_lost:
            self._end()
        elif not self._is_paused and self.transport is not None:
            self.transport.resume_reading()

    def _waits_for_turn(self) -> bool:
        return self._turn is not None

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
        before = self._body_bytes()
        super().data_received(piece)
        if self._is_idle():
            return
        body_bytes = self._body_bytes()
        self._non_body_bytes = self._non_body_bytes + len(piece) if body_bytes == before else 0
        if body := body_bytes - before:  # at least 0, as a large chunk must not allow many small ones later
            self._framing_bytes = max(0, self._framing_bytes + len(piece) - body - int(body * _FRAMING_SHARE))
        if self._non_body_bytes > _MAX_NON_BODY_BYTES:
            self._abort_now()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Parse the data that waited for a paused reader or a turn, then fail the request if it is still pending."""
        self._is_lost = True
        self._is_paused = False
        self._lost_by = exc
        if self.transport is None:  # closed by this side: nobody reads what waits
            self._unparsed.clear()
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None
        elif self._body is not None and not self._body.is_eof():
            self._parse(b"")
        self._parse_received()
        if not self._waits_for_turn():
            self._end()

    def _end(self) -> None:
        self._opened.discard(self)
        super().connection_lost(self._reason() if self._aborted else self._lost_by)

    def _body_bytes(self) -> int:
        return self._body.total_bytes if self._body is not None else 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the head of a response (101 is final). A second means that surplus data followed the first response."""
        informational = data[0].code < HTTPStatus.OK and data[0].code != HTTPStatus.SWITCHING_PROTOCOLS
        self._informational += informational
        if self._has_head or self._informational > _MAX_INFORMATIONAL:
            self._abort_now()
        elif not informational:
            self._has_head = True
            self._body = data[1]
            super().feed_data(data, size)

    def _is_idle(self) -> bool:
        return self._has_head and (self._body is None or self._body.is_eof())

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
        if self._body is not None and not self._body.is_eof():
            self._body.set_exception(self._reason())
        if self.transport is not None:
            self.transport.abort()

    def end_now(self) -> asyncio.Future[None] | None:
        """Abort the connection, which may be closing; return what is set once it has ended."""
        if self._made is not None:
            self._made.abort()
        return self.closed

    def _reason(self) -> ResponseAborted:
        return FirstResponseAborted() if self._requests == 1 else ResponseAborted()


def _measured(semaphore: FairSemaphore, name: str) -> FairSemaphore:
    metrics.SEMAPHORE_USED.labels(name).set_function(lambda: semaphore.used)
    metrics.SEMAPHORE_WAITING.labels(name).set_function(lambda: semaphore.waiting)
    return semaphore


class _Connector(aiohttp.TCPConnector):
    """Connector that shares its connections, and HANDSHAKES concurrent attempts to open one, fairly among projects.

    Batches of one project may need all connections while slow pages load. A TLS handshake takes 0.5 ms of CPU: without
    the limit, 300 of one project in one iteration of the event loop delayed all other projects by 150 ms.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._handshakes = _measured(FairSemaphore(HANDSHAKES), "tls_handshakes")
        self._in_use = _measured(FairSemaphore(self.limit), "upstream_connections")
        self._opened = WeakSet[UpstreamConnection]()  # weak: of a tunnel's outer connection aiohttp hears no end
        connection = partial(
            UpstreamConnection, loop=asyncio.get_running_loop(), turns=FairSemaphore(1), opened=self._opened
        )
        self._factory = cast("partial[ResponseHandler]", connection)  # aiohttp has no public option for it

    async def close(self, *, abort_ssl: bool = False) -> None:
        """Close all connections, and wait for those of cancelled requests, too, which aiohttp does not wait for."""
        await super().close(abort_ssl=abort_ssl)
        ends = [end for connection in list(self._opened) if (end := connection.end_now()) is not None]
        if ends:
            await asyncio.wait(ends, timeout=_CLOSE_S)

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> ResponseHandler:
        create = super()._create_connection
        async with self._handshakes.permit(current_project.get()):
            return await with_free_file(lambda: create(req, traces, timeout))

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> Connection:
        """Wait if all are in use, and call `on_connected`."""
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
        if (reference := on_connected.get()) is not None and (callback := reference()) is not None:
            callback()
        return connection


def open_session(
    tls: ssl.SSLContext, options: EgressOptions, resolver: AbstractResolver | None
) -> aiohttp.ClientSession:
    """Return a session without retries, cookies and settings of the environment; `tls` verifies certificates."""
    connector = _Connector(
        ssl=tls, limit=options.max_connections, limit_per_host=0, resolver=resolver, ttl_dns_cache=60
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
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
    )
    session._retry_connection = False  # noqa: SLF001 - no public switch: a GET would be sent, and billed, twice
    return session
