"""Publish the doorbell of a committed result, by which the agent's worker hears of it, or do without.

A doorbell is a NATS message without content, upon which the worker looks into the agent's inbox. Without one the kernel
finds the result later, by a scan of the inbox.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from openapi_tool.kernel.pipeline.ports import Clock, Publisher
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import NotStored, Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.report import Doorbell
from openapi_tool.telemetry import metrics
from openapi_tool.tools.declaration import suspend_timeout
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.time_limits import TimeLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoorbellSender:
    """Publishes doorbells. In an outage `send` raises, so that the command is handed back and no slot is blocked.

    The next delivery of the command then finds the committed result, and publishes the doorbell.

    - `Unavailable` is raised only while the worker still waits. After that no doorbell is needed: the kernel's scan of
      the inbox finds the result.
    - `NotStored` is raised at any time. No command is fetched until JetStream stores messages again. So the next
      delivery comes after the outage, however long that takes.
    """

    publisher: Publisher
    clock: Clock
    limits: TimeLimits

    async def send(
        self, delivery: Delivery, identity: CallIdentity, records: CallRecords, doorbell: Doorbell | None
    ) -> None:
        """Publish the doorbell; None means that no worker can be addressed, and is logged.

        Raises NotStored, Unavailable.
        """
        if doorbell is None:
            log.error(
                "cannot publish the doorbell: the agent is not in the roster, or its worker's name is not a valid "
                "subject token; its result is committed, and the kernel's scan of the inbox finds it",
                extra={"action": "doorbell.impossible"} | log_ids(identity),
            )
            return
        try:
            published = await self.publisher.publish(doorbell)
        except NotStored:
            raise
        except Unavailable as outage:
            if self._worker_waits(delivery, records):
                raise
            published = False
            log.error(  # noqa: TRY400 - an outage, not a defect
                "cannot publish the doorbell in time; the kernel's inbox scan will find the result: %s",
                outage,
                extra={"action": "doorbell.missed"} | log_ids(identity),
            )
        if not published:  # and never will be: NATS refuses it for good, or the worker waits no longer
            metrics.DOORBELLS_MISSED.inc()

    def _worker_waits(self, delivery: Delivery, records: CallRecords) -> bool:
        """Return whether the worker still waits, which it does from the arrival of the command in the stream on."""
        age_s = self.clock() - delivery.published_at.timestamp()
        suspend_timeout_s = suspend_timeout(records.definition.options) if records.definition else None
        return age_s < self.limits.worker_waits_s(suspend_timeout_s)
