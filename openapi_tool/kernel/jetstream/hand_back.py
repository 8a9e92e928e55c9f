"""Hand commands back to the server unrun, which delivers them again, to any replica.

`HandBackQueue` sends the hand-backs, and tells the other replicas by notices which commands were never run: these need
no lease when they are redelivered. `HandBackDelays` computes after which time a surplus command should return.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, NamedTuple

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
"""Publishes a message: subject and body."""

_MAX_REMEMBERED = 20_000  # commands that were handed back unrun; each takes about 100 bytes
_BATCH = 32  # commands to hand back before other tasks run, and in one notice
_BATCH_TIMEOUT_S = 2.0
_NANOSECONDS = 1_000_000_000  # in a second

_Number = Annotated[int, Field(gt=0, lt=2**64)]
_NOTICE = TypeAdapter(Annotated[list[tuple[_Number, _Number]], Field(max_length=_BATCH)])
_MAX_NOTICE_BYTES = 64 * _BATCH  # two numbers of up to 20 digits each per command, and punctuation


def notice_subject(stream: str, durable: str) -> str:
    """Return the subject of notices of unrun commands, JSON: `[[stream sequence, delivery count], …]`."""
    return f"openapi_tool.handed_back.{stream}.{durable}"


class HandBackQueue:
    """Hands messages back, and calls `release` for each that was held."""

    def __init__(self, publish: Publish, release: Callable[[HeldCommand], None]) -> None:
        self._publish = publish
        self._release = release
        self._queue: deque[_HandBack] = deque()
        self._wake = asyncio.Event()
        # Commands whose deliveries were all handed back unrun: the number of the last one by stream sequence.
        self._unrun_deliveries: OrderedDict[int, int] = OrderedDict()
        self._subject: str | None = None  # of notices, once `follow` has begun

    def add(self, message: Msg, held: HeldCommand | None, delay_s: float = 0.0) -> None:
        """Hand back a message unrun, for redelivery after `delay_s` seconds; `held` is its command if that is held."""
        never_run = held.never_run if held else self.take_never_run(message.metadata)
        hand_back = _HandBack(message, held, delay_s, never_run)
        self._queue.append(hand_back)
        self._wake.set()
        if not delay_s:
            log.info("handed a waiting command back", extra={"action": "call.handed_back"} | hand_back.ids())
        elif log.isEnabledFor(logging.DEBUG):  # may be thousands of lines; `intake.full` is logged once a minute
            log.debug("handed a surplus command back", extra={"action": "call.handed_back"} | hand_back.ids())
        if never_run:
            self._remember(*_delivery(message))

    def _remember(self, sequence: int, number: int) -> None:
        """Remember that all deliveries of a command up to this number were handed back unrun."""
        self._unrun_deliveries[sequence] = max(number, self._unrun_deliveries.get(sequence, 0))
        if len(self._unrun_deliveries) > _MAX_REMEMBERED:
            self._unrun_deliveries.popitem(last=False)

    def take_never_run(self, metadata: Msg.Metadata) -> bool:
        """Return whether no earlier delivery of a command was run, so that it needs no lease (ADR 4).

        False, too, if that is unknown, since another replica's notice has not arrived. Forgets the command, which may
        run now.
        """
        number = metadata.num_delivered
        # If delivery 4 is the last one that was handed back unrun, none of the deliveries 1 to 4 was run, and delivery
        # 5 is like the first one.
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
            current = self._queue[0]  # for the log, if the notice fails
            try:
                async with asyncio.timeout(_BATCH_TIMEOUT_S):
                    await self._notify()  # first, so that the notice arrives before the commands are redelivered
                    for _ in range(min(_BATCH, len(self._queue))):
                        current = self._queue.popleft()
                        await self._hand_back(current)
            except (nats.errors.Error, OSError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
                log.warning(
                    "cannot hand a command back; the server redelivers it after AckWait",
                    extra={"action": "call.unsettled", "error": why} | current.ids(),
                )
            await asyncio.sleep(0)

    async def _notify(self) -> None:
        """Tell the other replicas which commands of the next batch were never run."""
        unrun = [_delivery(each.message) for each in islice(self._queue, _BATCH) if each.never_run]
        if unrun and self._subject:
            await self._publish(self._subject, orjson.dumps(unrun))

    async def _hand_back(self, hand_back: _HandBack) -> None:
        try:
            await self._publish(hand_back.message.reply, hand_back.body())
        finally:
            if hand_back.held is not None:
                self._release(hand_back.held)


class _HandBack(NamedTuple):
    """Message to hand back, with its held command if it was held."""

    message: Msg
    held: HeldCommand | None
    delay_s: float
    never_run: bool

    def ids(self) -> dict[str, Any]:
        """Return the command's ids for log lines."""
        return ids_of(self.held.delivery if self.held else self.message)

    def body(self) -> bytes:
        """Return the negative acknowledgement, with the delay if there is one."""
        return b'-NAK {"delay":%d}' % (self.delay_s * _NANOSECONDS) if self.delay_s else b"-NAK"


def _delivery(message: Msg) -> tuple[int, int]:
    """Return stream sequence and delivery count."""
    return message.metadata.sequence.stream, message.metadata.num_delivered


_MIN_DELAY_S = 0.1
_MAX_DELAY_S = 10.0  # well below the time for which a worker waits, as the project's calls may become faster
_ASSUMED_CALL_S = 0.1  # duration of a call, until one of the project has ended
_MEAN_WEIGHT = 64  # the moving average of call durations is over about as many calls
_MAX_MEANS = 4_096  # projects whose average is remembered


class HandBackDelays:
    """Computes redelivery delays, so that a command returns when a slot should be free for it.

    Other commands run before it: those that wait here ahead of it, and those that its project had handed back earlier.
    With 8 slots and calls of 2 s on average, one call begins every 0.25 s; so after 40 others it returns in 10 s.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._mean_s: LRUCache[str, float] = LRUCache(_MAX_MEANS)  # duration of a call by project
        self._next_at: dict[str, float] = {}  # when the last command that was handed back returns, by project

    def finished(self, project: str, duration_s: float) -> None:
        """Add the duration of a call to the moving average of its project."""
        mean_s = self._mean_s.get(project, duration_s)
        self._mean_s[project] = mean_s + (duration_s - mean_s) / _MEAN_WEIGHT

    def next(self, project: str, ahead: int) -> float:
        """Return the redelivery delay in seconds of the next command of a project; `ahead` commands wait before it."""
        now = self._clock()
        each_s = self._mean_s.get(project, _ASSUMED_CALL_S) / self._slots  # between the beginnings of two calls
        after_waiting = now + ahead * each_s
        after_handed_back = self._next_at.get(project, 0.0)
        at = max(after_waiting, after_handed_back) + each_s
        self._next_at[project] = min(at, now + _MAX_DELAY_S)
        if len(self._next_at) > _MAX_REMEMBERED:
            self._next_at = {name: due for name, due in self._next_at.items() if due > now}
        return min(max(at - now, _MIN_DELAY_S), _MAX_DELAY_S)
