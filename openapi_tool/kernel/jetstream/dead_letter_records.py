"""Dead letters, and the records as which they are stored.

A dead letter is a command that got no result, or ended executors, kept for an operator. Its record is JSON with the
command: as a whole if it is small enough, else without the rest of the body and some headers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson

from openapi_tool.kernel.jetstream.deliveries import shown_subject
from openapi_tool.protocol.command import BodyDigest, Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.headers import TOPOLOGY, TRACEPARENT
from openapi_tool.telemetry.redact import Redactor

_MAX_WHOLE_BYTES = 160 * 1024
"""Limit of a record with the whole command: a body of 64 KiB in base64 fits, with headers of ordinary text."""

# Limits of a command that is recorded in part.
_HEAD_BYTES = 4 * 1024  # of the body's beginning
_HEADERS_BYTES = 16 * 1024  # of all headers together
_VALUE_CHARS = 1_024  # of a header's name, and of its value

_ID_CHARS = 256  # of an id
_MESSAGE_CHARS = 2_000
_IDENTITY_HEADERS = {name.lower() for name in (*TOPOLOGY, TRACEPARENT)}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Command that got no result, or ended executors; times are ISO 8601.

    - `number`: sequence of its record in the stream of dead letters, 0 before it is stored. An `abandoned` command has
      no record; its number is the sequence of the command.
    - `whole`: whether the letter has the whole command. If not, `data` holds the first bytes of the body, and headers
      may be truncated or missing.
    - `size`, `sha256`: of the whole body, in bytes and in hex.
    - `stream`, `stream_sequence`: place of the command.
    - `attempt`: number of the delivery.
    - `abandoned`: the server redelivers the command no more, although it has no result.
    """

    number: int
    reason: str
    message: str
    subject: str
    headers: Mapping[str, str]
    data: bytes
    size: int
    sha256: str
    whole: bool
    published_at: str
    stream: str
    stream_sequence: int
    attempt: int = 0
    abandoned: bool = False

    @property
    def id(self) -> str:
        """Id on the command line."""
        return f"command-{self.number}" if self.abandoned else str(self.number)

    @property
    def version(self) -> str:
        """Return the protocol version in the subject `cg.VERSION.…`; empty if it has none."""
        tokens = self.subject.split(".", 2)
        return tokens[1] if len(tokens) > 1 else ""

    def identity(self) -> dict[str, str | None]:
        """Return the caller's ids as the command claims them, truncated; None where missing."""
        claimed = claimed_identity(self.subject, self.headers, self.data)
        ids = {
            "project_id": claimed.project_id,
            "channel_id": claimed.channel_id,
            "agent_id": claimed.agent_id,
            "agent_turn_id": claimed.agent_turn_id,
            "tool_call_id": claimed.tool_call_id,
        }
        return {name: value[:_ID_CHARS] if value else None for name, value in ids.items()}


def without_secrets(letter: DeadLetter, redactor: Redactor) -> DeadLetter:
    """Return a letter with this executor's secrets masked: a sender may have sent one."""
    return replace(
        letter,
        subject=redactor.text(letter.subject),
        headers=redactor.value(dict(letter.headers)),
        data=redactor.text(letter.data.decode(errors="surrogateescape")).encode(errors="surrogateescape"),
    )


def dead_letter(delivery: Delivery, reason: str, message: str, redactor: Redactor) -> DeadLetter:
    """Return the dead letter of a delivery with secrets masked."""
    letter = unmasked_letter(delivery, reason, redactor.text(message)[:_MESSAGE_CHARS])
    if letter.whole:
        return without_secrets(letter, redactor)
    # `head` masks and truncates at once: the body may have any size, so to mask all of it first could take long.
    beginning = redactor.head(letter.data.decode(errors="surrogateescape"), _HEAD_BYTES)
    return replace(
        letter,
        subject=redactor.text(letter.subject),
        headers=_bounded_headers(letter.headers, redactor.head),
        data=beginning.encode(errors="surrogateescape"),
    )


def unmasked_letter(delivery: Delivery, reason: str, message: str) -> DeadLetter:
    """Return the letter of a delivery with the command as it was received."""
    body = delivery.truncated_body or BodyDigest.of(delivery.data)
    return DeadLetter(
        number=0,
        reason=reason,
        message=message,
        subject=shown_subject(delivery.subject),
        headers=delivery.headers,
        data=delivery.data,
        size=body.size,
        sha256=body.sha256,
        whole=delivery.truncated_body is None and delivery.headers_complete,
        published_at=delivery.published_at.isoformat(),
        stream=delivery.stream,
        stream_sequence=delivery.stream_sequence,
        attempt=delivery.number,
    )


def encode(letter: DeadLetter, max_bytes: int) -> bytes:
    """Encode a letter as record: the whole command if it fits into `max_bytes`, else its beginning and identity."""
    if letter.whole:
        record = _encoded(letter)
        if len(record) <= min(max_bytes, _MAX_WHOLE_BYTES):
            return record
    headers = _bounded_headers(letter.headers, _head)
    return _encoded(replace(letter, whole=False, headers=headers, data=letter.data[:_HEAD_BYTES]))


def _head(text: str, chars: int) -> str:
    return text[:chars]


def _encoded(letter: DeadLetter) -> bytes:
    fields = asdict(letter)
    del fields["number"], fields["abandoned"]  # of records that were read only
    fields["data_base64"] = base64.b64encode(fields.pop("data")).decode()
    return orjson.dumps(fields | letter.identity() | {"recorded_at": datetime.now(UTC)})


def _bounded_headers(headers: Mapping[str, str], head: Callable[[str, int], str]) -> dict[str, str]:
    """Return headers up to _HEADERS_BYTES, those that identify the call first; `head` truncates names and values."""
    identifying = [name for name in headers if name.lower() in _IDENTITY_HEADERS]
    others = [name for name in headers if name.lower() not in _IDENTITY_HEADERS]
    included: dict[str, str] = {}
    bytes_left = _HEADERS_BYTES
    for name in identifying + others:
        short_name, value = head(name, _VALUE_CHARS), head(headers[name], _VALUE_CHARS)
        bytes_left -= len(orjson.dumps((short_name, value)))
        if bytes_left < 0:
            break
        included[short_name] = value
    return included


def decode(record: bytes, number: int) -> DeadLetter:
    """Decode a record. Raises ValueError, KeyError or TypeError.

    Records of the first version lack some fields, and always hold the whole command.
    """
    fields: dict[str, Any] = orjson.loads(record)
    data = base64.b64decode(fields["data_base64"])
    body = BodyDigest.of(data)
    return DeadLetter(
        number=number,
        reason=fields["reason"],
        message=fields["message"],
        subject=fields["subject"],
        headers=fields["headers"],
        data=data,
        size=fields.get("size", body.size),
        sha256=fields.get("sha256", body.sha256),
        whole=fields.get("whole", True),
        published_at=fields["published_at"],
        stream=fields.get("stream", ""),
        stream_sequence=fields["stream_sequence"],
        attempt=fields["attempt"],
    )
