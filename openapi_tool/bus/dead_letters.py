"""Commands that can never be answered, kept for people in a stream of their own."""

from __future__ import annotations

import base64
import logging
from datetime import UTC, datetime

import orjson
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import BadRequestError, NoStreamResponseError, NotFoundError

from openapi_tool.protocol.command import Delivery
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

STREAM = "openapi_tool_dead_letters"
SUBJECT = "openapi_tool.dead_letter"
_KEEP_S = 7 * 24 * 3600
_TIMEOUT_S = 5.0


class DeadLetters:
    """Writes records to the stream, making it where it is missing; every record is also logged."""

    def __init__(self, client: Client, keep_s: float = _KEEP_S) -> None:
        self._client = client
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
                "subject": delivery.subject,
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
            try:
                await jetstream.add_stream(StreamConfig(name=STREAM, subjects=[SUBJECT], max_age=self._keep_s))
            except BadRequestError:
                log.info("another replica made the dead letter stream", extra={"action": "dead_letters.raced"})


def _record(delivery: Delivery, reason: str, message: str) -> dict[str, object]:
    """Everything that a person or a replay needs; the body in base64, because it may be no text."""
    return {
        "reason": reason,
        "message": message,
        "subject": delivery.subject,
        "headers": dict(delivery.headers),
        "data_base64": base64.b64encode(delivery.data).decode(),
        "stream_sequence": delivery.stream_sequence,
        "attempt": delivery.attempt,
        "published_at": delivery.published_at,
        "recorded_at": datetime.now(UTC),
    }
