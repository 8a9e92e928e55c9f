"""Connections of the HTTP door, bounded in number and in time: a slow client holds nothing for long.

uvicorn bounds the size of a request's head, and nothing else. So each connection has one deadline, which is moved as it
goes on: until the first byte, for the head, for the body, for a client that does not read, and between two requests.
"""

from __future__ import annotations

import asyncio
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


class Connections:
    """Open connections by the address of their client, the longest idle first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Address, Connection] = {}

    def protocol(self, **options: Any) -> asyncio.Protocol:
        """Return the protocol of a new connection (uvicorn's `http_protocol_class`)."""
        return Connection(H11Protocol(**options), self)

    def add(self, address: Address, connection: Connection) -> None:
        """Add a connection. If there are too many, close the one that has been idle longest, else this one."""
        if len(self._open) >= self._most:
            idle = next((each for each in self._open.values() if not each.in_request), connection)
            idle.abort()
        self._open[address] = connection

    def discard(self, address: Address, connection: Connection) -> None:
        """Remove a connection, unless another one has its address now."""
        if self._open.get(address) is connection:
            del self._open[address]

    def of(self, address: Address | None) -> Connection | None:
        """Return a client's connection."""
        return self._open.get(tuple(address)) if address is not None else None  # type: ignore[arg-type]

    def answering(self, app: ASGIApp) -> ASGIApp:
        """Return an app that tells each connection when a request of it begins and ends."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self.of(scope.get("client"))
            if connection is None:  # gone already; without an answer the server would log a defect
                await Response(status_code=HTTPStatus.REQUEST_TIMEOUT)(scope, receive, send)
                return
            connection.began()
            try:
                await app(scope, receive, send)
            finally:
                connection.ended()

        return answer

    def to_end(self, address: Address, connection: Connection) -> None:
        """Make a connection the one that is idle for the shortest time."""
        if self._open.get(address) is connection:
            self._open[address] = self._open.pop(address)


class Connection(asyncio.Protocol):
    """uvicorn's connection with a deadline."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._address: Address = ("", 0)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = False
        self._aborted = False
        self._client_reads = True
        self.in_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._address = (transport.get_extra_info("peername") or self._address)[:2]
        self._within(HEAD_S)
        self._inner.connection_made(transport)
        self._connections.add(self._address, self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._aborted:
            return
        if not self.in_request and not self._in_head:
            self._in_head = True
            self._within(HEAD_S)
        self._inner.data_received(data)

    def began(self) -> None:
        """Note that the head of a request has arrived, and that its body is awaited."""
        self._in_head = False
        self.in_request = True
        self._within(BODY_S)

    def received(self) -> None:
        """Note that the body has arrived: from now on only a client that reads nothing is late."""
        self._within(None)

    def ended(self) -> None:
        """Note that the request has been answered."""
        self.in_request = False
        self._connections.to_end(self._address, self)
        self._within(IDLE_S)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._within(WRITE_S)
        self._client_reads = False  # until it is True again, the deadline stays
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._client_reads = True
        self._within(None if self.in_request else IDLE_S)
        self._inner.resume_writing()

    def eof_received(self) -> bool | None:
        """See `asyncio.Protocol`."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._client_reads = True
        self._within(None)
        self._connections.discard(self._address, self)
        self._inner.connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def _within(self, seconds: float | None) -> None:
        """Move the deadline to `seconds` from now, or remove it for None; while the client reads nothing it stays."""
        if not self._client_reads:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)
