"""Header block of a NATS message, read whatever bytes it has (ADR-4 of NATS).

A block is `NATS/1.0`, perhaps with a status, and then lines such as `CG-Turn-Id: turn_71af`.
"""

from __future__ import annotations

from collections.abc import Mapping

from nats.js.api import Header

from openapi_tool.protocol.command import MAX_HEADER_BYTES, MAX_HEADER_LINES
from openapi_tool.protocol.headers import TOPOLOGY, TRACEPARENT, TRACESTATE

_CRLF = b"\r\n"
_VERSION = b"NATS/1.0"
_STATUS_DIGITS = 3
_BLANKS = " \t\n\r\x0b\x0c"
_KERNEL_NAMES = {"CG-Timestamp", "CG-Version", "CG-Msg-Type", "CG-Sender"}
_KNOWN_NAMES = frozenset({*TOPOLOGY, TRACEPARENT, TRACESTATE, *_KERNEL_NAMES, *(header.value for header in Header)})
"""Header names that need no validation: those of the kernel (TOPOLOGY: the ids of a call) and of JetStream."""


class MessageHeaders(dict[str, str]):
    """Headers of a message; `complete` is false if the block exceeds the limits, so that its end was not read."""

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
            is_visible = name.isascii() and name.isprintable() and " " not in name
            if not name or not is_visible:
                continue
        if colon:
            headers[name] = value.strip(_BLANKS)
    return headers


def header_bytes(headers: Mapping[str, str]) -> int:
    """Return the size of the block that nats-py makes of headers, at most."""
    lines = (len(name.encode()) + len(value.encode()) + len(b": \r\n") for name, value in headers.items())
    return sum(lines) + len(b"NATS/1.0\r\n\r\n")


def _status(head: bytes) -> dict[str, str]:
    """Return the status in `NATS/1.0 404 No Messages` as headers; empty unless it is three digits."""
    status, _, description = head.removeprefix(_VERSION).strip().partition(b" ")
    if not head.startswith(_VERSION) or len(status) != _STATUS_DIGITS or not status.isdigit():
        return {}
    found = {Header.STATUS.value: status.decode()}
    if description:
        found[Header.DESCRIPTION.value] = description.decode("utf-8", "replace")
    return found
