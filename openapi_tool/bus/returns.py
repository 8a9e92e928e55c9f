"""Hand commands that did not run back to the stream (NAK), each with its own redelivery delay.

The delays spread redeliveries to the rate at which calls end here. To receive a whole backlog at once, and to hand it
back again, would cost more CPU than the calls themselves.

The replicas of a durable publish notices of the commands that they handed back unrun: these need no lease (ADR 6).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Annotated, Any

import nats.errors
import orjson
from cachetools import LRUCache
from nats.aio.msg import Msg
from pydantic import Field, TypeAdapter, ValidationError

from openapi_tool.bus.client import BusClient
from openapi_tool.bus.held import Held, ids_of, ids_of_message
from openapi_tool.bus.pull_consumer import unsubscribe

log = logging.getLogger(__name__)

Publish = Callable[[str, bytes], Awaitable[None]]

_MAX_REMEMBERED = 20_000
"""Limit of handed-back commands whose number of deliveries is remembered; each takes about 100 bytes."""

_BATCH = 32
"""Commands to hand back before other tasks run, and in one notice to the other replicas."""

_Number = Annotated[int, Field(gt=0, lt=2**64)]
_NOTICE = TypeAdapter(Annotated[list[tuple[_Number, _Number]], Field(max_length=_BATCH)])
_MAX_NOTICE_BYTES = 64 * _BATCH

_BATCH_TIMEOUT_S = 2.0

_MIN_DELAY_S, _MAX_DELAY_S = 0.1, 10.0  # well below a worker's wait, if a project's calls become faster
_MEAN_WEIGHT = 64
"""Weight of the moving average of call durations, in calls."""
_MAX_MEANS = 4_096  # projects


def notice_subject(stream: str, durable: str) -> str:
    """Return the subject of notices about handed-back commands: JSON, `[[stream sequence, delivery count], …]`."""
    return f"openapi_tool.returned.{stream}.{durable}"


class Returns:
    """Hands messages back, and calls `release` for each that was held."""

    def __init__(self, publish: Publish, release: Callable[[Held], None]) -> None:
        self._publish = publish
        self._release = release
        self._queue: deque[tuple[Msg, Held | None, float, bool]] = deque()
        self._wake = asyncio.Event()
        self._unrun_deliveries: OrderedDict[int, int] = OrderedDict()  # delivery count by stream sequence
        self._subject: str | None = None

    def add(self, message: Msg, work: Held | None, delay_s: float = 0.0, *, never_run: bool) -> None:
        """Hand back a message for redelivery after `delay_s` seconds; `work` is its command if it was held.

        `never_run` means that no delivery of the command, including this one, was ever run.
        """
        self._queue.append((message, work, delay_s, never_run))
        self._wake.set()
        if not delay_s:
            log.info("handed a waiting command back", extra={"action": "call.handed_back"} | _ids(message, work))
        elif log.isEnabledFor(logging.DEBUG):  # may be thousands of lines; `intake.full` is logged once a minute
            log.debug("handed a surplus command back", extra={"action": "call.handed_back"} | _ids(message, work))
        if never_run:
            self._remember(*_delivery(message))

    def _remember(self, sequence: int, attempt: int) -> None:
        self._unrun_deliveries[sequence] = max(attempt, self._unrun_deliveries.get(sequence, 0))
        if len(self._unrun_deliveries) > _MAX_REMEMBERED:
            self._unrun_deliveries.popitem(last=False)

    def never_run(self, metadata: Msg.Metadata) -> bool:
        """Return whether no earlier delivery of a command was run, so that it needs no lease (ADR 4).

        False if a replica handed it back whose notice did not arrive, or not yet. The command runs now, so its entry is
        removed.
        """
        attempt = metadata.num_delivered
        # The delivery before this one was handed back, and by induction all earlier ones.
        return attempt == 1 or self._unrun_deliveries.pop(metadata.sequence.stream, 0) + 1 == attempt

    async def follow(self, client: BusClient, stream: str, durable: str) -> None:
        """Exchange notices with the other replicas of a durable until cancelled; send them also after that."""
        self._subject = notice_subject(stream, durable)
        subscription = await client.subscribe(self._subject, cb=self._on_notice)
        try:
            await asyncio.Event().wait()
        finally:
            self._unrun_deliveries.clear()  # a durable that is made again counts deliveries from 1 again
            await unsubscribe(client, subscription)

    async def _on_notice(self, message: Msg) -> None:
        if len(message.data) > _MAX_NOTICE_BYTES:
            return
        try:
            deliveries = _NOTICE.validate_json(message.data, strict=True)
        except ValidationError:
            return
        for sequence, attempt in deliveries:
            self._remember(sequence, attempt)

    async def run(self) -> None:
        """Hand back added messages until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Hand back everything that was added."""
        while self._queue:
            message, work, *_ = self._queue[0]
            try:
                async with asyncio.timeout(_BATCH_TIMEOUT_S):
                    await self._notify()  # before the server redelivers them
                    for _ in range(min(_BATCH, len(self._queue))):
                        message, work, delay_s, _ = self._queue.popleft()
                        await self._hand_back(message, work, delay_s)
            except (nats.errors.Error, OSError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
                log.warning(
                    "cannot hand a command back; the server redelivers it after AckWait",
                    extra={"action": "call.unsettled", "error": why} | _ids(message, work),
                )
            await asyncio.sleep(0)

    async def _notify(self) -> None:
        unrun = [_delivery(message) for message, _, _, never_run in islice(self._queue, _BATCH) if never_run]
        if unrun and self._subject:
            await self._publish(self._subject, orjson.dumps(unrun))

    async def _hand_back(self, message: Msg, work: Held | None, delay_s: float) -> None:
        try:
            await self._publish(message.reply, b'-NAK {"delay":%d}' % (delay_s * 1e9) if delay_s else b"-NAK")
        finally:
            if work is not None:
                self._release(work)


def _delivery(message: Msg) -> tuple[int, int]:
    return message.metadata.sequence.stream, message.metadata.num_delivered


def _ids(message: Msg, work: Held | None) -> dict[str, Any]:
    """Return the ids of a command for log lines; a held message was emptied into its delivery."""
    return ids_of_message(message) if work is None else ids_of(work.delivery)


class ReturnDelays:
    """Computes redelivery delays: each command after those that run before it, or were handed back before it.

    The assumed rate is `slots` divided by the mean duration of its project's calls. A command that is redelivered too
    early is handed back again.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._mean_s: LRUCache[str, float] = LRUCache(_MAX_MEANS)
        self._next_at: dict[str, float] = {}

    def finished(self, project: str, duration_s: float) -> None:
        """Add the duration of a call in seconds to the moving average of its project."""
        mean_s = self._mean_s.get(project, duration_s)
        self._mean_s[project] = mean_s + (duration_s - mean_s) / _MEAN_WEIGHT

    def next(self, project: str, ahead: int) -> float:
        """Return the redelivery delay in seconds for the next command of a project; `ahead` commands run before it."""
        now, each_s = self._clock(), self._mean_s.get(project, 0.1) / self._slots
        at = max(self._next_at.get(project, 0.0), now + ahead * each_s) + each_s
        self._next_at[project] = min(at, now + _MAX_DELAY_S)
        if len(self._next_at) > _MAX_REMEMBERED:
            self._next_at = {name: due for name, due in self._next_at.items() if due > now}
        return min(max(at - now, _MIN_DELAY_S), _MAX_DELAY_S)
