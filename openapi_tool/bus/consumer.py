"""Commands from the durable consumer to the handler, and their settlement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.pull import ConsumerGone, StandingPull
from openapi_tool.bus.streams import DurableOptions, ensure_durable
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.settlement import Acknowledge, DeadLetter, Settlement, TryAgain

log = logging.getLogger(__name__)

Handler = Callable[[Delivery], Awaitable[Settlement]]

_PREPARE_AGAIN_S = 1.0
_ACK_TIMEOUT_S = 5.0
_HEARTBEATS_PER_ACK_WAIT = 3


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Which durable to consume, and how many calls may run at once."""

    durable: DurableOptions
    concurrency: int


class CommandConsumer:
    """Takes room first, then a command; keeps its message alive while it runs; settles it last."""

    def __init__(self, client: Client, options: ConsumerOptions, dead_letters: DeadLetters, handle: Handler) -> None:
        self._client = client
        self._options = options
        self._dead_letters = dead_letters
        self._handle = handle
        self._running: dict[asyncio.Task[None], Msg] = {}
        self._pull: StandingPull | None = None
        self._side_tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> int:
        """How many calls run now."""
        return len(self._running)

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
        log.info("draining", extra={"action": "drain.started", "running": self.running, "grace_s": grace_s})
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        handed_back = self.running
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await _cancel(heartbeat)
        log.info("drained", extra={"action": "drain.finished", "handed_back": handed_back})

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

    def _room(self) -> int:
        return self._options.concurrency - len(self._running)

    def _receive(self, message: Msg) -> None:
        task = asyncio.create_task(self._run_one(message))
        self._running[task] = message
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if self._pull is not None:
            self._pull.wake()

    async def _run_one(self, message: Msg) -> None:
        delivery = _delivery(message)
        try:
            settlement = await self._handle(delivery)
            await self._settle(message, delivery, settlement)
        except asyncio.CancelledError:
            await message.nak()
        except (nats.errors.Error, OSError) as error:
            log.warning(
                "a command could not be settled; it will be delivered again",
                extra={
                    "action": "call.unsettled",
                    "error": f"{type(error).__name__}: {error}",
                    "stream_sequence": delivery.stream_sequence,
                },
            )

    async def _settle(self, message: Msg, delivery: Delivery, settlement: Settlement) -> None:
        match settlement:
            case Acknowledge():
                await message.ack_sync(timeout=_ACK_TIMEOUT_S)
            case TryAgain(delay_s):
                await message.nak(delay=delay_s)
            case DeadLetter(reason, text, terminate):
                await self._dead_letters.keep(delivery, reason, text)
                if terminate:
                    await message.term()
                else:
                    await message.ack_sync(timeout=_ACK_TIMEOUT_S)

    async def _keep_alive(self) -> None:
        """Tell the server that running calls are worked on, before its AckWait runs out."""
        while True:
            await asyncio.sleep(self._options.durable.ack_wait_s / _HEARTBEATS_PER_ACK_WAIT)
            for message in list(self._running.values()):
                if not message.is_acked:
                    await self._in_progress(message)

    async def _in_progress(self, message: Msg) -> None:
        try:
            await message.in_progress()
        except (nats.errors.Error, OSError) as error:
            log.warning(
                "a heartbeat could not be sent",
                extra={"action": "heartbeat.failed", "error": f"{type(error).__name__}: {error}"},
            )


def _delivery(message: Msg) -> Delivery:
    metadata = message.metadata
    return Delivery(
        subject=message.subject,
        headers=message.headers or {},
        data=message.data,
        published_at=metadata.timestamp,
        attempt=metadata.num_delivered,
        stream_sequence=metadata.sequence.stream,
    )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
