"""aiohttp's session with three changes; no other module uses private names of aiohttp.

- `UpstreamConnection` replaces aiohttp's protocol class, which gives data that nobody asked for to the next request on
  the connection. A surplus response would go to another project's call, and an endless one would fill the memory.
- `_Connector` shares the connections fairly among projects.
- A GET without a response is not sent again, since it would be billed twice (ADR 1).

aiohttp has no public option for these. So `__main__.py` refuses another minor version of aiohttp.
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
"""Received data is parsed in pieces of this size, each followed by the checks of `UpstreamConnection`."""
_MAX_INFORMATIONAL = 8  # responses with a status 1xx before the final one
_MAX_NON_BODY_BYTES = 32 * 1024  # received in a row without a byte of the body
_MAX_HEADER_BYTES = 8_190  # of one header
_MAX_HEADERS = 100  # of one response

# A body may come in *chunks*. The bytes around each, its *framing*, are at least 5. To parse a chunk costs as much as a
# kilobyte of body, so many small chunks would use up the event loop.

_FRAMING_SHARE = 1 / 100
"""Framing that is free, as a fraction of the body: one chunk per 500 bytes."""

_MAX_FRAMING_BYTES = 10 * 1024
"""Framing beyond that share that is still free: up to 2,000 chunks, or 4 ms, and a piece with the end of a head."""

_TURN_S = 2.5e-6
"""Seconds until the next turn, for each byte of framing in this one.

To parse a chunk takes 2 to 3 µs of CPU for 5 bytes of framing or more. So small chunks use about a fifth of the event
loop; chunks of 64 bytes pass at 4 MB/s.
"""

_CLOSE_S = 1.0  # for a connection that was aborted to end, which takes some iterations of the event loop
_DNS_CACHE_S = 60  # for which an address of a host is used
_CONNECT_S = 10.0  # for a connection to be made

HANDSHAKES = 16
"""Maximum attempts to connect at once: in one iteration of the event loop, handshakes then take 10 ms at most."""

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
    """The same, for the first request of a connection: what was received cannot be surplus of an earlier response."""


class UpstreamConnection(ResponseHandler):
    """aiohttp's protocol of one connection, which aborts it on data that nobody asked for, or that would do harm.

    It aborts on:

    - the first byte that no request asked for;
    - the ninth informational response. One read can contain 14,000 of them, which would take a second to parse; so data
      is parsed in pieces of 8 kB;
    - 32 kB without a byte of a body: headers or trailers, which the parser keeps in memory.

    A pending request then fails with (First)ResponseAborted. A response that is already complete stays readable.

    Small chunks are slowed down. After the framing that is free, each further piece waits for a *turn*. All connections
    share the `turns`, and their projects take turns: together they parse 400,000 chunks in a second.
    """

    project = ""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, turns: FairSemaphore, opened: WeakSet[UpstreamConnection]
    ) -> None:
        super().__init__(loop)
        self._turns = turns
        self._opened = opened
        # The connection.
        self._made: asyncio.Transport | None = None  # aiohttp forgets its own when it begins to close
        self._poll: select.poll | None = None
        self._requests = 0  # sent on it so far
        self._aborted = False
        self._is_lost = False
        self._lost_by: BaseException | None = None
        # Its received data.
        self._unparsed = bytearray()
        self._is_paused = False  # the reader of the body is slow
        self._turn: asyncio.Task[None] | None = None  # waits for a turn, and then parses a piece
        # The current response.
        self._has_head = False  # the head of its final response is parsed
        self._body: StreamReader | None = None
        self._informational = 0
        self._non_body_bytes = 0  # since the last byte of the body
        self._framing_bytes = 0  # that are not free

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to use a transport."""
        super().connection_made(transport)
        self._made = cast("asyncio.Transport", transport)
        self._opened.add(self)

    def set_response_params(self, **params: Any) -> None:
        """Expect a response; aiohttp calls it before it sends a request."""
        self._requests += 1
        self._has_head = False
        self._body = None
        self._informational = 0
        self._non_body_bytes = 0
        self._framing_bytes = 0
        super().set_response_params(**params)

    def pause_reading(self) -> None:
        """Stop parsing, as the reader of the body is slow. On a lost connection go on, since nothing more comes."""
        if not self._is_lost:
            self._is_paused = True
            super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 - aiohttp's
        """Continue to parse."""
        self._is_paused = False
        super().resume_reading(resume_parser)
        if self._waits_for_turn() and self.transport is not None:
            self.transport.pause_reading()  # else all that comes before the turn would be read into memory

    def is_connected(self) -> bool:
        """Return whether the connection can be used for the next request: nothing came that nobody asked for."""
        if self._aborted or self._unparsed or not super().is_connected():
            return False  # first, as an aborted connection has no socket to ask
        return not (self._is_idle() and self._has_unread())

    def data_received(self, data: bytes) -> None:
        """Parse received data; abort if no response is due. aiohttp passes empty data when a paused reader resumes."""
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
        """Wait for a turn and parse one piece; then go on as long as no further turn is needed."""
        project = self.project
        before = self._framing_bytes
        await self._turns.take(project)
        try:
            if self._unparsed and not self._is_paused:
                self._parse_next()
        finally:
            wait_s = _TURN_S * max(0, self._framing_bytes - before)  # until the next turn of any connection
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
        """Parse the next piece, or abort if no response is due.

        The last byte of what was received is a piece of its own. If it is surplus, the response is complete before it,
        and that is noticed. Within one piece the parser would ignore a blank line behind the response, and would keep
        the beginning of a further one.
        """
        size = min(_PIECE_BYTES, max(1, len(self._unparsed) - 1))
        piece = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        if self._is_idle():
            self._abort_now()
        if not self._aborted:
            self._parse(piece)

    def _parse(self, piece: bytes) -> None:
        """Parse a piece, and count its bytes of the body and its framing."""
        before = self._body_bytes()
        super().data_received(piece)
        if self._is_idle():
            return
        body_bytes = self._body_bytes() - before
        if body_bytes:
            free_bytes = int(body_bytes * _FRAMING_SHARE)
            framing_bytes = len(piece) - body_bytes - free_bytes
            # Not below 0, as a large chunk must not allow many small ones later.
            self._framing_bytes = max(0, self._framing_bytes + framing_bytes)
            self._non_body_bytes = 0
        else:
            self._non_body_bytes += len(piece)
        if self._non_body_bytes > _MAX_NON_BODY_BYTES:
            self._abort_now()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Parse what waited for a paused reader or a turn; then end the request, which fails if it is still pending."""
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
        """Tell aiohttp that the connection is lost."""
        self._opened.discard(self)
        super().connection_lost(self._reason() if self._aborted else self._lost_by)

    def _body_bytes(self) -> int:
        """Return how many bytes of the current body were parsed."""
        return self._body.total_bytes if self._body is not None else 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the parsed head of a response.

        A second final head means that surplus data followed the first response. 101 is final, too.
        """
        status = data[0].code
        is_informational = status < HTTPStatus.OK and status != HTTPStatus.SWITCHING_PROTOCOLS
        self._informational += is_informational
        if self._has_head or self._informational > _MAX_INFORMATIONAL:
            self._abort_now()
        elif not is_informational:
            self._has_head = True
            self._body = data[1]
            super().feed_data(data, size)

    def _is_idle(self) -> bool:
        """Return whether the response is complete, so that nothing more is due."""
        return self._has_head and (self._body is None or self._body.is_eof())

    def _has_unread(self) -> bool:
        """Return whether the socket has bytes or an end that the event loop has not read yet."""
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
        """Abort the connection, which may be closing already; return a future that is set once it has ended."""
        if self._made is not None:
            self._made.abort()
        return self.closed

    def _reason(self) -> ResponseAborted:
        """Return why a pending request fails after an abort."""
        return FirstResponseAborted() if self._requests == 1 else ResponseAborted()


def _measured(semaphore: FairSemaphore, name: str) -> FairSemaphore:
    """Return a semaphore whose use is a metric."""
    metrics.SEMAPHORE_USED.labels(name).set_function(lambda: semaphore.used)
    metrics.SEMAPHORE_WAITING.labels(name).set_function(lambda: semaphore.waiting)
    return semaphore


class _Connector(aiohttp.TCPConnector):
    """Connector that shares two things fairly among projects: connections in use, and attempts to open one.

    Batches of one project may need all connections while slow pages load. A TLS handshake takes 0.5 ms of CPU. Without
    the limit HANDSHAKES, 300 of one project in one iteration of the event loop delayed all other projects by 150 ms.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._handshakes = _measured(FairSemaphore(HANDSHAKES), "tls_handshakes")
        self._in_use = _measured(FairSemaphore(self.limit), "upstream_connections")
        # Open connections. Weak, since a proxy's connection below a tunnel is never told that it ends.
        self._opened = WeakSet[UpstreamConnection]()
        connection = partial(
            UpstreamConnection, loop=asyncio.get_running_loop(), turns=FairSemaphore(1), opened=self._opened
        )
        self._factory = cast("partial[ResponseHandler]", connection)  # aiohttp has no public option for it

    async def close(self, *, abort_ssl: bool = False) -> None:
        """Close all connections, and wait for their ends; aiohttp does not wait for those of cancelled requests."""
        await super().close(abort_ssl=abort_ssl)
        closed = [connection.end_now() for connection in list(self._opened)]
        ends = [end for end in closed if end is not None]
        if ends:
            await asyncio.wait(ends, timeout=_CLOSE_S)

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> ResponseHandler:
        """Open a connection, once an attempt is free."""
        create = super()._create_connection
        async with self._handshakes.permit(current_project.get()):
            return await with_free_file(lambda: create(req, traces, timeout))

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> Connection:
        """Return a connection for a request, once one is free; then call what `on_connected` refers to."""
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
        reference = on_connected.get()
        callback = None if reference is None else reference()
        if callback is not None:
            callback()
        return connection


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
