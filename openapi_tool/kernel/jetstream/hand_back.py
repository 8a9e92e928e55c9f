"""Hand commands back to the server unrun, which delivers them again, to any replica.

A redelivered command usually needs a lease, as the earlier delivery may still run elsewhere (`leases.py`). A command
whose deliveries were all handed back unrun needs none. So each replica tells the others which ones these are, by a
*notice*: a NATS message with the commands of one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, NamedTuple

import nats.errors
import orjson
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
_BATCH_TIMEOUT_S = 2.0  # of the notice and the hand-backs of one batch
_NANOSECONDS = 1_000_000_000  # in a second

_Number = Annotated[int, Field(gt=0, lt=2**64)]
_NOTICE = TypeAdapter(Annotated[list[tuple[_Number, _Number]], Field(max_length=_BATCH)])
"""Notice, as JSON: `[[stream sequence, number of the last delivery that was handed back unrun], …]`."""

_MAX_NOTICE_BYTES = 64 * _BATCH  # two numbers of up to 20 digits each per command, and punctuation


def notice_subject(stream: str, durable: str) -> str:
    """Return the subject on which the replicas of a durable send each other notices."""
    return f"openapi_tool.handed_back.{stream}.{durable}"


class _HandBack(NamedTuple):
    """Message to hand back.

    - `held`: its command, None if the command was not held.
    - `delay_s`: until the redelivery, in seconds.
    - `never_run`: whether no delivery of the command was ever run, as far as is known here.
    """

    message: Msg
    held: HeldCommand | None
    delay_s: float
    never_run: bool

    def ids(self) -> dict[str, Any]:
        """Return the command's ids for log lines."""
        return ids_of(self.held.delivery if self.held else self.message)

    def body(self) -> bytes:
        """Return the negative acknowledgement, with the delay if there is one."""
        if self.delay_s == 0:
            return b"-NAK"
        return b'-NAK {"delay":%d}' % (self.delay_s * _NANOSECONDS)


class HandBackQueue:
    """Hands messages back in batches, and calls `release` for each command that was held."""

    def __init__(self, publish: Publish, release: Callable[[HeldCommand], None]) -> None:
        self._publish = publish
        self._release = release
        self._queue: deque[_HandBack] = deque()
        self._wake = asyncio.Event()
        # Commands whose deliveries were all handed back unrun: the number of the last delivery, by stream sequence.
        self._unrun_deliveries: OrderedDict[int, int] = OrderedDict()
        self._notice_subject: str | None = None  # set once `follow` has begun

    def add(self, message: Msg, held: HeldCommand | None, delay_s: float = 0.0) -> None:
        """Hand back a message unrun, for redelivery after `delay_s` seconds; `held` is its command if that is held."""
        never_run = held.never_run if held else self.take_never_run(message.metadata)
        hand_back = _HandBack(message, held, delay_s, never_run)
        self._queue.append(hand_back)
        self._wake.set()
        if delay_s == 0:
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
        """Receive the notices of the other replicas of a durable until cancelled; from now on send some, too."""
        self._notice_subject = notice_subject(stream, durable)  # stays afterwards, as a drain still sends notices
        subscription = await client.subscribe(self._notice_subject, cb=self._on_notice)
        try:
            await asyncio.Event().wait()  # until cancelled
        finally:
            self._unrun_deliveries.clear()  # a durable that is created again counts deliveries from 1
            await unsubscribe(client, subscription)

    async def _on_notice(self, message: Msg) -> None:
        if len(message.data) > _MAX_NOTICE_BYTES:
            return
        with suppress(ValidationError):  # of a foreign message: any client with the permission may publish here
            for sequence, number in _NOTICE.validate_json(message.data, strict=True):
                self._remember(sequence, number)

    async def run(self) -> None:
        """Hand back added messages until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Hand back everything that was added, in batches."""
        while self._queue:
            current = self._queue[0]  # for the log; if already the notice fails, it stands for the whole batch
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
        batch = islice(self._queue, _BATCH)
        unrun = [_delivery(hand_back.message) for hand_back in batch if hand_back.never_run]
        if unrun and self._notice_subject:
            await self._publish(self._notice_subject, orjson.dumps(unrun))

    async def _hand_back(self, hand_back: _HandBack) -> None:
        try:
            await self._publish(hand_back.message.reply, hand_back.body())
        finally:  # also after a failure: the server then redelivers the command by itself
            if hand_back.held is not None:
                self._release(hand_back.held)


def _delivery(message: Msg) -> tuple[int, int]:
    """Return a message's stream sequence and the number of its delivery."""
    return message.metadata.sequence.stream, message.metadata.num_delivered
