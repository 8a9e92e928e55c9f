"""Format of dead letter records: masking, size limits, encoding and decoding."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import orjson

from openapi_tool.bus.wire import shown_subject
from openapi_tool.protocol.claims import claimed_identity
from openapi_tool.protocol.command import BodyDigest, Delivery
from openapi_tool.protocol.identity import TOPOLOGY, TRACEPARENT
from openapi_tool.telemetry.redact import Redactor

_MAX_WHOLE_BYTES = 160 * 1024
"""Limit of a record with the whole command: a body of 64 KiB in base64 fits, with headers of ordinary text."""

# Limits of a command that is recorded in part.
_HEAD_BYTES = 4 * 1024
_HEADERS_BYTES = 16 * 1024
_VALUE_CHARS = 1_024

_ID_CHARS = 256
_MESSAGE_CHARS = 2_000
_IDENTITY = {name.lower() for name in (*TOPOLOGY, TRACEPARENT)}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Command whose result cannot reach any turn.

    `number` is the sequence of the record in the dead letter stream, 0 before it is stored. `stream` and
    `stream_sequence` locate the command. If not `whole`, `data` holds the first bytes of the body, and headers may be
    truncated or missing; `size` (bytes) and `sha256` always describe the received body. Times are ISO 8601.

    An `abandoned` letter has no record: another executor used up the command's deliveries. Its `number` is the
    sequence in the command stream.
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
        """Return the protocol version in the subject; empty if it has none."""
        return self.subject.split(".", 2)[1] if "." in self.subject else ""

    def identity(self) -> dict[str, str | None]:
        """Return the caller's ids as the command claims them, truncated; None where missing."""
        claimed = claimed_identity(self.subject, self.headers, self.data)
        known = {
            "project_id": claimed.project_id or None,
            "channel_id": claimed.channel_id or None,
            "agent_id": claimed.agent_id,
            "agent_turn_id": claimed.agent_turn_id,
            "tool_call_id": claimed.tool_call_id,
        }
        return {name: value and value[:_ID_CHARS] for name, value in known.items()}


Record = TypeVar("Record", Delivery, DeadLetter)


def without_secrets(record: Record, redactor: Redactor) -> Record:
    """Return a command with this executor's secrets masked: a sender may have put one into it."""
    return replace(
        record,
        subject=redactor.text(record.subject),
        headers=redactor.value(dict(record.headers)),
        data=redactor.text(record.data.decode(errors="surrogateescape")).encode(errors="surrogateescape"),
    )


def dead_letter(delivery: Delivery, reason: str, message: str, redactor: Redactor) -> DeadLetter:
    """Make the dead letter of a delivery with secrets masked; size and hash are of the received body."""
    body = delivery.truncated_body or BodyDigest.of(delivery.data)
    whole = delivery.truncated_body is None and delivery.headers_complete
    clean = without_secrets(delivery, redactor) if whole else _truncated_without_secrets(delivery, redactor)
    return DeadLetter(
        number=0,
        reason=reason,
        message=redactor.text(message)[:_MESSAGE_CHARS],
        subject=shown_subject(clean.subject),
        headers=clean.headers,
        data=clean.data,
        size=body.size,
        sha256=body.sha256,
        whole=whole,
        published_at=delivery.published_at.isoformat(),
        stream=delivery.stream,
        stream_sequence=delivery.stream_sequence,
        attempt=delivery.attempt,
    )


def encode(letter: DeadLetter, max_bytes: int) -> bytes:
    """Encode a letter: the whole command if it fits into `max_bytes`, else its beginning and identity."""
    if letter.whole:
        record = _encoded(letter)
        if len(record) <= min(max_bytes, _MAX_WHOLE_BYTES):
            return record
    partial = replace(letter, whole=False, headers=_bounded_headers(letter.headers), data=letter.data[:_HEAD_BYTES])
    return _encoded(partial)


def _encoded(letter: DeadLetter) -> bytes:
    fields = asdict(letter)
    del fields["number"], fields["abandoned"]
    fields["data_base64"] = base64.b64encode(fields.pop("data")).decode()
    return orjson.dumps(fields | letter.identity() | {"recorded_at": datetime.now(UTC)})


def _truncated_without_secrets(delivery: Delivery, redactor: Redactor) -> Delivery:
    """Truncate a command and mask its secrets; masking it first would search a body of any size."""
    beginning = redactor.head(delivery.data.decode(errors="surrogateescape"), _HEAD_BYTES)
    return replace(
        delivery,
        subject=redactor.text(delivery.subject),
        headers=_bounded_headers(delivery.headers, redactor.head),
        data=beginning.encode(errors="surrogateescape"),
    )


def _truncated(text: str, chars: int) -> str:
    return text[:chars]


def _bounded_headers(headers: Mapping[str, str], head: Callable[[str, int], str] = _truncated) -> dict[str, str]:
    """Return headers up to a size bound, identity headers first; `head` truncates each value."""
    included: dict[str, str] = {}
    left = _HEADERS_BYTES
    for name in sorted(headers, key=lambda name: name.lower() not in _IDENTITY):
        short_name, value = head(name, _VALUE_CHARS), head(headers[name], _VALUE_CHARS)
        left -= len(orjson.dumps((short_name, value)))
        if left < 0:
            break
        included[short_name] = value
    return included


def decode(record: bytes, number: int) -> DeadLetter:
    """Decode a record, also one of the first format (always whole). Raises ValueError, KeyError or TypeError."""
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
