"""Run one command in a slot: take its lease if it was redelivered, handle it, settle it or hand it back.

A *lease* is the right of one executor to run a redelivered command, whose first run may still be in progress elsewhere.
A run is *lost* if its process ended before the command was settled or handed back. Lost runs are counted in the lease's
record, so that a command which kills executors is not run forever.
"""

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
"""Handles the delivery of a command, and returns how it is to be settled (the pipeline)."""

_ACK_TIMEOUT_S = 5.0  # until the server has confirmed an acknowledgement
_HAND_BACK_TIMEOUT_S = 2.0  # after a cancellation, for a hand-back or to count a run
_SETTLE_TIMEOUT_S = 6.0  # after a cancellation, for a settlement; longer than _ACK_TIMEOUT_S

_SUSPECT_RUNS = 2  # a command with this many lost runs is a suspect: it may kill executors
_SUSPECTS_SHARE = 1 / 4
"""Fraction of the slots in which suspects run. If one suspect kills the executor, the runs of all others in it are
lost, too. A smaller fraction would delay commands whose executors died for another reason."""

_SUSPECT_RETRY_S = 0.5  # until the redelivery of a suspect for which no slot was free


@dataclass(frozen=True, slots=True)
class _RunLater:
    """The command is not run here now: another executor runs it, or no slot for suspects is free.

    This stands for a settlement: the command is handed back, and redelivered after `retry_in_s` seconds.
    """

    retry_in_s: float


class CommandRunner:
    """Runs commands with `handle` and settles them.

    A command whose executor died `max_lost_runs` times gets an error result without being run. The run of a redelivered
    command is counted as lost when it begins, and no longer once it is settled or handed back. So the count stays if
    the process is killed.
    """

    def __init__(self, leases: Leases, dead_letters: DeadLetters, handle: Handler, options: ExecutorOptions) -> None:
        self._leases = leases
        self._dead_letters = dead_letters
        self._handle = handle
        self._max_lost_runs = options.max_lost_runs
        self._suspect_slots = asyncio.Semaphore(max(1, int(options.concurrency * _SUSPECTS_SHARE)))

    async def run(self, held: HeldCommand) -> None:
        """Handle and settle a command; a cancellation does not interrupt a settlement that is decided."""
        CALL_FIELDS.set(partial(ids_of, held.delivery))  # of log lines from here on, made only if one is written
        try:
            settlement = await self._handle_under_lease(held)
            await shielded(self._settle(held, settlement), _SETTLE_TIMEOUT_S)
        except asyncio.CancelledError as cancelled:
            if held.settling:
                _log_unsettled(held, cancelled)
            else:
                await shielded(self._hand_back(held), _HAND_BACK_TIMEOUT_S)
            raise
        except (nats.errors.Error, OSError, Unavailable) as error:
            _log_unsettled(held, error)

    async def _handle_under_lease(self, held: HeldCommand) -> Settlement | _RunLater:
        """Handle a command; if it was redelivered, only under its lease.

        If this run ends by a hand-back, it must not count as lost. `forgive_on_hand_back` says whether the hand-back
        has to take one off the lost runs in the command's lease record:

        | the command | lost runs in its record | forgive one |
        | --- | --- | --- |
        | was never run | there is none; a new one begins with one lost run, this one | yes, unless it is overdue |
        | was redelivered, and has no lease yet | without this run | no |
        | has a lease and is counted (`_count_run`) | with this run | yes, unless it is overdue |

        An overdue run was cancelled as a defect, because it exceeded every time limit, and stays lost.
        """
        if held.never_run:
            return await self._handle(held.delivery)
        held.forgive_on_hand_back = False  # this run is not counted yet
        lease = await self._leases.take(held.delivery)
        _log_redelivery(held.delivery, lease)
        if isinstance(lease, LeaseTaken):
            return _RunLater(lease.retry_in_s)
        if lease.lost < _SUSPECT_RUNS:
            return await self._begin_and_handle(held, lease)
        if self._suspect_slots.locked():  # suspects run in all of them
            await self._leases.release(lease)
            return _RunLater(_SUSPECT_RETRY_S)  # waiting here would block a slot
        async with self._suspect_slots:
            return await self._begin_and_handle(held, lease)

    async def _begin_and_handle(self, held: HeldCommand, lease: Lease) -> Settlement:
        """Count the run, and handle the command; after too many lost runs as `exhausted`, which does not run it."""
        held.lease = lease
        await shielded(self._count_run(held, lease), _HAND_BACK_TIMEOUT_S)
        held.delivery = replace(held.delivery, exhausted=lease.lost >= self._max_lost_runs)
        return await self._handle(held.delivery)

    async def _count_run(self, held: HeldCommand, lease: Lease) -> None:
        """Count the run as lost until it ends, and let a hand-back take it off again (`forgive_on_hand_back`).

        To be shielded: after an interrupted count nobody would know whether the record has it.
        """
        await self._leases.begin(lease)
        held.forgive_on_hand_back = not held.overdue  # the call may have become overdue meanwhile

    async def _settle(self, held: HeldCommand, settlement: Settlement | _RunLater) -> None:
        """Do what the settlement says, then release the lease of a settled command."""
        held.settling = True
        message = held.message
        match settlement:
            case Acknowledge():
                await message.ack()  # if the ack is lost, the redelivered command finds its stored result
            case HandBack(delay_s, defect, reason):  # by the handler; a cancelled run is handed back by `_hand_back`
                log.info(
                    "handed a command back: %s", reason, extra={"action": "command.requeued"} | ids_of(held.delivery)
                )
                await self._leases.hand_back(held.delivery, forgive=held.forgive_on_hand_back and not defect)
                await message.nak(delay=delay_s)
            case _RunLater(retry_in_s) if not held.stale:
                await message.nak(delay=retry_in_s)
            case _RunLater():
                # Stale: while this process was stopped, the server redelivered the command to another executor, which
                # holds the lease or will take it. That executor settles the command. A settlement from here would end
                # or repeat its delivery (ADR 4).
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
        """Hand back the command of a cancelled run."""
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
    fields: dict[str, object] = {"attempt": delivery.number, "lost": None, "retry_in_s": None}
    if isinstance(lease, Lease):
        fields["lost"] = lease.lost
    else:
        fields["retry_in_s"] = round(lease.retry_in_s, 3)
    log.info("command redelivered", extra={"action": "call.redelivered"} | fields | ids_of(delivery))
