"""Connection to the upstream that accepts exactly one response per request.

aiohttp's own handler parses and buffers unsolicited data and gives it to the next request on the connection: a surplus
response would go to another project's call, and an endless one would fill the memory.
"""

from __future__ import annotations

import asyncio
import select
from http import HTTPStatus
from typing import Any

from aiohttp import ClientConnectionError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

_PIECE_BYTES = 16 * 1024
_MAX_INFORMATIONAL = 8
_MAX_NON_BODY_BYTES = 32 * 1024
_MAX_FRAMING_SHARE = 1 / 4
"""Limit of chunk framing as a fraction of the body. Parsing a chunk costs as much as parsing a kilobyte of body."""


class ResponseAborted(ClientConnectionError):
    """Raised if the connection was aborted because of what the upstream sent."""


class UpstreamConnection(ResponseHandler):
    """aiohttp protocol that aborts the connection on unsolicited or malicious data.

    It aborts on:
    - the first byte that no request asked for;
    - the ninth informational response. Data is parsed in pieces of 16 kB, since a single TLS read can contain 14,000
      of them, which take a second to parse;
    - 32 kB without a body byte: a head or trailers, which the parser buffers;
    - chunks that are mostly framing: 500,000 chunks of one byte take a second to parse.

    A pending request then fails with ResponseAborted; a response that is already complete stays readable.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._aborted = False
        self._has_head = False  # of the final response
        self._informational = 0
        self._non_body_bytes = 0
        self._framing_bytes = 0
        self._poll: select.poll | None = None

    def set_response_params(self, **params: Any) -> None:
        """Expect a response: aiohttp calls this for each request before it sends it."""
        self._has_head = False
        self._informational = 0
        self._non_body_bytes = 0
        self._framing_bytes = 0
        super().set_response_params(**params)

    def is_connected(self) -> bool:
        """Return whether the connection can be reused; aiohttp asks before it takes one from its pool."""
        return super().is_connected() and not (self._aborted or (self._is_idle() and self._has_unread()))

    def data_received(self, data: bytes) -> None:
        """Parse received data; abort if no response is due. Empty data means: resume parsing of buffered data."""
        for start in range(0, max(len(data), 1), _PIECE_BYTES):
            if data and self._is_idle():
                self._abort_now()
            if self._aborted:
                return
            self._parse(data[start : start + _PIECE_BYTES])

    def _parse(self, piece: bytes) -> None:
        before = self._body_bytes() if self._has_head else 0  # without a head the body is the previous response's
        super().data_received(piece)
        if self._is_idle():
            return
        body_bytes = self._body_bytes()
        self._non_body_bytes = self._non_body_bytes + len(piece) if body_bytes == before else 0
        self._framing_bytes += len(piece) - (body_bytes - before)
        # Twice: head and trailers may take the limit each.
        if (
            self._non_body_bytes > _MAX_NON_BODY_BYTES
            or self._framing_bytes > 2 * _MAX_NON_BODY_BYTES + body_bytes * _MAX_FRAMING_SHARE
        ):
            self._abort_now()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail the pending request."""
        super().connection_lost(ResponseAborted() if self._aborted else exc)

    def _body_bytes(self) -> int:
        return self._payload.total_bytes if self._payload is not None else 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the head of a response. A second head means that surplus data followed the first response."""
        informational = _is_informational(data[0].code)
        self._informational += informational
        if self._has_head or self._informational > _MAX_INFORMATIONAL:
            self._abort_now()
        elif not informational:
            self._has_head = True
            super().feed_data(data, size)

    def _is_idle(self) -> bool:
        return self._has_head and (self._payload is None or self._payload.is_eof())

    def _has_unread(self) -> bool:
        """Return whether the socket has bytes or an EOF that the event loop has not read yet."""
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
            self._payload.set_exception(ResponseAborted())
        if self.transport is not None:
            self.transport.abort()


def _is_informational(status: int) -> bool:
    return status < HTTPStatus.OK and status != HTTPStatus.SWITCHING_PROTOCOLS
