"""Publish the doorbell of a committed result, with retries for as long as the worker waits."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from openapi_tool.executor.ids import ids
from openapi_tool.executor.ports import Clock, Publisher
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.report import Wakeup
from openapi_tool.telemetry import metrics
from openapi_tool.tools.deadline import TimeLimits
from openapi_tool.tools.definition import suspend_timeout

log = logging.getLogger(__name__)

_UNCLAIMED_STATUSES = ("pending", "deferred")


@dataclass(frozen=True, slots=True)
class WakeupSender:
    """Publishes doorbells.

    In an outage of NATS the command is handed back and the next delivery publishes again, so that no slot is blocked
    while NATS elects a leader. Once the worker no longer waits, the outage is logged and counted and the command is
    acknowledged; the kernel's scan of the inbox finds the result.
    """

    publisher: Publisher
    clock: Clock
    limits: TimeLimits

    async def send(
        self, delivery: Delivery, identity: CallIdentity, records: CallRecords, wakeup: Wakeup | None
    ) -> None:
        """Publish the doorbell. Raises Unavailable in an outage while the worker still waits."""
        if wakeup is None:
            log.error(
                "cannot publish the doorbell: the agent is not in the roster, or its worker's name is not a valid "
                "subject token; its result is committed, and the kernel's scan of the inbox finds it",
                extra={"action": "doorbell.impossible"} | ids(identity),
            )
            return
        try:
            published = await self.publisher.publish(wakeup)
        except Unavailable as outage:
            if self.clock.time() - delivery.published_at.timestamp() < self._worker_waits_s(records):
                raise
            published = False
            log.error(  # noqa: TRY400 - an outage, not a defect
                "cannot publish the doorbell in time; the kernel's inbox scan will find the result: %s",
                outage,
                extra={"action": "doorbell.missed"} | ids(identity),
            )
        if not published:
            metrics.DOORBELLS_MISSED.inc()

    def _worker_waits_s(self, records: CallRecords) -> float:
        return self.limits.worker_waits_s(suspend_timeout(records.tool.options) if records.tool else None)


def unclaimed(status: str | None) -> bool:
    """Return whether an inbox row with this status may still need a doorbell; a claimed row does not."""
    return status in _UNCLAIMED_STATUSES
