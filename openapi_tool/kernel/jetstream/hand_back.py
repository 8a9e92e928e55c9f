"""Commands that are handed back: when, after which delay, and what other replicas are told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import Annotated

import nats.errors
import orjson
from cachetools import LRUCache
from nats.aio.msg import Msg
from pydantic import Field, TypeAdapter, ValidationError

from openapi_tool.kernel.jetstream.claimed_ids import ids_of
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.pull_requests import unsubscribe
from openapi_tool.nats_client.client import BusClient

log = logging.getLogger(__name__)

Publish = Callable[[str, bytes], Awaitable[None]]

_MAX_REMEMBERED = 20_000  # handed-back commands whose number of deliveries is remembered; each takes about 100 bytes
_BATCH = 32  # commands to hand back before other tasks run, and in one notice to the other replicas

_Number = Annotated[int, Field(gt=0, lt=2**64)]
_NOTICE = TypeAdapter(Annotated[list[tuple[_Number, _Number]], Field(max_length=_BATCH)])
_MAX_NOTICE_BYTES = 64 * _BATCH  # two numbers of up to 20 digits each, and punctuation

_BATCH_TIMEOUT_S = 2.0
_NANOSECONDS = 1_000_000_000

_MIN_DELAY_S = 0.1
_MAX_DELAY_S = 10.0  # well below the time for which a worker waits: calls of the project may become faster
_ASSUMED_CALL_S = 0.1  # until a call of the project has ended
_MEAN_WEIGHT = 64  # of the moving average of call durations, in calls
_MAX_MEANS = 4_096  # projects


def notice_subject(stream: str, durable: str) -> str:
    """Return the subject of notices of unrun commands, JSON: `[[stream sequence, delivery count], …]`."""
    return f"openapi_tool.handed_back.{stream}.{durable}"


class HandBackQueue:
    """Hands messages back, and calls `release` for each that was held."""

    def __init__(self, publish: Publish, release: Callable[[HeldCommand], None]) -> None:
        self._publish = publish
        self._release = release
        self._queue: deque[tuple[Msg, HeldCommand | None, float, bool]] = deque()
        self._wake = asyncio.Event()
        self._unrun_deliveries: OrderedDict[int, int] = OrderedDict()  # number of the last one by stream sequence
        self._subject: str | None = None

    def add(self, message: Msg, held: HeldCommand | None, delay_s: float = 0.0) -> None:
        """Hand back a message unrun, for redelivery after `delay_s` seconds; `held` is its held command."""
        never_run = held.never_run if held else self.take_never_run(message.metadata)
        self._queue.append((message, held, delay_s, never_run))
        self._wake.set()
        if not delay_s:
            log.info(
                "handed a waiting command back",
                extra={"action": "call.handed_back"} | ids_of(held.delivery if held else message),
            )
        elif log.isEnabledFor(logging.DEBUG):  # may be thousands of lines; `intake.full` is logged once a minute
            log.debug(
                "handed a surplus command back",
                extra={"action": "call.handed_back"} | ids_of(held.delivery if held else message),
            )
        if never_run:
            self._remember(*_delivery(message))

    def _remember(self, sequence: int, number: int) -> None:
        self._unrun_deliveries[sequence] = max(number, self._unrun_deliveries.get(sequence, 0))
        if len(self._unrun_deliveries) > _MAX_REMEMBERED:
            self._unrun_deliveries.popitem(last=False)

    def take_never_run(self, metadata: Msg.Metadata) -> bool:
        """Return whether no earlier delivery of a command was run, so that it needs no lease (ADR 4).

        Also False if another replica's notice of it has not arrived. Forgets the command, which may run now.
        """
        number = metadata.num_delivered
        # If the delivery before this one is remembered, it was handed back unrun, and so were all before it: it was
        # remembered only if that was known of it, here or by the replica that sent the notice.
        return number == 1 or self._unrun_deliveries.pop(metadata.sequence.stream, 0) + 1 == number

    async def follow(self, client: BusClient, stream: str, durable: str) -> None:
        """Exchange notices with the other replicas of a durable until cancelled."""
        self._subject = notice_subject(stream, durable)  # stays: a drain still sends notices
        subscription = await client.subscribe(self._subject, cb=self._on_notice)
        try:
            await asyncio.Event().wait()
        finally:
            self._unrun_deliveries.clear()  # a durable that is created again counts deliveries from 1
            await unsubscribe(client, subscription)

    async def _on_notice(self, message: Msg) -> None:
        with suppress(ValidationError):
            data = message.data if len(message.data) <= _MAX_NOTICE_BYTES else b""
            for sequence, number in _NOTICE.validate_json(data, strict=True):
                self._remember(sequence, number)

    async def run(self) -> None:
        """Hand back added messages until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Hand back everything that was added."""
        while self._queue:
            message, held, *_ = self._queue[0]  # for the log, if the notice fails
            try:
                async with asyncio.timeout(_BATCH_TIMEOUT_S):
                    await self._notify()  # before the server redelivers them
                    for _ in range(min(_BATCH, len(self._queue))):
                        message, held, delay_s, _ = self._queue.popleft()
                        await self._hand_back(message, held, delay_s)
            except (nats.errors.Error, OSError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
                log.warning(
                    "cannot hand a command back; the server redelivers it after AckWait",
                    extra={"action": "call.unsettled", "error": why} | ids_of(held.delivery if held else message),
                )
            await asyncio.sleep(0)

    async def _notify(self) -> None:
        unrun = [_delivery(message) for message, _, _, never_run in islice(self._queue, _BATCH) if never_run]
        if unrun and self._subject:
            await self._publish(self._subject, orjson.dumps(unrun))

    async def _hand_back(self, message: Msg, held: HeldCommand | None, delay_s: float) -> None:
        try:
            await self._publish(message.reply, b'-NAK {"delay":%d}' % (delay_s * _NANOSECONDS) if delay_s else b"-NAK")
        finally:
            if held is not None:
                self._release(held)


def _delivery(message: Msg) -> tuple[int, int]:
    """Return stream sequence and delivery count."""
    return message.metadata.sequence.stream, message.metadata.num_delivered


class HandBackDelays:
    """Computes redelivery delays, so that a command returns when a slot should be free for it.

    Before it run the waiting commands ahead of it, and those that its project had handed back earlier, at `slots`
    divided by the mean duration of the project's calls.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._mean_s: LRUCache[str, float] = LRUCache(_MAX_MEANS)
        self._next_at: dict[str, float] = {}

    def finished(self, project: str, duration_s: float) -> None:
        """Add the duration of a call to the moving average of its project."""
        mean_s = self._mean_s.get(project, duration_s)
        self._mean_s[project] = mean_s + (duration_s - mean_s) / _MEAN_WEIGHT

    def next(self, project: str, ahead: int) -> float:
        """Return the redelivery delay in seconds of the next command of a project, with `ahead` before it."""
        now = self._clock()
        each_s = self._mean_s.get(project, _ASSUMED_CALL_S) / self._slots  # between two calls that begin
        at = max(self._next_at.get(project, 0.0), now + ahead * each_s) + each_s
        self._next_at[project] = min(at, now + _MAX_DELAY_S)
        if len(self._next_at) > _MAX_REMEMBERED:
            self._next_at = {name: due for name, due in self._next_at.items() if due > now}
        return min(max(at - now, _MIN_DELAY_S), _MAX_DELAY_S)
