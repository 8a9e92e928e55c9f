"""One connection to the upstream: aiohttp's protocol class, with limits for what the upstream may send.

aiohttp gives data that nobody asked for to the next request on the connection. So a surplus response would go to
another project's call, and an endless one would fill the memory. `UpstreamConnection` aborts such a connection. It also
slows down a response that would use up the event loop. `connections.py` opens the connections.

Words of HTTP that are used here:

- The *head* of a response is its status line and its headers.
- An *informational* response has a status 1xx. It has no body, and the *final* response follows it.
- A body may come in *chunks*. The bytes around each of them, its *framing*, are at least 5.
"""

from __future__ import annotations

import asyncio
import select
from http import HTTPStatus
from typing import Any, cast
from weakref import WeakSet

from aiohttp import ClientConnectionError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.fair_semaphore import FairSemaphore

_PIECE_BYTES = 8 * 1024
"""Received data is parsed in pieces of this size, each followed by the checks of `UpstreamConnection`."""
_MAX_INFORMATIONAL = 8  # informational responses before the final one
_MAX_NON_BODY_BYTES = 32 * 1024  # received in a row without a byte of the body

# To parse a chunk takes 2 to 3 µs of CPU, as much as a kilobyte of body, even if the chunk has a single byte. So many
# small chunks would use up the event loop. Their number shows in the bytes of framing.

_FREE_FRAMING_SHARE = 1 / 100
"""Framing that is free, as a fraction of the body: one chunk per 500 bytes."""

_FREE_FRAMING_BYTES = 10 * 1024
"""Framing beyond that share that is still free: 2,000 chunks, or 4 ms.

It is more than a piece, because all of a head that ends in the same piece as the body begins counts as framing.
"""

_TURN_S = 2.5e-6
"""Seconds that a turn of `UpstreamConnection` lasts, for each byte of framing that was parsed in it.

So small chunks use about a fifth of the event loop; chunks of 64 bytes pass at 4 MB/s.
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

    A response with many small chunks is slowed down. Once it has used up the framing that is free, each further piece
    waits for a *turn* to be parsed. All connections share the one permit of `turns`, which goes to one project after
    the other. Together they parse 400 kB of framing in a second, which is 80,000 of the smallest chunks.
    """

    project = ""
    """Project of the current request; its turns are counted for that."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, turns: FairSemaphore, open_connections: WeakSet[UpstreamConnection]
    ) -> None:
        super().__init__(loop)
        self._turns = turns
        self._open_connections = open_connections
        # The connection.
        self._lasting_transport: asyncio.Transport | None = None  # `self.transport` is None once aiohttp has closed it
        self._poll: select.poll | None = None
        self._requests = 0  # sent on it so far
        self._is_aborted = False
        self._is_lost = False
        self._lost_by: BaseException | None = None  # None also if it has ended without an error
        # Its received data.
        self._unparsed = bytearray()
        self._is_paused = False  # by aiohttp, as the reader of the body is slow
        self._turn: asyncio.Task[None] | None = None  # waits for a turn, and then parses a piece
        # The current response.
        self._has_head = False  # the head of the final response is parsed
        self._body: StreamReader | None = None
        self._informational = 0
        self._non_body_bytes = 0  # since the last byte of the body
        self._framing_bytes = 0  # that are beyond `_FREE_FRAMING_SHARE`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to use a transport."""
        super().connection_made(transport)
        self._lasting_transport = cast("asyncio.Transport", transport)
        self._open_connections.add(self)

    def set_response_params(self, **params: Any) -> None:
        """Expect a response; aiohttp calls it before it sends a request."""
        self._requests += 1
        self._has_head = False
        self._body = None
        self._informational = 0
        self._non_body_bytes = 0
        self._framing_bytes = 0
        super().set_response_params(**params)

    def is_connected(self) -> bool:
        """Return whether the connection can be used for the next request: nothing came that nobody asked for."""
        if self._is_aborted or self._unparsed or not super().is_connected():
            return False  # and do not ask `_has_unread`, as an aborted connection has no socket
        return not (self._is_complete() and self._has_unread())

    def _is_complete(self) -> bool:
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

    def data_received(self, data: bytes) -> None:
        """Parse received data; abort if no response is due. aiohttp passes empty data when a paused reader resumes."""
        self._unparsed += data
        if not data and not self._is_aborted:
            self._parse(b"")  # what the parser itself has kept
        self._parse_received()

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

    def _parse_received(self) -> None:
        """Parse until the reader pauses, or a piece must wait for a turn."""
        # Not while the reader pauses: the parser would keep the piece, and `_parse` would take that for framing.
        while self._unparsed and not self._is_paused and not self._waits_for_turn():
            if self._framing_bytes > _FREE_FRAMING_BYTES and not self._is_aborted:
                self._turn = in_background(self._take_turn(), "turn for small chunks")
                if self.transport is not None:
                    self.transport.pause_reading()
            else:
                self._parse_next()

    def _waits_for_turn(self) -> bool:
        return self._turn is not None

    async def _take_turn(self) -> None:
        """Wait for a turn and parse one piece; then go on as long as no further turn is needed."""
        project = self.project  # the next request may set another
        framing_before = self._framing_bytes
        await self._turns.take(project)
        try:
            if self._unparsed and not self._is_paused:
                self._parse_next()
        finally:
            parsed_framing_bytes = max(0, self._framing_bytes - framing_before)
            asyncio.get_running_loop().call_later(_TURN_S * parsed_framing_bytes, self._turns.give, project)
        self._turn = None
        self._parse_received()
        if self._waits_for_turn():
            return
        if self._is_lost:
            self._end()
        elif not self._is_paused and self.transport is not None:
            self.transport.resume_reading()

    def _parse_next(self) -> None:
        """Parse the next piece, or abort if no response is due.

        The last byte of what was received is a piece of its own. If it is surplus, the response is complete before it,
        and that is noticed. Within one piece the parser would ignore a blank line behind the response, and would keep
        the beginning of a further one.
        """
        size = min(_PIECE_BYTES, max(1, len(self._unparsed) - 1))
        piece = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        if self._is_complete():
            self._abort_now()
        if not self._is_aborted:
            self._parse(piece)

    def _parse(self, piece: bytes) -> None:
        """Parse a piece, and count its bytes of the body and its framing."""
        body_bytes_before = self._body_bytes()
        super().data_received(piece)
        if self._is_complete():
            return
        body_bytes = self._body_bytes() - body_bytes_before
        if body_bytes:
            free_bytes = int(body_bytes * _FREE_FRAMING_SHARE)
            framing_bytes = len(piece) - body_bytes - free_bytes
            # Not below 0, as a large chunk must not allow many small ones later.
            self._framing_bytes = max(0, self._framing_bytes + framing_bytes)
            self._non_body_bytes = 0
        else:
            self._non_body_bytes += len(piece)
        if self._non_body_bytes > _MAX_NON_BODY_BYTES:
            self._abort_now()

    def _body_bytes(self) -> int:
        """Return how many bytes of the current body were parsed."""
        return self._body.total_bytes if self._body is not None else 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the parsed head of a response, and the reader of its body; the parser calls it.

        A second final head means that surplus data followed the first response. 101 is final, too.
        """
        head, body = data
        is_informational = head.code < HTTPStatus.OK and head.code != HTTPStatus.SWITCHING_PROTOCOLS
        self._informational += is_informational
        if self._has_head or self._informational > _MAX_INFORMATIONAL:
            self._abort_now()
        elif not is_informational:
            self._has_head = True
            self._body = body
            super().feed_data(data, size)

    def _abort_now(self) -> None:
        """Abort the connection at once; a graceful close would continue to read.

        Do not use `self.abort()`: it drops the body that is being received, and its reader would wait forever.
        """
        self._is_aborted = True
        if self._body is not None and not self._body.is_eof():
            self._body.set_exception(self._abort_error())
        if self.transport is not None:
            self.transport.abort()

    def _abort_error(self) -> ResponseAborted:
        """Return the error with which a pending request fails after an abort."""
        return FirstResponseAborted() if self._requests == 1 else ResponseAborted()

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
            self._parse(b"")  # what the parser itself has kept
        self._parse_received()
        if not self._waits_for_turn():
            self._end()

    def _end(self) -> None:
        """Tell aiohttp that the connection is lost."""
        self._open_connections.discard(self)
        super().connection_lost(self._abort_error() if self._is_aborted else self._lost_by)

    def end_now(self) -> asyncio.Future[None] | None:
        """Abort the connection, which may be closing already; return a future that is set once it has ended.

        None if it has ended already.
        """
        if self._lasting_transport is not None:
            self._lasting_transport.abort()
        return self.closed
