"""The wakeup of the calling agent's worker (protocol section 6)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.report import doorbell_headers
from openapi_tool.protocol.subject import doorbell_subject

log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
_FIRST_WAIT_S = 0.1
_TIMEOUT_S = 2.0
_IMPOSSIBLE = (nats.errors.BadSubjectError, nats.errors.MaxPayloadError)


@dataclass(frozen=True, slots=True)
class Doorbell:
    """Rings workers; a bell that cannot be rung is left to the kernel's own scan of the inbox."""

    client: Client
    version: str
    sender: str

    async def ring(self, project_id: str, worker_target: str, context_headers: Mapping[str, Any]) -> bool:
        """Wake the worker that waits in the context's channel. False when that is impossible.

        Raises Unavailable while NATS is away: the command stays, and its next delivery rings again.
        """
        headers = doorbell_headers(context_headers) | {
            "CG-Timestamp": str(time.time_ns() // 1_000_000),
            "CG-Version": self.version,
            "CG-Msg-Type": "dict",
            "CG-Sender": self.sender,
        }
        try:
            subject = doorbell_subject(self.version, project_id, headers["CG-Channel-Id"], worker_target)
            await self._publish(subject, headers)
        except (ValueError, KeyError, *_IMPOSSIBLE, nats.js.errors.Error) as error:
            log.warning(
                "the doorbell cannot be rung; the kernel's scan will find the result",
                extra={
                    "action": "doorbell.failed",
                    "project_id": project_id,
                    "worker_target": worker_target,
                    "error": f"{type(error).__name__}: {error}",
                },
            )
            return False
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS: the doorbell could not be rung: {type(error).__name__}: {error}") from error
        return True

    async def _publish(self, subject: str, headers: dict[str, str]) -> None:
        jetstream = self.client.jetstream()
        try:
            await jetstream.publish(subject, b"{}", headers=headers, timeout=_TIMEOUT_S)
        except _IMPOSSIBLE:
            raise
        except (nats.errors.Error, OSError) as outage:
            log.info("the doorbell is rung again: %s", outage, extra={"action": "doorbell.retried"})
        else:
            return
        async for attempt in AsyncRetrying(
            stop=stop_after_delay(_PATIENCE_S),
            wait=wait_exponential_jitter(multiplier=_FIRST_WAIT_S, max=1.0, jitter=_FIRST_WAIT_S),
            retry=retry_if_exception_type((nats.errors.Error, OSError)),
            reraise=True,
        ):
            with attempt:
                await jetstream.publish(subject, b"{}", headers=headers, timeout=_TIMEOUT_S)
