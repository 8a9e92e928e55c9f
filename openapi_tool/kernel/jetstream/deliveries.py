"""Turn messages of NATS into deliveries of commands.

A *delivery* is one of possibly several times that JetStream sends the same command, with its number from 1 on.
"""

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
    r"""Return a subject for people to read: bytes that are not UTF-8 become `\xff` and the like.

    BusClient decodes such bytes to lone surrogates, which cannot be encoded as UTF-8.
    """
    return subject.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class ForeignMessage(Exception):
    """Message that JetStream did not send, so it cannot be settled.

    Any client with the permission may publish to the subject on which commands arrive here.
    """


def metadata_of(message: Msg) -> Msg.Metadata:
    """Return stream sequence and number of the delivery, from the reply subject. Raises ForeignMessage."""
    try:
        message.reply.encode()  # fails for lone surrogates: the message could not be acknowledged on such a subject
        metadata = message.metadata
    except (Error, ValueError, OverflowError, OSError) as error:
        raise ForeignMessage from error
    return metadata


def delivery_of(message: Msg) -> Delivery:
    """Return the delivery of a message, and empty the message. Raises ForeignMessage.

    The message is kept until it is settled. Of a large body the delivery keeps only the beginning; in a message that is
    not emptied the whole body would stay in memory.
    """
    metadata = metadata_of(message)
    data, headers = message.data, message.headers
    message.data = b""
    message.headers = None
    return stored_delivery(
        stream=metadata.stream,
        sequence=metadata.sequence.stream,  # in the stream; `sequence.consumer` would count deliveries of all commands
        subject=message.subject,
        headers=headers or {},
        data=data,
        published_at=metadata.timestamp,
        number=metadata.num_delivered,
    )


def stored_delivery(
    *,
    stream: str,
    sequence: int,
    subject: str,
    headers: Mapping[str, str],
    data: bytes,
    published_at: datetime,
    number: int = 1,
) -> Delivery:
    """Return the delivery of this `number` of the message that a stream holds at a sequence."""
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
        headers_complete=getattr(headers, "complete", True),  # False: it had more headers than BusClient reads
    )
