"""Messages of NATS as deliveries of commands."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from nats.aio.msg import Msg
from nats.errors import Error

from openapi_tool.protocol.command import (
    HEAD_BYTES,
    MAX_BODY_BYTES,
    BodyDigest,
    Delivery,
)


def shown_subject(subject: str) -> str:
    r"""Return a subject with bytes that are not UTF-8, which BusClient decodes to lone surrogates, as `\xff`."""
    return subject.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


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

    The message is kept until it is settled. If it were not emptied, a body of which the delivery keeps only the
    beginning would stay in memory as a whole.
    """
    metadata = metadata_of(message)
    data, headers = message.data, message.headers
    message.data, message.headers = b"", None
    place = metadata.stream, metadata.sequence.stream  # `sequence.stream` is the sequence in the stream
    return stored_delivery(
        place, message.subject, headers or {}, data, metadata.timestamp, number=metadata.num_delivered
    )


def stored_delivery(
    place: tuple[str, int],
    subject: str,
    headers: Mapping[str, str],
    data: bytes,
    published_at: datetime,
    *,
    number: int = 1,
) -> Delivery:
    """Return a delivery of a stored message; `place` is its stream and sequence."""
    stream, sequence = place
    too_large = len(data) > MAX_BODY_BYTES
    return Delivery(
        subject=subject,
        headers=headers,
        data=data[:HEAD_BYTES] if too_large else data,
        published_at=published_at,
        number=number,
        stream_sequence=sequence,
        stream=stream,
        truncated_body=BodyDigest.of(data) if too_large else None,
        headers_complete=getattr(headers, "complete", True),
    )
