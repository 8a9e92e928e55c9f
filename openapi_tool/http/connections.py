"""Connections of the HTTP door, bounded in number and in time: a slow client holds nothing for long.

uvicorn bounds the size of a request's head, and nothing else. So each connection has one deadline, at which it is
closed. The deadline moves as the connection goes on: until the first byte, for the head, for the body, for a client
that does not read, and between two requests. While a request is being answered, and the client reads, there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, cast

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Seconds from the start of a connection to its first byte, and from a request's first byte to the end of its head."""
BODY_S = 30.0
"""Seconds for the body of a request."""
WRITE_S = 30.0
"""Seconds for which a client may read nothing of a response that waits for it."""
IDLE_S = 75.0
"""Seconds between two requests of a connection."""

Address = tuple[str, int]
"""Address and port of a client."""


class Connections:
    """Open connections by the address of their client; at most `max_open` of them."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._open: dict[Address, Connection] = {}  # of the idle ones, the longest idle comes first

    def protocol(self, **options: Any) -> asyncio.Protocol:
        """Return the protocol of a new connection (uvicorn's `http_protocol_class`)."""
        return Connection(H11Protocol(**options), self)

    def add(self, address: Address, connection: Connection) -> None:
        """Add a connection. If there are too many, close one: the longest idle, or this one if none is idle."""
        if len(self._open) >= self._max_open:
            self._longest_idle(otherwise=connection).abort()  # it is discarded once it is closed
        self._open[address] = connection

    def _longest_idle(self, otherwise: Connection) -> Connection:
        for connection in self._open.values():
            if not connection.in_request:
                return connection
        return otherwise

    def discard(self, address: Address, connection: Connection) -> None:
        """Remove a connection, unless another one has its address now."""
        if self._open.get(address) is connection:
            del self._open[address]

    def of(self, address: Sequence[Any] | None) -> Connection | None:
        """Return a client's connection by its address, as the scope of a request has it; None if it is gone."""
        if address is None:
            return None
        host, port = address
        return self._open.get((host, port))

    def answering(self, app: ASGIApp) -> ASGIApp:
        """Return an app that passes requests to `app`, and tells each connection when one begins and ends."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self.of(scope.get("client"))
            if connection is None:  # gone already; without an answer the server would log a defect
                await Response(status_code=HTTPStatus.REQUEST_TIMEOUT)(scope, receive, send)
                return
            connection.request_began()
            try:
                await app(scope, receive, send)
            finally:
                connection.request_ended()

        return answer

    def to_end(self, address: Address, connection: Connection) -> None:
        """Move a connection behind all others, as it is idle from now on."""
        if self._open.get(address) is connection:
            self._open[address] = self._open.pop(address)


class Connection(asyncio.Protocol):
    """Connection of a client, with a deadline. It passes all that happens to `inner`, which is uvicorn's protocol.

    `in_request` says whether the head of a request has arrived that is not answered yet.
    """

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._address: Address = ("", 0)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = False  # the first byte of a request has arrived, and its head has not ended
        self._aborted = False
        self._client_reads = True  # False while what was written waits for the client
        self.in_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        if peer:
            self._address = peer[:2]  # of IPv6 two more numbers follow
        self._set_deadline(HEAD_S)
        self._inner.connection_made(transport)
        self._connections.add(self._address, self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._aborted:  # data that was read before may still arrive
            return
        if not self.in_request and not self._in_head:
            self._in_head = True
            self._set_deadline(HEAD_S)
        self._inner.data_received(data)

    def request_began(self) -> None:
        """Note that the head of a request has arrived, and that its body is awaited."""
        self._in_head = False
        self.in_request = True
        self._set_deadline(BODY_S)

    def body_received(self) -> None:
        """Note that the body has arrived: from now on only a client that reads nothing is late."""
        self._set_deadline(None)

    def request_ended(self) -> None:
        """Note that the request has been answered."""
        self.in_request = False
        self._connections.to_end(self._address, self)
        self._set_deadline(IDLE_S)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._set_deadline(WRITE_S)
        self._client_reads = False  # until it is True again, the deadline stays
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._client_reads = True
        self._set_deadline(None if self.in_request else IDLE_S)
        self._inner.resume_writing()

    def eof_received(self) -> bool | None:
        """See `asyncio.Protocol`."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._client_reads = True  # or the deadline would stay
        self._set_deadline(None)
        self._connections.discard(self._address, self)
        self._inner.connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def _set_deadline(self, seconds: float | None) -> None:
        """Move the deadline to `seconds` from now, or remove it for None; while the client reads nothing it stays."""
        if not self._client_reads:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)
