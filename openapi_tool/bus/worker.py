"""Run one command in a slot: take its lease if it was redelivered, handle it, settle it or hand it back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import nats.errors
from nats.aio.msg import Msg

from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.leases import Held, Lease, Leases, LeaseTaken, ids_of
from openapi_tool.concurrency import shielded
from openapi_tool.options import ExecutorOptions
from openapi_tool.protocol.command import Acknowledge, Delivery, Requeue, Settlement, StoreDeadLetter
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.logs import CALL_FIELDS

log = logging.getLogger(__name__)

Handler = Callable[[Delivery], Awaitable[Settlement]]

_ACK_TIMEOUT_S = 5.0
_HAND_BACK_TIMEOUT_S = 2.0
_SETTLE_S = 6.0  # after a cancellation; longer than _ACK_TIMEOUT_S

_SUSPECT_RUNS = 2  # lost with their executor, until a command is suspected of killing it
_SUSPECTS_SHARE = 1 / 4
"""Fraction of the slots for suspects: if one kills the executor, each other suspect beside it counts a lost run, too. A
smaller share would delay commands whose executors died for another reason."""

_SUSPECT_RETRY_S = 0.5  # if no slot for suspects is free


class Worker:
    """Runs commands with `handle` and settles them. `acknowledge` must not wait.

    A command whose executor died `max_lost_runs` times gets an error result without being run.
    """

    def __init__(
        self,
        acknowledge: Callable[[Msg], None],
        leases: Leases,
        dead_letters: DeadLetters,
        handle: Handler,
        options: ExecutorOptions,
    ) -> None:
        self._acknowledge = acknowledge
        self._leases = leases
        self._dead_letters = dead_letters
        self._handle = handle
        self._max_lost_runs = options.max_lost_runs
        self._suspect_slots = asyncio.Semaphore(max(1, int(options.concurrency * _SUSPECTS_SHARE)))

    async def run(self, work: Held) -> None:
        """Handle and settle a command; a cancellation does not interrupt a settlement that is decided."""
        CALL_FIELDS.set(partial(ids_of, work.delivery))
        try:
            settlement = await self._own_and_handle(work)
            if isinstance(settlement, Acknowledge) and work.lease is None:
                self._acknowledge(work.message)  # does not wait, so it needs no shield
            else:
                await shielded(self._settle(work, settlement), _SETTLE_S)
        except asyncio.CancelledError as cancelled:
            if work.settling:
                _log_unsettled(work, cancelled)
            else:
                await shielded(self._hand_back(work), _HAND_BACK_TIMEOUT_S)
            raise
        except (nats.errors.Error, OSError, Unavailable) as error:
            _log_unsettled(work, error)

    async def _own_and_handle(self, work: Held) -> Settlement | LeaseTaken:
        if work.never_run:
            return await self._handle(work.delivery)
        work.forgive_on_hand_back = False  # until `_begin` counts this run, there is nothing to take off
        lease = await self._leases.take(work.delivery)
        _log_redelivery(work.delivery, lease)
        if isinstance(lease, LeaseTaken):
            return lease
        if lease.lost < _SUSPECT_RUNS:
            return await self._begin_and_handle(work, lease)
        if self._suspect_slots.locked():
            await self._leases.release(lease)
            return LeaseTaken(_SUSPECT_RETRY_S)  # redelivers the command; to wait here would block a slot
        async with self._suspect_slots:
            return await self._begin_and_handle(work, lease)

    async def _begin_and_handle(self, work: Held, lease: Lease) -> Settlement:
        work.lease = lease
        await shielded(self._begin(work, lease), _HAND_BACK_TIMEOUT_S)
        work.delivery = replace(work.delivery, exhausted=lease.lost >= self._max_lost_runs)
        return await self._handle(work.delivery)

    async def _begin(self, work: Held, lease: Lease) -> None:
        await self._leases.begin(lease)
        work.forgive_on_hand_back = True

    async def _settle(self, work: Held, settlement: Settlement | LeaseTaken) -> None:
        work.settling = True
        message = work.message
        match settlement:
            case Acknowledge():
                self._acknowledge(message)  # if the ack is lost, the redelivered command finds its stored result
            case Requeue(delay_s, defect, reason):
                log.info("command requeued: %s", reason, extra={"action": "command.requeued"} | ids_of(work.delivery))
                await self._leases.hand_back(work.delivery, forgive=work.forgive_on_hand_back and not defect)
                await message.nak(delay=delay_s)
            case LeaseTaken(retry_in_s) if not work.stale:
                await message.nak(delay=retry_in_s)
            case LeaseTaken():
                # Stale: while this process was stopped the server redelivered the command to the executor that holds
                # the lease. That one settles it; a settlement from here would end or repeat its delivery (ADR 4).
                pass
            case StoreDeadLetter(reason, text, terminate):
                await self._dead_letters.record(work.delivery, reason, text)
                if terminate:
                    await message.term()
                else:
                    await message.ack_sync(timeout=_ACK_TIMEOUT_S)
        if work.lease is not None and isinstance(settlement, (Acknowledge, StoreDeadLetter)):
            await self._leases.settle(work.lease)

    async def _hand_back(self, work: Held) -> None:
        try:
            async with asyncio.timeout(_HAND_BACK_TIMEOUT_S):
                await self._leases.hand_back(work.delivery, forgive=work.forgive_on_hand_back)
                if not work.message.is_acked:
                    await work.message.nak()
            log.info("handed a command back", extra={"action": "call.handed_back"} | ids_of(work.delivery))
        except (nats.errors.Error, OSError, Unavailable, TimeoutError) as error:
            _log_unsettled(work, error, "cannot hand a command back; the server redelivers it after AckWait")


def _log_unsettled(
    work: Held, error: BaseException, message: str = "cannot settle a command; the server redelivers it"
) -> None:
    why = f"{type(error).__name__}: {error}"
    log.warning(message, extra={"action": "call.unsettled", "error": why} | ids_of(work.delivery))


def _log_redelivery(delivery: Delivery, lease: Lease | LeaseTaken) -> None:
    metrics.REDELIVERED.inc()
    log.info(
        "command redelivered",
        extra={
            "action": "call.redelivered",
            "attempt": delivery.attempt,
            "lost": lease.lost if isinstance(lease, Lease) else None,
            "busy_s": round(lease.retry_in_s, 3) if isinstance(lease, LeaseTaken) else None,
        }
        | ids_of(delivery),
    )


_RESERVED_SHARE = 1 / 8  # of the slots; one project cannot take it, because running calls are not preempted


class Slots:
    """Slots of running calls, by the command's sequence in the stream.

    Once calls of two projects have run, no project may begin a call while it holds 7/8 of the `limit` slots. A call may
    give up its slot: released for good while its result is delayed (ADR 8), at most `limit` calls at once; or paused
    while it waits for a permit or a retry, at most `max_paused` calls at once.
    """

    def __init__(self, limit: int, max_paused: int = 0) -> None:
        self._limit = limit
        self._max_paused = max_paused
        self._max_of_project = limit - int(limit * _RESERVED_SHARE)
        self._calls: dict[int, PausableSlot] = {}
        self._first_project: str | None = None
        self._several_projects = False
        self._in_use: Counter[str] = Counter()  # slots of each project
        self._released = 0
        self.paused = 0
        self.wake: Callable[[], None] = lambda: None

    @property
    def released(self) -> int:
        """Number of running calls without a slot."""
        return self._released + self.paused

    def may_begin(self, project: str) -> bool:
        """Return whether a project may have one more slot, if there is one."""
        return self._in_use[project] < (self._max_of_project if self._several_projects else self._limit)

    @property
    def excess(self) -> int:
        """Slots that projects hold beyond 7/8; others may begin as many calls without one (ADR 6)."""
        return sum(max(0, held - self._max_of_project) for held in self._in_use.values())

    def begin(self, sequence: int, project: str) -> None:
        """Count a call that begins to run in a slot."""
        self._calls[sequence] = PausableSlot(self, project)
        self._in_use[project] += 1
        self._first_project = self._first_project or project
        self._several_projects = self._several_projects or project != self._first_project

    def release(self, call: PausableSlot) -> None:
        """Take the slot from a running call for good."""
        if not call.released and self._released < self._limit:
            self.take_back(call)
            call.released = True
            self._released += 1
            self._in_use[call.project] -= 1
            self.wake()

    def of(self, sequence: int) -> PausableSlot:
        """Return the slot of a running call."""
        return self._calls[sequence]

    def unsent(self) -> set[int]:
        """Return the calls that wait for a permit and have sent nothing yet."""
        return {sequence for sequence, call in self._calls.items() if call.waiting and not call.sent}

    def give_up(self, call: PausableSlot) -> None:
        """Take the slot from a running call until it resumes, unless too many calls are paused."""
        if self.paused < self._max_paused and not call.released:
            call.paused = True
            self.paused += 1
            self._in_use[call.project] -= 1
        self.wake()  # in a drain the consumer then hands the command back

    def take_back(self, call: PausableSlot) -> None:
        """Give a paused call its slot back at once, also if none is free."""
        if call.paused:
            call.paused = False
            self.paused -= 1
            self._in_use[call.project] += 1

    def ended(self, sequence: int) -> int:
        """Remove a call; return its number of upstream requests."""
        call = self._calls.pop(sequence)
        self.take_back(call)
        call.ended = True
        if call.released:
            self._released -= 1
        else:
            self._in_use[call.project] -= 1
        if not self._in_use[call.project]:
            del self._in_use[call.project]
        return call.requests


class PausableSlot:
    """Slot of one running call; paused while a request of the call waits for a permit.

    A shared request may outlive the call that started it, and then has no slot to give up.
    """

    __slots__ = ("_slots", "ended", "paused", "project", "released", "requests", "sent", "waiting")

    def __init__(self, slots: Slots, project: str) -> None:
        self._slots = slots
        self.project = project
        self.requests = 1  # to the upstream, of the whole call
        self.waiting = 0  # requests that wait for a permit or a retry
        self.sent = self.paused = self.released = self.ended = False

    def pause(self) -> None:
        """Give up the slot while a request waits."""
        self.waiting += 1
        if self.waiting == 1 and not self.ended:
            self._slots.give_up(self)

    def resume(self) -> None:
        """Take a slot again once no request waits."""
        self.waiting -= 1
        if not self.waiting:
            self._slots.take_back(self)

    def release(self) -> None:
        """Give up the slot for good."""
        self._slots.release(self)

    def sending(self) -> None:
        """Record that the call sends a request."""
        self.sent = True
