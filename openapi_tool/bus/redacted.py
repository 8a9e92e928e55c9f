"""Dead letters without secrets."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from nats.aio.client import Client

from openapi_tool.bus.dead_letters import DeadLetter, DeadLetters
from openapi_tool.protocol.command import Delivery
from openapi_tool.telemetry.redact import Redactor

Kept = TypeVar("Kept", Delivery, DeadLetter)


def without_secrets(kept: Kept, redactor: Redactor) -> Kept:
    """A command as it came, but for secrets of this executor that somebody put into it."""
    return replace(
        kept,
        subject=redactor.text(kept.subject),
        headers=redactor.value(dict(kept.headers)),
        data=redactor.text(kept.data.decode(errors="surrogateescape")).encode(errors="surrogateescape"),
    )


class RedactedDeadLetters(DeadLetters):
    """Keeps commands without this executor's secrets."""

    def __init__(self, client: Client, redactor: Redactor, replicas: int = 1) -> None:
        super().__init__(client, replicas)
        self._redactor = redactor

    async def keep(self, delivery: Delivery, reason: str, message: str) -> None:
        """Record why a command will not be answered. Raises nats.errors.Error when it could not be stored."""
        await super().keep(without_secrets(delivery, self._redactor), reason, self._redactor.text(message))
