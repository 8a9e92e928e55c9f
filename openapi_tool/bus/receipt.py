"""Receipt of a command: from a message of the client library to a delivery."""

from __future__ import annotations

import nats.errors
from nats.aio.msg import Msg

from openapi_tool.protocol.command import Delivery


def received(message: Msg) -> Delivery | None:
    """Return the delivery of a message; None where JetStream did not send it, so that it cannot be settled.

    Whoever may publish to our inbox can send such a message: JetStream's own say in their reply subject which delivery
    of which message they are.
    """
    try:
        message.reply.encode()  # lone surrogates cannot be published to
        metadata = message.metadata
    except (nats.errors.Error, ValueError, OverflowError, OSError):
        return None
    return Delivery(
        subject=message.subject,
        headers=message.headers or {},
        data=message.data,
        published_at=metadata.timestamp,
        attempt=metadata.num_delivered,
        stream_sequence=metadata.sequence.stream,
        headers_complete=getattr(message.headers, "complete", True),
    )
