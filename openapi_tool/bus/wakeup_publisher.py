"""Publisher of doorbells to the calling agent's worker (protocol section 6)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from tenacity import RetryCallState, stop_after_delay, wait_exponential_jitter

from openapi_tool.bus.client import BusClient
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.report import Wakeup
from openapi_tool.retrying import retried
from openapi_tool.tools.problems import short

log = logging.getLogger(__name__)

_RETRY_LIMIT_S = 3.0
"""Retry limit in seconds, while the call occupies a slot; then the command is handed back and retried."""

_WAIT = wait_exponential_jitter(multiplier=0.1, max=1.0, jitter=0.1)
_TIMEOUT_S = 2.0
_OUTAGE = (nats.errors.Error, OSError)
_PERMANENT = (nats.errors.BadSubjectError, nats.errors.MaxPayloadError, nats.js.errors.BadRequestError)
"""Permanent errors. All others are outages, also "no responders" and "no stream": a stream may have no leader."""


@dataclass(frozen=True, slots=True)
class WakeupPublisher:
    """Publishes doorbells; if that is impossible, the kernel's periodic scan of the inbox finds the result."""

    client: BusClient

    async def publish(self, wakeup: Wakeup) -> bool:
        """Publish a doorbell; return False if NATS refuses it permanently.

        Raises Unavailable in an outage of NATS: the command is then requeued, and its next delivery publishes again.
        """
        try:
            return await retried(
                lambda: self._publish(wakeup),
                on=_OUTAGE,
                wait=_WAIT,
                stop=stop_after_delay(_RETRY_LIMIT_S),
                before_sleep=_log_retry,
            )
        except _OUTAGE as error:
            raise Unavailable(f"NATS: cannot publish the doorbell: {type(error).__name__}: {error}") from error

    async def _publish(self, wakeup: Wakeup) -> bool:
        try:
            await self.client.publish_to_stream(wakeup.subject, wakeup.body, dict(wakeup.headers), _TIMEOUT_S)
        except _PERMANENT as error:
            log.warning(
                "cannot publish the doorbell; the kernel's inbox scan will find the result",
                extra={
                    "action": "doorbell.failed",
                    "subject": short(wakeup.subject),
                    "error": f"{type(error).__name__}: {error}",
                },
            )
            return False
        return True


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.info("cannot publish the doorbell; retrying: %s", outage, extra={"action": "doorbell.retried"})
