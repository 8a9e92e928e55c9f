"""Run one command in a slot: take its lease if it was redelivered, handle it, settle it or hand it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import nats.errors

from openapi_tool.concurrency.cancellation import shielded
from openapi_tool.kernel.jetstream.claimed_ids import ids_of
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.leases import Lease, Leases, LeaseTaken
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.settlement import Acknowledge, HandBack, Settlement, StoreDeadLetter
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.logs import CALL_FIELDS

log = logging.getLogger(__name__)

Handler = Callable[[Delivery], Awaitable[Settlement]]

_ACK_TIMEOUT_S = 5.0
_HAND_BACK_TIMEOUT_S = 2.0
_SETTLE_S = 6.0  # after a cancellation; longer than _ACK_TIMEOUT_S

_SUSPECT_RUNS = 2  # a command with this many lost runs is suspected of killing executors
_SUSPECTS_SHARE = 1 / 4
"""Fraction of the slots for suspects: if one kills the executor, each other suspect beside it counts a lost run, too. A
smaller share would delay commands whose executors died for another reason."""

_SUSPECT_RETRY_S = 0.5  # if no slot for suspects is free


@dataclass(frozen=True, slots=True)
class _RunLater:
    """The command is not run here now: another executor runs it, or no slot for suspects is free."""

    retry_in_s: float


class CommandRunner:
    """Runs commands with `handle` and settles them.

    A command whose executor died `max_lost_runs` times gets an error result without being run. A redelivered run counts
    as lost from its beginning until it is settled or handed back; so a killed process leaves it counted.
    """

    def __init__(self, leases: Leases, dead_letters: DeadLetters, handle: Handler, options: ExecutorOptions) -> None:
        self._leases = leases
        self._dead_letters = dead_letters
        self._handle = handle
        self._max_lost_runs = options.max_lost_runs
        self._suspect_slots = asyncio.Semaphore(max(1, int(options.concurrency * _SUSPECTS_SHARE)))

    async def run(self, held: HeldCommand) -> None:
        """Handle and settle a command; a cancellation does not interrupt a settlement that is decided."""
        CALL_FIELDS.set(partial(ids_of, held.delivery))
        try:
            settlement = await self._own_and_handle(held)
            await shielded(self._settle(held, settlement), _SETTLE_S)
        except asyncio.CancelledError as cancelled:
            if held.settling:
                _log_unsettled(held, cancelled)
            else:
                await shielded(self._hand_back(held), _HAND_BACK_TIMEOUT_S)
            raise
        except (nats.errors.Error, OSError, Unavailable) as error:
            _log_unsettled(held, error)

    async def _own_and_handle(self, held: HeldCommand) -> Settlement | _RunLater:
        """Handle a command; one that was redelivered only under its lease.

        A hand-back takes a run off the lost ones if `forgive_on_hand_back` is set:

        | the command | its record counts this run | forgive |
        | --- | --- | --- |
        | was never run | there is none, which means one lost run | yes, unless it is overdue |
        | was redelivered, and has no lease yet | no | no |
        | is counted (`_count_run`) | yes | yes, unless it is overdue |
        """
        if held.never_run:
            return await self._handle(held.delivery)
        held.forgive_on_hand_back = False  # else an earlier lost run would be forgiven
        lease = await self._leases.take(held.delivery)
        _log_redelivery(held.delivery, lease)
        if isinstance(lease, LeaseTaken):
            return _RunLater(lease.retry_in_s)
        if lease.lost < _SUSPECT_RUNS:
            return await self._begin_and_handle(held, lease)
        if self._suspect_slots.locked():
            await self._leases.release(lease)
            return _RunLater(_SUSPECT_RETRY_S)  # to wait here would block a slot
        async with self._suspect_slots:
            return await self._begin_and_handle(held, lease)

    async def _begin_and_handle(self, held: HeldCommand, lease: Lease) -> Settlement:
        held.lease = lease
        await shielded(self._count_run(held, lease), _HAND_BACK_TIMEOUT_S)
        held.delivery = replace(held.delivery, exhausted=lease.lost >= self._max_lost_runs)
        return await self._handle(held.delivery)

    async def _count_run(self, held: HeldCommand, lease: Lease) -> None:
        """Count the run as lost until it ends; after that a hand-back may take it off again (`forgive_on_hand_back`).

        Shielded, so that it is known whether it is counted.
        """
        await self._leases.begin(lease)
        held.forgive_on_hand_back = not held.overdue  # an overdue call may have been cancelled meanwhile

    async def _settle(self, held: HeldCommand, settlement: Settlement | _RunLater) -> None:
        held.settling = True
        message = held.message
        match settlement:
            case Acknowledge():
                await message.ack()  # if the ack is lost, the redelivered command finds its stored result
            case HandBack(delay_s, defect, reason):  # the handler decided it; `_hand_back` is for a cancelled run
                log.info(
                    "handed a command back: %s", reason, extra={"action": "command.requeued"} | ids_of(held.delivery)
                )
                await self._leases.hand_back(held.delivery, forgive=held.forgive_on_hand_back and not defect)
                await message.nak(delay=delay_s)
            case _RunLater(retry_in_s) if not held.stale:
                await message.nak(delay=retry_in_s)
            case _RunLater():
                # Stale: while this process was stopped the server redelivered the command, to the executor that holds
                # the lease or to one that will take it. That one settles it; a settlement from here would end or repeat
                # its delivery (ADR 4).
                pass
            case StoreDeadLetter(reason, text, terminate):
                await self._dead_letters.record(held.delivery, reason, text)
                if terminate:
                    await message.term()
                else:
                    await message.ack_sync(timeout=_ACK_TIMEOUT_S)
        if held.lease is not None and isinstance(settlement, (Acknowledge, StoreDeadLetter)):
            await self._leases.settle(held.lease)

    async def _hand_back(self, held: HeldCommand) -> None:
        try:
            async with asyncio.timeout(_HAND_BACK_TIMEOUT_S):
                await self._leases.hand_back(held.delivery, forgive=held.forgive_on_hand_back)
                if not held.message.is_acked:
                    await held.message.nak()
            log.info("handed a command back", extra={"action": "call.handed_back"} | ids_of(held.delivery))
        except (nats.errors.Error, OSError, Unavailable, TimeoutError) as error:
            _log_unsettled(held, error, "cannot hand a command back; the server redelivers it after AckWait")


def _log_unsettled(
    held: HeldCommand, error: BaseException, message: str = "cannot settle a command; the server redelivers it"
) -> None:
    why = f"{type(error).__name__}: {error}"
    log.warning(message, extra={"action": "call.unsettled", "error": why} | ids_of(held.delivery))


def _log_redelivery(delivery: Delivery, lease: Lease | LeaseTaken) -> None:
    metrics.REDELIVERED.inc()
    log.info(
        "command redelivered",
        extra={
            "action": "call.redelivered",
            "attempt": delivery.number,
            "lost": lease.lost if isinstance(lease, Lease) else None,
            "retry_in_s": round(lease.retry_in_s, 3) if isinstance(lease, LeaseTaken) else None,
        }
        | ids_of(delivery),
    )
