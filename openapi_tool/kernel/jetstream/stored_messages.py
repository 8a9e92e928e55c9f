"""Messages that a stream holds, read one by one."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime

import orjson
from nats.aio.client import Client
from nats.js.errors import APIError

from openapi_tool.kernel.jetstream.deliveries import stored_delivery
from openapi_tool.nats_client.headers import MessageHeaders, parse_headers
from openapi_tool.protocol.command import Delivery

_TIMEOUT_S = 5.0  # of one request
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """Message of a stream; its subject has U+FFFD in place of bytes that are not UTF-8."""

    stream: str
    sequence: int
    subject: str
    headers: MessageHeaders
    data: bytes
    published_at: datetime

    @property
    def delivery(self) -> Delivery:
        """Return the first delivery of the message."""
        return stored_delivery(
            stream=self.stream,
            sequence=self.sequence,
            subject=self.subject,
            headers=self.headers,
            data=self.data,
            published_at=self.published_at,
        )


async def stored_message(client: Client, stream: str, **wanted: object) -> StoredMessage | None:
    """Return the message of a stream that `wanted` selects, None without one. Raises nats.errors.Error.

    `wanted` are the fields of a `STREAM.MSG.GET` request, such as `seq=5`; with `next_by_subj` it selects the first
    message of that subject from the sequence on.
    """
    request = orjson.dumps(wanted)
    reply = await client.request(f"$JS.API.STREAM.MSG.GET.{stream}", request, timeout=_TIMEOUT_S)
    answer = orjson.loads(reply.data)
    if error := answer.get("error"):
        if error.get("code") == _NOT_FOUND:  # no such message, or no such stream
            return None
        raise APIError.from_error(error)
    found = answer["message"]
    return StoredMessage(
        stream=stream,
        sequence=found["seq"],
        subject=found["subject"],
        headers=parse_headers(base64.b64decode(found.get("hdrs", ""))),
        data=base64.b64decode(found.get("data", "")),
        published_at=datetime.fromisoformat(found["time"]),
    )


async def stream_messages(
    client: Client, stream: str, subject: str = ">", since: datetime | None = None, first: int = 1
) -> AsyncGenerator[StoredMessage, None]:
    """Yield the messages that a stream holds now, from `since` or the sequence `first` on; none without such a stream.

    Each message is requested by itself. A consumer would be faster, but a user who may create one can have the server
    publish the messages on any subject.
    """
    last = await stored_message(client, stream, last_by_subj=subject)
    if last is None:
        return
    sequence = first if since is None else await _first_since(client, stream, since, last.sequence)
    while sequence <= last.sequence:
        message = await stored_message(client, stream, seq=sequence, next_by_subj=subject)
        if message is None:
            return
        yield message
        sequence = message.sequence + 1


async def _first_since(client: Client, stream: str, since: datetime, last: int) -> int:
    """Return the sequence from which on messages were published at or after `since`, by binary search.

    It is `last` + 1 if no message up to `last` was.
    """
    low, high = 1, last + 1  # the sequence is one of low … high
    while low < high:
        middle = (low + high) // 2
        message = await stored_message(client, stream, seq=middle, next_by_subj=">")  # `middle` itself may be deleted
        if message is None or message.published_at >= since:
            high = middle
        else:
            low = message.sequence + 1
    return low
