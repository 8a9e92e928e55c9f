"""NATS client protocol parser that accepts any bytes another client may publish.

One published message could end the read loop of nats-py's parser: it splits control lines at any white space, although
a subject may contain vertical tabs and form feeds, and it decodes bytes that need not be UTF-8.
Source: NATS client protocol, docs.nats.io/reference/reference-protocols/nats-protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from nats.errors import ProtocolError

_MAX_LINE_BYTES = 256 * 1024
"""Limit of a control line: INFO of a large cluster; the server limits all others to 4 KiB."""

_MAX_DIGITS = 10  # of a size
_CRLF = b"\r\n"


class _Frame(NamedTuple):
    """Control line of a message (MSG, or HMSG with headers): `size` is that of headers and body together.

    `sid` is the number of the subscription that the message is for.
    """

    subject: bytes
    sid: int
    reply: bytes
    header_size: int
    size: int


class Events(NamedTuple):
    """What a parser calls; `message` gets subscription id, subject, reply subject, body and header block."""

    ping: Callable[[], Awaitable[None]]
    pong: Callable[[], Awaitable[None]]
    error: Callable[[str], Awaitable[None]]
    info: Callable[[dict[str, Any]], Awaitable[None]]
    message: Callable[[int, bytes, bytes, bytes, bytes], Awaitable[None]]


class Parser:
    """Incremental parser with the interface of nats.protocol.parser.Parser.

    It alternates between control lines, such as `MSG subject 1 5`, and the messages that follow some of them.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self.reset()

    def reset(self) -> None:
        """Discard buffered bytes, for a new connection."""
        self._buffer = bytearray()
        self._frame: _Frame | None = None  # control line whose message is expected

    async def parse(self, data: bytes = b"") -> None:
        """Parse `data`. Raises ProtocolError."""
        self._buffer += data
        has_more = True
        while has_more:
            if self._frame is None:
                has_more = await self._read_control_line()
            else:
                has_more = await self._read_message(self._frame)

    async def _read_control_line(self) -> bool:
        """Handle the next control line; return False if it is incomplete."""
        end = self._buffer.find(_CRLF)
        if end < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise ProtocolError
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + len(_CRLF)]
        verb, _, rest = line.replace(b"\t", b" ").partition(b" ")
        match verb:
            case b"MSG" | b"HMSG":
                self._frame = _frame(rest, has_headers=verb == b"HMSG")
            case b"PING":
                await self._events.ping()
            case b"PONG":
                await self._events.pong()
            case b"-ERR":
                error = rest.strip().decode("utf-8", "backslashreplace").lower()
                await self._events.error(error)
            case b"INFO":
                await self._events.info(_info(rest))
            case b"+OK":
                pass
            case _:
                raise ProtocolError
        return True

    async def _read_message(self, frame: _Frame) -> bool:
        """Pass on the next message; return False if it is incomplete."""
        end = frame.size + len(_CRLF)
        if len(self._buffer) < end:
            return False
        with memoryview(self._buffer) as view:
            headers = bytes(view[: frame.header_size])
            data = bytes(view[frame.header_size : frame.size])
            terminated = view[frame.size : end] == _CRLF
        if not terminated:
            raise ProtocolError
        del self._buffer[:end]
        self._frame = None
        await self._events.message(frame.sid, frame.subject, frame.reply, data, headers)
        return True


def _frame(arguments: bytes, *, has_headers: bool) -> _Frame:
    """Parse `<subject> <sid> [reply] [header size] <size>`."""
    parts = [part for part in arguments.split(b" ") if part]
    if not has_headers:
        parts.insert(-1, b"0")  # the header size
    match parts:
        case [subject, sid, header_size, size]:
            reply = b""
        case [subject, sid, reply, header_size, size]:
            pass
        case _:
            raise ProtocolError
    frame = _Frame(subject, _number(sid), reply, _number(header_size), _number(size))
    if frame.header_size > frame.size:
        raise ProtocolError
    return frame


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ProtocolError
    return int(digits)


def _info(text: bytes) -> dict[str, Any]:
    try:
        info = orjson.loads(text)
    except ValueError:
        raise ProtocolError from None
    if not isinstance(info, dict):
        raise ProtocolError
    return info
