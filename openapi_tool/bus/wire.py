"""NATS client protocol parser that accepts any bytes another client may publish; messages as deliveries.

One published message could end the read loop of nats-py's parser: it splits control lines at any white space, although
a subject may contain vertical tabs and form feeds, and it decodes bytes that need not be UTF-8.
Source: NATS client protocol, docs.nats.io/reference/reference-protocols/nats-protocol; ADR-4 (headers).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import orjson
from nats.aio.msg import Msg
from nats.errors import BadHeaderError, Error, ProtocolError
from nats.js.api import Header

from openapi_tool.protocol.command import (
    HEAD_BYTES,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADER_LINES,
    BodyDigest,
    Delivery,
)
from openapi_tool.protocol.identity import TOPOLOGY, TRACEPARENT, TRACESTATE

_MAX_LINE_BYTES = 256 * 1024
"""Limit of a control line: INFO of a large cluster; the server limits all others to 4 KiB."""

_MAX_DIGITS = 10
_CRLF = b"\r\n"
_VERSION = b"NATS/1.0"
_STATUS_DIGITS = 3
_BLANKS = " \t\n\r\x0b\x0c"
_KERNEL_NAMES = {"CG-Timestamp", "CG-Version", "CG-Msg-Type", "CG-Sender"}
_KNOWN_NAMES = frozenset({*TOPOLOGY, TRACEPARENT, TRACESTATE, *_KERNEL_NAMES, *(header.value for header in Header)})
"""Header names that need no validation: those of the kernel (TOPOLOGY: the ids of a call) and of JetStream."""

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class _Frame(NamedTuple):
    """Control line of MSG or HMSG; `size` includes the headers."""

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
    """Incremental parser with the interface of nats.protocol.parser.Parser."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.reset()

    def reset(self) -> None:
        """Discard buffered bytes, for a new connection."""
        self._buffer = bytearray()
        self._frame: _Frame | None = None

    async def parse(self, data: bytes = b"") -> None:
        """Parse `data`. Raises ProtocolError."""
        self._buffer += data
        while await (self._control() if self._frame is None else self._deliver(self._frame)):
            pass

    async def _control(self) -> bool:
        """Return False if the line is incomplete."""
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

    async def _deliver(self, frame: _Frame) -> bool:
        """Return False if the message is incomplete."""
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
        parts.insert(-1, b"0")
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


class MessageHeaders(dict[str, str]):
    """Headers of a message; not `complete` if the rest of the block exceeds the limits."""

    complete: bool = True


def parse_headers(block: bytes) -> MessageHeaders:
    """Decode a header block of any bytes, up to MAX_HEADER_LINES lines and MAX_HEADER_BYTES bytes; never raises.

    The last value of a name counts. Lines without a name in visible ASCII are ignored; in values U+FFFD replaces bytes
    that are not UTF-8. An inline status and its description become the headers `Status` and `Description`.
    """
    head, _, rest = block[:MAX_HEADER_BYTES].partition(_CRLF)
    lines = rest.decode("utf-8", "replace").split("\r\n", MAX_HEADER_LINES)
    headers = MessageHeaders(_status(head))
    if len(lines) > MAX_HEADER_LINES or len(block) > MAX_HEADER_BYTES:
        unread = lines.pop()  # the rest, or half a line
        headers.complete = len(block) <= MAX_HEADER_BYTES and not unread.strip(_BLANKS)
    for line in lines:
        name, colon, value = line.partition(":")
        if name not in _KNOWN_NAMES:
            name = name.strip(_BLANKS)
            if not (name and name.isascii() and name.isprintable() and " " not in name):
                continue
        if colon:
            headers[name] = value.strip(_BLANKS)
    return headers


def header_block(headers: Mapping[str, str]) -> bytes:
    """Encode headers; line breaks in values become blanks. Raises BadHeaderError for names that are no tokens."""
    if not _KNOWN_NAMES.issuperset(headers):
        for name in headers:
            if not _NAME.fullmatch(name):
                raise BadHeaderError(name)
    lines = list(map(": ".join, headers.items()))  # not an f-string: it shows enum members as `Header.X`
    text = "\r\n".join(lines)
    if text.count("\r") + text.count("\n") > 2 * (len(lines) - 1):  # a value contains a line break
        text = "\r\n".join([line.replace("\r", " ").replace("\n", " ") for line in lines])
    return b"NATS/1.0\r\n%b\r\n\r\n" % text.encode()


def shown_subject(subject: str) -> str:
    r"""Return a subject with bytes that are not UTF-8, which BusClient decodes to lone surrogates, as `\xff`."""
    return subject.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _status(head: bytes) -> dict[str, str]:
    """Return the status in `NATS/1.0 404 No Messages` as headers; empty unless it is three digits."""
    status, _, description = head.removeprefix(_VERSION).strip().partition(b" ")
    if not head.startswith(_VERSION) or len(status) != _STATUS_DIGITS or not status.isdigit():
        return {}
    found = {Header.STATUS.value: status.decode()}
    return found | {Header.DESCRIPTION.value: description.decode("utf-8", "replace")} if description else found


class ForeignMessage(Exception):
    """Message that JetStream did not send, so it cannot be settled: any permitted client may publish to our inbox."""


def metadata_of(message: Msg) -> Msg.Metadata:
    """Return stream sequence and delivery count. Raises ForeignMessage."""
    try:
        message.reply.encode()  # fails for lone surrogates: nobody can publish to such a subject
        metadata = message.metadata
    except (Error, ValueError, OverflowError, OSError) as error:
        raise ForeignMessage from error
    return metadata


def delivery_of(message: Msg) -> Delivery:
    """Return the delivery of a message, and empty the message. Raises ForeignMessage.

    The message is retained until it is settled, and with it the whole of a body that the delivery truncates.
    """
    metadata = metadata_of(message)
    data, headers = message.data, message.headers
    message.data, message.headers = b"", None
    place = metadata.stream, metadata.sequence.stream
    return stored_delivery(
        place, message.subject, headers or {}, data, metadata.timestamp, attempt=metadata.num_delivered
    )


def stored_delivery(
    place: tuple[str, int],
    subject: str,
    headers: Mapping[str, str],
    data: bytes,
    published_at: datetime,
    *,
    attempt: int = 1,
) -> Delivery:
    """Return a delivery of a stored message; `place` is its stream and sequence."""
    stream, sequence = place
    too_large = len(data) > MAX_BODY_BYTES
    return Delivery(
        subject=subject,
        headers=headers,
        data=data[:HEAD_BYTES] if too_large else data,
        published_at=published_at,
        attempt=attempt,
        stream_sequence=sequence,
        stream=stream,
        truncated_body=BodyDigest.of(data) if too_large else None,
        headers_complete=getattr(headers, "complete", True),
    )
