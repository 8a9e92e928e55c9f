"""Doorbells in NATS (protocol section 6), and whether JetStream stores them.

A doorbell is a message without content. It tells the worker of an agent to look into the agent's inbox in PostgreSQL,
as a result is there. The command stream stores doorbells, too, so that none is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import nats.errors
import nats.js.errors
from tenacity import RetryCallState, stop_after_delay, wait_exponential_jitter

from openapi_tool.concurrency.retries import retried
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import OUTAGE
from openapi_tool.nats_client.connection_errors import NOT_STORED
from openapi_tool.protocol.errors import NotStored, Unavailable
from openapi_tool.protocol.report import Doorbell
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

_RETRY_LIMIT_S = 3.0  # for all attempts, in the slot of the call; then its command is handed back
_WAIT = wait_exponential_jitter(multiplier=0.1, max=1.0, jitter=0.1)
_TIMEOUT_S = 2.0  # of one attempt

# Errors of one doorbell that no retry can avoid.
_PERMANENT = (nats.errors.BadSubjectError, nats.errors.MaxPayloadError, nats.js.errors.BadRequestError)


@dataclass(slots=True)
class DoorbellPublisher:
    """Publishes doorbells; if that is impossible, the kernel's periodic scan of the inbox finds the result.

    - `stream` returns the name of the command stream; empty while it is unknown.
    - `outage` is why JetStream stores no doorbell at all; empty if it does.
    - `changed` is called whenever `outage` changes.
    - `_unsent` is a doorbell that was not stored, by which `problem` tests whether the outage is over.
    """

    client: BusClient
    stream: Callable[[], str] = field(default=str, init=False)
    changed: Callable[[], None] = field(default=lambda: None, init=False)
    outage: str = field(default="", init=False)
    _unsent: Doorbell | None = field(default=None, init=False)

    async def publish(self, doorbell: Doorbell) -> bool:
        """Publish a doorbell; return False if NATS refuses it permanently.

        Raises Unavailable in an outage, and NotStored if JetStream stores no doorbell at all. The command is then
        handed back, and its next delivery publishes again.
        """
        try:
            return await retried(
                lambda: self._publish(doorbell),
                on=OUTAGE,
                wait=_WAIT,
                stop=stop_after_delay(_RETRY_LIMIT_S),
                before_sleep=_log_retry,
            )
        except OUTAGE as error:
            if self.outage:
                raise NotStored(f"NATS: cannot publish the doorbell: {self.outage}") from error
            raise Unavailable(f"NATS: cannot publish the doorbell: {type(error).__name__}: {error}") from error

    async def _publish(self, doorbell: Doorbell) -> bool:
        """Publish once. Return False after a permanent error, and raise any other."""
        try:
            await self.client.publish_to_stream(doorbell.subject, doorbell.body, dict(doorbell.headers), _TIMEOUT_S)
        except OUTAGE as error:
            if why := self._why_not_stored(error):
                self._unsent = doorbell
                self._set_outage(why)
                raise
            if not isinstance(error, _PERMANENT):
                raise
            log.warning(
                "cannot publish the doorbell; the kernel's inbox scan will find the result",
                extra={
                    "action": "doorbell.failed",
                    "subject": short(doorbell.subject),
                    "error": f"{type(error).__name__}: {error}",
                },
            )
            return False
        self._set_outage("")
        return True

    def _why_not_stored(self, error: Exception) -> str:
        """Return why JetStream stores no message at all, empty if it may store others."""
        stream = self.stream() or "the command stream"
        if isinstance(error, nats.js.errors.APIError):
            reason = error.description or ""
            remedy = NOT_STORED.get(error.err_code or 0)  # None for an error that concerns this doorbell alone
            is_of_one_subject = "per subject" in reason  # such a limit leaves room for other subjects
            if remedy is None or is_of_one_subject:
                return ""
            return f"JetStream stores no message in {stream}: {reason}; {remedy}"
        if isinstance(error, nats.errors.TimeoutError) and self.client.is_connected:
            return (
                f"JetStream confirms no doorbell in {stream}; after a write error, as of a full disk, restart "
                "nats-server (see its log); else check that this stream captures doorbells"
            )
        return ""

    def _set_outage(self, why: str) -> None:
        """Set `outage`, and call `changed` if it is another one."""
        is_same = self.outage == why
        self.outage = why
        if not why:
            self._unsent = None
        if not is_same:
            self.changed()

    async def problem(self) -> str:
        """Return `outage`, after another attempt to publish a doorbell that was not stored.

        If it was stored after all, the copy does no harm.
        """
        if self._unsent is not None and self.client.is_connected:
            with suppress(*OUTAGE):
                await self._publish(self._unsent)
        return self.outage


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.debug("cannot publish the doorbell; retrying: %s", outage, extra={"action": "doorbell.retried"})
