"""Commands that can never be answered, kept for people in a stream of their own."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.js.errors import BadRequestError, NoStreamResponseError, NotFoundError

from openapi_tool.bus.streams import DurableOptions
from openapi_tool.bus.wire import shown_subject
from openapi_tool.protocol.command import Delivery
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

STREAM = "openapi_tool_dead_letters"
SUBJECT = "openapi_tool.dead_letter"
_KEEP_S = 7 * 24 * 3600
_TIMEOUT_S = 5.0
_BATCH, _BATCH_S = 500, 10.0


class DeadLetters:
    """Writes records to the stream, making it where it is missing; every record is also logged.

    The stream is made with so many `replicas`.
    """

    def __init__(self, client: Client, replicas: int = 1, keep_s: float = _KEEP_S) -> None:
        self._client = client
        self._replicas = replicas
        self._keep_s = keep_s

    async def keep(self, delivery: Delivery, reason: str, message: str) -> None:
        """Record why a command will not be answered.

        Raises nats.errors.Error when the record could not be stored, so that the command stays.
        """
        log.error(
            "a command cannot be answered: %s",
            message,
            extra={
                "action": "call.dead_lettered",
                "reason": reason,
                "subject": shown_subject(delivery.subject),
                "stream_sequence": delivery.stream_sequence,
            },
        )
        await self._publish(orjson.dumps(_record(delivery, reason, message)))
        metrics.DEAD_LETTERS.labels(reason).inc()

    async def _publish(self, record: bytes) -> None:
        jetstream = self._client.jetstream()
        try:
            await jetstream.publish(SUBJECT, record, timeout=_TIMEOUT_S)
        except NoStreamResponseError:
            await self._make_stream()
            await jetstream.publish(SUBJECT, record, timeout=_TIMEOUT_S)

    async def _make_stream(self) -> None:
        jetstream = self._client.jetstream()
        try:
            await jetstream.stream_info(STREAM)
        except NotFoundError:
            config = StreamConfig(name=STREAM, subjects=[SUBJECT], max_age=self._keep_s, num_replicas=self._replicas)
            try:
                await jetstream.add_stream(config)
            except BadRequestError:
                log.info("another replica made the dead letter stream", extra={"action": "dead_letters.raced"})


def _record(delivery: Delivery, reason: str, message: str) -> dict[str, object]:
    """Everything that a person or a replay needs; the body in base64, because it may be no text."""
    return {
        "reason": reason,
        "message": message,
        "subject": shown_subject(delivery.subject),
        "headers": dict(delivery.headers),
        "data_base64": base64.b64encode(delivery.data).decode(),
        "stream_sequence": delivery.stream_sequence,
        "attempt": delivery.attempt,
        "published_at": delivery.published_at,
        "recorded_at": datetime.now(UTC),
    }


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A command that nobody will be answered for, as it is kept; `number` is its place in its stream.

    `stream_sequence` is the command's own place in the command stream.

    `abandoned` ones are no records but commands which an earlier executor used up its deliveries on:
    their number is that in the command stream.
    """

    number: int
    reason: str
    message: str
    subject: str
    headers: Mapping[str, str]
    data: bytes
    published_at: str
    stream_sequence: int
    attempt: int = 0
    abandoned: bool = False

    @property
    def id(self) -> str:
        """What a person names it by."""
        return f"command-{self.number}" if self.abandoned else str(self.number)


async def dead_letters(client: Client) -> list[DeadLetter]:
    """Every record, oldest first. Raises nats.errors.Error."""
    return [_letter(message) async for message in _messages(client, STREAM, SUBJECT)]


async def abandoned_commands(
    client: Client,
    options: DurableOptions,
    letters: list[DeadLetter],
    answered: Callable[[str, Mapping[str, str]], Awaitable[bool]],
) -> list[DeadLetter]:
    """Commands below the durable's acknowledgement floor that have neither a result nor one of `letters`.

    `answered` is asked with subject and headers. JetStream never hands out again what used up its
    deliveries. Raises nats.errors.Error.
    """
    jetstream = client.jetstream()
    stream = await jetstream.find_stream_name_by_subject(options.filter_subject)
    floor = (await jetstream.consumer_info(stream, options.name)).ack_floor
    found, kept = [], {letter.stream_sequence for letter in letters}
    async for message in _messages(client, stream, options.filter_subject):
        number = message.metadata.sequence.stream
        if floor is None or number > floor.stream_seq:
            break
        headers = message.headers or {}
        if number not in kept and not await answered(message.subject, headers):
            found.append(_abandoned(message, number, headers))
    return found


async def replay(client: Client, letter: DeadLetter) -> None:
    """Send the command again and forget its record. Raises nats.errors.Error; then the record stays."""
    jetstream = client.jetstream()
    await jetstream.publish(letter.subject, letter.data, headers=dict(letter.headers) or None, timeout=_TIMEOUT_S)
    if not letter.abandoned:
        await jetstream.delete_msg(STREAM, letter.number)


async def _messages(client: Client, stream: str, subject: str) -> AsyncIterator[Msg]:
    """Every message of a stream that is there now; none where there is no such stream."""
    jetstream = client.jetstream()
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, filter_subject=subject, inactive_threshold=_BATCH_S * 2)
    try:
        subscription = await jetstream.pull_subscribe(subject, stream=stream, config=config)
    except NotFoundError:
        return
    try:
        left = (await subscription.consumer_info()).num_pending or 0
        while left > 0:
            for message in await subscription.fetch(min(left, _BATCH), timeout=_BATCH_S):
                left -= 1
                yield message
    finally:
        await subscription.unsubscribe()


def _abandoned(message: Msg, number: int, headers: Mapping[str, str]) -> DeadLetter:
    return DeadLetter(
        number=number,
        reason="abandoned",
        message="its deliveries were used up without an answer",
        subject=shown_subject(message.subject),
        headers=headers,
        data=message.data,
        published_at=message.metadata.timestamp.isoformat(timespec="seconds"),
        stream_sequence=number,
        abandoned=True,
    )


def _letter(message: Msg) -> DeadLetter:
    record = orjson.loads(message.data)
    return DeadLetter(
        number=message.metadata.sequence.stream,
        reason=record["reason"],
        message=record["message"],
        subject=record["subject"],
        headers=record["headers"],
        data=base64.b64decode(record["data_base64"]),
        published_at=record["published_at"],
        stream_sequence=record["stream_sequence"],
        attempt=record["attempt"],
    )
