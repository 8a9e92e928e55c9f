"""Commands from the durable consumer to the handler, and their settlement."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.leases import Busy, Lease, LeaseLost, Leases
from openapi_tool.bus.pull import ConsumerGone, StandingPull
from openapi_tool.bus.receipt import received
from openapi_tool.bus.streams import DurableOptions, ensure_durable
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.settlement import Acknowledge, DeadLetter, Settlement, TryAgain
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

Handler = Callable[[Delivery], Awaitable[Settlement]]

_PREPARE_AGAIN_S = 1.0
_ACK_TIMEOUT_S = 5.0
_DOUBTFUL, _SILENCE, _BETWEEN_LOOKS = 1 / 3, 0.45, 1 / 12
"""Shares of the AckWait: how long a standstill makes deliveries doubtful, after which silence a call needs a
heartbeat, and how often calls are looked through."""

_HAND_BACK_S = 2.0
_DOUBT_S = 1.0
_SUSPECT = 2
"""Commands that lost so many executors run one after the other, so that the one that kills is found out."""


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Which durable to consume, and how many calls may run at once.

    After `max_attempts` executors were lost on a command it is answered without being run. A call
    that runs for more than `hold_s` seconds is broken off.
    """

    durable: DurableOptions
    concurrency: int
    max_attempts: int
    hold_s: float


@dataclass(slots=True)
class _Work:
    """A command that is being worked on here; `since` is on the monotonic clock, in seconds.

    `heard_of` is when the server last heard of it: its delivery or the last heartbeat. `stale` says
    that its delivery may be older than it looks; `began` that a run of it was counted.
    """

    message: Msg
    delivery: Delivery
    since: float
    heard_of: float
    stale: bool = False
    began: bool = True
    lease: Lease | None = None


class CommandConsumer:
    """Takes room first, then a command; keeps its message alive while it runs; settles it last."""

    def __init__(
        self,
        client: Client,
        options: ConsumerOptions,
        dead_letters: DeadLetters,
        handle: Handler,
        may_fetch: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = client
        self._options = options
        self._dead_letters = dead_letters
        self._handle = handle
        self._may_fetch = may_fetch
        self._leases = Leases(client, options.durable.ack_wait_s, options.durable.replicas)
        self._alone = asyncio.Lock()
        self._doubtful_until = 0.0
        self._running: dict[asyncio.Task[None], _Work] = {}
        self._sequences: set[int] = set()
        self._pull: StandingPull | None = None
        self._side_tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> int:
        """How many calls run now."""
        return len(self._running)

    @property
    def last_heard(self) -> float:
        """When the server last said anything to our pull, on the monotonic clock (seconds); 0 before."""
        return self._pull.last_heard if self._pull is not None else 0.0

    def stalled(self, seconds: float) -> None:
        """Know that the process stood still for so long: what now arrives may be somebody else's since."""
        if seconds > self._options.durable.ack_wait_s * _DOUBTFUL:
            self._doubtful_until = time.monotonic() + _DOUBT_S

    def start(self) -> None:
        """Begin to consume; connection losses and a missing durable are waited out."""
        self._side_tasks = [
            asyncio.create_task(self._keep_pulling(), name="pull"),
            asyncio.create_task(self._keep_alive(), name="heartbeat"),
        ]

    async def failed(self) -> None:
        """Wait for a side task to end, which none does on its own; raises what ended it."""
        done, _ = await asyncio.wait(self._side_tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace_s: float) -> None:
        """Fetch nothing more, let calls finish for `grace_s` seconds, hand the rest back at once."""
        pulling, heartbeat = self._side_tasks
        await _cancel(pulling)
        log.info(
            "draining",
            extra={
                "action": "drain.started",
                "running": self.running,
                "oldest_s": self._oldest_s(),
                "grace_s": grace_s,
            },
        )
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        handed_back, oldest_s = self.running, self._oldest_s()
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await _cancel(heartbeat)
        log.info("drained", extra={"action": "drain.finished", "handed_back": handed_back, "oldest_s": oldest_s})

    def _oldest_s(self) -> float:
        """Age of the call that has been running longest, in seconds."""
        now = time.monotonic()
        return round(max((now - work.since for work in self._running.values()), default=0.0), 3)

    async def _keep_pulling(self) -> None:
        while True:
            try:
                durable = await ensure_durable(self._client, self._options.durable)
                self._pull = StandingPull(self._client, durable.stream, durable.name, self._room, self._receive)
                log.info(
                    "consuming",
                    extra={"action": "consumer.started", "stream": durable.stream, "durable": durable.name},
                )
                await self._pull.run()
            except (ConsumerGone, nats.errors.Error, OSError) as error:
                log.warning(
                    "the consumer is away, preparing it again",
                    extra={"action": "consumer.lost", "error": f"{type(error).__name__}: {error}"},
                )
                await asyncio.sleep(_PREPARE_AGAIN_S)

    def wake(self) -> None:
        """Look at the room again: a call ended, or `may_fetch` changed."""
        if self._pull is not None:
            self._pull.wake()

    def _room(self) -> int:
        return self._options.concurrency - len(self._running) if self._may_fetch() else 0

    def _receive(self, message: Msg) -> bool:
        """Begin to work on a message. False where it is no delivery of JetStream."""
        now, delivery = time.monotonic(), received(message)
        if delivery is None:
            log.warning("ignored a message that JetStream did not send", extra={"action": "pull.foreign"})
            return False
        if delivery.stream_sequence in self._sequences:
            log.info(
                "a command came again while it is worked on here",
                extra={"action": "call.overlapping", "stream_sequence": delivery.stream_sequence},
            )
            return True
        work = _Work(message, delivery, now, now, stale=now < self._doubtful_until)
        task = asyncio.create_task(self._run_one(work))
        self._running[task] = work
        self._sequences.add(delivery.stream_sequence)
        metrics.RUNNING.set(self.running)
        task.add_done_callback(self._finished)
        return True

    def _finished(self, task: asyncio.Task[None]) -> None:
        work = self._running.pop(task)
        self._sequences.remove(work.delivery.stream_sequence)
        metrics.RUNNING.set(self.running)
        self.wake()
        if not task.cancelled() and (defect := task.exception()):
            log.error(
                "a defect kept this command from being settled; it is delivered again",
                exc_info=defect,
                extra={"action": "call.broken", "stream_sequence": work.delivery.stream_sequence},
            )

    async def _run_one(self, work: _Work) -> None:
        try:
            settlement = await self._own_and_handle(work)
            await self._settle(work, settlement)
        except asyncio.CancelledError:
            await self._hand_back(work)
        except (nats.errors.Error, OSError, LeaseLost) as error:
            log.warning(
                "a command could not be settled; it will be delivered again",
                extra={
                    "action": "call.unsettled",
                    "error": f"{type(error).__name__}: {error}",
                    "stream_sequence": work.delivery.stream_sequence,
                },
            )

    async def _own_and_handle(self, work: _Work) -> Settlement | Busy:
        """Handle a command, from its second delivery on only with its lease."""
        if work.delivery.attempt == 1 and not work.stale:
            return await self._handle(work.delivery)
        work.began = False
        lease = await self._leases.take(work.delivery)
        _log_redelivery(work.delivery, lease)
        if isinstance(lease, Busy):
            return lease
        work.lease = lease
        async with self._alone if lease.lost >= _SUSPECT else nullcontext():
            await self._leases.begin(lease)
            work.began = True
            work.delivery = replace(work.delivery, exhausted=lease.lost >= self._options.max_attempts)
            return await self._handle(work.delivery)

    async def _settle(self, work: _Work, settlement: Settlement | Busy) -> None:
        message = work.message
        match settlement:
            case Acknowledge():
                await message.ack()  # one that is lost brings the command again, and its result is found then
            case TryAgain(delay_s, defect):
                await self._leases.give_back(work.delivery, began=work.began and not defect)
                await message.nak(delay=delay_s)
            case Busy(retry_in_s) if not work.stale:
                await message.nak(delay=retry_in_s)
            case Busy():
                pass  # it was delivered to its owner after it was delivered here
            case DeadLetter(reason, text, terminate):
                await self._dead_letters.keep(work.delivery, reason, text)
                if terminate:
                    await message.term()
                else:
                    await message.ack_sync(timeout=_ACK_TIMEOUT_S)
        if work.lease is not None and isinstance(settlement, Acknowledge | DeadLetter):
            await self._leases.forget(work.lease)

    async def _hand_back(self, work: _Work) -> None:
        """Let another executor have it at once. Without NATS its AckWait does the same a little later."""
        try:
            async with asyncio.timeout(_HAND_BACK_S):
                await self._leases.give_back(work.delivery, began=work.began)
                if not work.message.is_acked:
                    await work.message.nak()
        except (nats.errors.Error, OSError, LeaseLost, TimeoutError) as error:
            log.warning(
                "a command could not be handed back; it is delivered again after its AckWait",
                extra={"action": "call.unsettled", "error": f"{type(error).__name__}: {error}"},
            )

    async def _keep_alive(self) -> None:
        """Tell the server that running calls are worked on, before its AckWait runs out."""
        ack_wait_s = self._options.durable.ack_wait_s
        while True:
            await asyncio.sleep(ack_wait_s * _BETWEEN_LOOKS)
            self._break_off_what_hangs()
            now = time.monotonic()
            due = [
                work
                for work in self._running.values()
                if now - work.heard_of >= ack_wait_s * _SILENCE and not work.message.is_acked
            ]
            for work in due:
                work.heard_of = now
                await _tolerant(work.message.in_progress(), ack_wait_s * _DOUBTFUL)
            renewals = [self._leases.renew(work.lease) for work in due if work.lease is not None]
            await asyncio.gather(*(_tolerant(renewal, ack_wait_s * _DOUBTFUL) for renewal in renewals))

    def _break_off_what_hangs(self) -> None:
        """A call that outlasts every limit is a defect: hand its command back, counted as a lost run."""
        for task, work in self._running.items():
            if time.monotonic() - work.since > self._options.hold_s and work.began:
                log.error(
                    "a call outlasted every limit and is broken off",
                    extra={"action": "call.overdue", "stream_sequence": work.delivery.stream_sequence},
                )
                work.began = False
                task.cancel()


async def _tolerant(heartbeat: Awaitable[None], patience_s: float) -> None:
    """A heartbeat that fails is said in a line; the next one may come through."""
    try:
        async with asyncio.timeout(patience_s):
            await heartbeat
    except (nats.errors.Error, OSError, LeaseLost) as error:
        log.warning(
            "a heartbeat could not be sent",
            extra={"action": "heartbeat.failed", "error": f"{type(error).__name__}: {error}"},
        )


def _log_redelivery(delivery: Delivery, lease: Lease | Busy) -> None:
    metrics.REDELIVERED.inc()
    log.info(
        "a command was delivered again",
        extra={
            "action": "call.redelivered",
            "stream_sequence": delivery.stream_sequence,
            "attempt": delivery.attempt,
            "lost": lease.lost if isinstance(lease, Lease) else None,
            "busy_s": round(lease.retry_in_s, 3) if isinstance(lease, Busy) else None,
        },
    )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
