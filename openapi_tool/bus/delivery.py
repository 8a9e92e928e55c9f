"""Convert a message of nats-py to a delivery."""

from __future__ import annotations

import nats.errors
from nats.aio.msg import Msg

from openapi_tool.protocol.command import HEAD_BYTES, MAX_BODY_BYTES, BodyDigest, Delivery


class ForeignMessage(Exception):
    """Message in this process's inbox that JetStream did not send, so it cannot be settled.

    Any client with permission to publish to our inbox can send one. JetStream's own messages carry stream sequence and
    delivery count in the reply subject.
    """


def metadata_of(message: Msg) -> Msg.Metadata:
    """Return stream sequence and delivery count of a message. Raises ForeignMessage."""
    try:
        message.reply.encode()  # lone surrogates cannot be published to
        metadata = message.metadata
    except (nats.errors.Error, ValueError, OverflowError, OSError) as error:
        raise ForeignMessage from error
    return metadata


def delivery_of(message: Msg) -> Delivery:
    """Return the delivery of a message. Raises ForeignMessage.

    Empties body and headers of the message: it is held until settled, and would double the memory.
    """
    metadata = metadata_of(message)
    data, headers = message.data, message.headers
    message.data, message.headers = b"", None
    too_large = len(data) > MAX_BODY_BYTES
    return Delivery(
        subject=message.subject,
        headers=headers or {},
        data=data[:HEAD_BYTES] if too_large else data,
        published_at=metadata.timestamp,
        attempt=metadata.num_delivered,
        stream_sequence=metadata.sequence.stream,
        stream=metadata.stream,
        truncated_body=BodyDigest.of(data) if too_large else None,
        headers_complete=getattr(headers, "complete", True),
    )
