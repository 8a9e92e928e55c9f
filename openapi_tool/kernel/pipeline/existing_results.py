"""Settle a call that has a result card already: stored by an earlier delivery, or by another author.

The *report* of a result is an inbox row, which the agent's worker reads, and an edge, for audits. The *doorbell* is the
NATS message that tells the worker to look into the inbox. Usually the delivery that stored the card did everything, and
only its acknowledgement was lost. If it ended before that, report or doorbell may be missing, and is added here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from openapi_tool.kernel.pipeline.doorbell_sender import DoorbellSender
from openapi_tool.kernel.pipeline.ports import CallSlot, Kernel, Tracer
from openapi_tool.kernel.pipeline.result_order import ResultOrder
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import Dialect
from openapi_tool.protocol.errors import ReportRefused
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import CallRecords, EarlierResult
from openapi_tool.protocol.report import reportable_content, trace_link
from openapi_tool.protocol.settlement import Acknowledge, Settlement
from openapi_tool.telemetry import metrics
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

_UNCLAIMED_STATUSES = ("pending", "deferred")  # of an inbox row that no worker has claimed


@dataclass(frozen=True, slots=True)
class ExistingResults:
    """Settles calls that have a result; those of other authors than `actor_id` are left as they are."""

    actor_id: str
    dialect: Dialect
    kernel: Kernel
    order: ResultOrder
    doorbell_sender: DoorbellSender
    tracer: Tracer

    async def settle(
        self, delivery: Delivery, identity: CallIdentity, records: CallRecords, earlier: EarlierResult, slot: CallSlot
    ) -> Settlement:
        """Settle a call: complete a missing report, or publish a doorbell, as it may be missing. Raises ReportRefused.

        An inbox row that a worker has claimed needs no doorbell. To check that saves many: a durable that is created
        again may redeliver the commands of a day.
        """
        if not earlier.is_of_this_call:
            raise ReportRefused(
                "id_collision",
                f"result {earlier.card_id!r} is of another tool call id with the same MD5, which must be unique",
            )
        metrics.DEDUPLICATED.inc()
        is_ours = earlier.author_id == self.actor_id and not earlier.is_deleted
        headers = earlier.report_headers  # None without an inbox row
        if is_ours and headers is None and reportable_content(earlier.content):
            await self._complete_report(delivery, identity, records, earlier, slot)
        elif is_ours and headers is not None and earlier.report_status in _UNCLAIMED_STATUSES:
            doorbell = self.dialect.doorbell(identity.project_id, records.worker_target, headers)
            await self.doorbell_sender.send(delivery, identity, records, doorbell)
        log.info(
            "the call already has a result",
            extra={"action": "call.deduplicated", "author_id": short(earlier.author_id or "")} | log_ids(identity),
        )
        return Acknowledge()

    async def _complete_report(
        self, delivery: Delivery, identity: CallIdentity, records: CallRecords, earlier: EarlierResult, slot: CallSlot
    ) -> None:
        """Write inbox row and edge of a result that has none, and publish its doorbell."""
        acceptance = self.dialect.accept(identity, records)
        with self.tracer.span("report", trace_link(identity, acceptance.waiting_turn), log_ids(identity)) as span:
            report = self.dialect.report(acceptance, span.context, span.tracestate, earlier.card_id, earlier.content)
            wait = self.order.begin(delivery, identity, acceptance.waiting_turn, slot)
            write = partial(self.kernel.report, earlier.card_id, report)
            await self.order.write(wait, write, partial(self.kernel.is_turn_busy, report))
        await self.doorbell_sender.send(delivery, identity, records, report.doorbell)
