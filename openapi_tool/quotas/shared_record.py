"""One shared record in this process: of an account (`account`) or of the limit of a key (`key_limit`).

Requests do not write the record themselves: a request adds an attempt, and one task of each record writes all that has
come since its last write. An attempt gets into the record in two writes. The first reserves what the request is
expected to cost, and a later one replaces that by its real cost. The record holds the ids of reserved attempts: so an
attempt is charged once, also if nobody knows whether a write has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import ClassVar

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.account_record import AccountRecord
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.limit_record import LimitRecord
from openapi_tool.state.change import change
from openapi_tool.state.port import Contended, Records, Stored
from openapi_tool.tools.deadlines import Deadline

log = logging.getLogger(__name__)

SETTLE_S = 0.05  # for which a cost waits for other costs and reservations, to be written with them
END_MARGIN_S = 60.0  # from the deadline of a call until its requests have certainly ended
_RETRY_S = 1.0  # pause after a failed write
_CONFLICTS_S = 0.1  # pause after a write that writes of other replicas have prevented again and again
_NUMBERS = count()  # of the attempts of this process


def encode(record: AccountRecord | LimitRecord) -> bytes:
    """Return the stored form."""
    return record.model_dump_json().encode()


class SharedRecord(ABC):
    """A record that contains the `attempts` of this process, and the task that writes it while there is a change.

    For a write, the task calls methods of the subclass: `decode` to use the stored record, and `apply` to change it.
    After a conflict it calls `abort`, and begins again with what another replica has stored. In the end it calls
    `confirm` if the record was stored, or `abort` if that is not known. None of them awaits anything, so that each sees
    the attempts of one moment. While the store is unavailable, `decide_offline` serves what waits.

    `record_name` is the record's name in the store. `outage` is why the store is unavailable, empty if it is not.
    `restores` tells what to do with a running attempt that was stored, and that the record no longer contains: True
    reserves it again; with False, the record has charged it already.
    """

    record: AccountRecord | LimitRecord
    restores: ClassVar[bool]

    def __init__(self, record_name: str, replica: str, store: Records, clock: Callable[[], float]) -> None:
        self.record_name = record_name
        self.replica = replica
        self.now = clock
        self.attempts: dict[str, Attempt] = {}  # by id: those that run, and those whose cost is not stored yet
        self._settled: list[Attempt] = []  # by the last `apply`
        # The store.
        self._store = store
        self._known: Stored | None = None  # the last known record, for the next write; None: it must be read
        self._readable: bytes | None = None  # its last readable value, which replaces a deleted or damaged one
        self._is_unsure = False  # whether the outcome of the last write is unknown
        self.outage = ""
        self._retry_at = 0.0  # during an outage; by the clock of the event loop
        # The task that writes.
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._wakes_soon: asyncio.TimerHandle | None = None
        self._waiting_for_step: list[asyncio.Future[None]] = []

    @abstractmethod
    def decode(self, value: bytes | None) -> bool:
        """Use a stored value, with its times corrected; return whether it is a readable record.

        If it is none, use an empty record.
        """

    @abstractmethod
    def apply(self, now: float) -> bool:
        """Change the record; return whether it must be written."""

    @abstractmethod
    def reserve_attempt(self, attempt: Attempt) -> None:
        """Add an attempt to the record, with what it is expected to cost."""

    @abstractmethod
    def settle_attempt(self, name: str, cost: Amount) -> None:
        """Replace the attempt with the id `name` in the record by its cost."""

    @abstractmethod
    def confirm(self) -> None:
        """Act on what `apply` did: that is stored, or there was nothing to store."""

    @abstractmethod
    def abort(self) -> None:
        """Undo what `apply` did besides changing the record, as the record may not be stored."""

    @abstractmethod
    def begin_outage(self) -> None:
        """Prepare to go on without the store, by the last known record; called once for each outage."""

    @abstractmethod
    def decide_offline(self) -> None:
        """Serve what waits without the store."""

    @abstractmethod
    def next_s(self) -> float | None:
        """Return the seconds until the record must be looked at again; None: only once `wake` is called."""

    @property
    def is_idle(self) -> bool:
        """Return whether no task runs."""
        return self._task is None

    @property
    def remembers(self) -> bool:
        """Return whether a readable value of the record is known, which replaces a damaged one."""
        return self._readable is not None

    def settle_missing(self, attempt: Attempt) -> bool:  # noqa: ARG002
        """Charge an attempt that has ended or expired, and is not in the record; return whether the record changed."""
        return False

    def new_attempt(self, now: float, need: Amount, deadline: Deadline, project: str = "") -> Attempt:
        """Return a new attempt of a call with this `deadline`."""
        until = now + max(0.0, deadline.remaining()) + END_MARGIN_S
        return Attempt(f"{self.replica}.{next(_NUMBERS):x}", now, need, until, project)

    def store_attempts(self, now: float) -> bool:
        """Settle the attempts that have ended, and reserve those that run; return whether the record changed."""
        record = self.record
        changed = False
        to_reserve: list[Attempt] = []
        self._settled = []
        for attempt in self.attempts.values():
            # An attempt that is not stored is reserved first, and settled by a later write, unless it was not sent.
            may_settle = attempt.stored or attempt.cost == NOTHING
            cost = attempt.cost if may_settle else None
            is_charged = attempt.stored and not self.restores
            if attempt.id in record.open:
                if cost is not None:
                    self.settle_attempt(attempt.id, cost)
                    self._settled.append(attempt)
                    changed = True
            elif cost is None and is_charged:
                continue  # `settle_missing` corrects the charge once the attempt has ended
            elif cost is None and attempt.until > now:
                to_reserve.append(attempt)
            else:
                changed |= self.settle_missing(attempt)
                self._settled.append(attempt)
        changed |= self._remove_unsent()
        for attempt in to_reserve[: record.room]:  # the others once there is room
            self.reserve_attempt(attempt)
            changed = True
        return changed

    def _remove_unsent(self) -> bool:
        """Settle attempts of a write that seemed to have failed, and was stored: their requests were never sent."""
        prefix = f"{self.replica}."
        unsent = [name for name in self.record.open if name.startswith(prefix) and name not in self.attempts]
        for name in unsent:
            self.settle_attempt(name, NOTHING)
        return bool(unsent)

    def wake(self) -> None:
        """Let the task look at the record now, and write what there is to write."""
        if self._wakes_soon is not None:
            self._wakes_soon.cancel()
            self._wakes_soon = None
        if self.outage:
            self.decide_offline()
        self._woken.set()
        if self._task is None:
            self._task = in_background(self._run(), f"record {self.record_name}")

    def wake_soon(self) -> None:
        """Wake the task after `SETTLE_S`, so that one write stores all that ends at about the same time."""
        if self._wakes_soon is None:
            self._wakes_soon = asyncio.get_running_loop().call_later(SETTLE_S, self.wake)

    def on_change(self, stored: Stored) -> bool:
        """Adopt a record that another replica wrote; return whether it was adopted.

        It is not if the known record is as new. During an outage none is, as the record is read at its end anyway.
        """
        if self._known is None or stored.revision <= self._known.revision or self.outage:
            return False
        if not self.decode(stored.value):
            self.decode(self._readable)
        self._adopt(stored.revision)
        return True

    def must_read(self) -> None:
        """Read the record before the next change: a notice of another replica may have been lost."""
        self._known = None

    def forget(self) -> None:
        """Begin with an empty record: an operator has deleted the stored one on purpose."""
        self._known = self._readable = None
        self.decode(None)

    async def flush(self) -> None:
        """Wait until the costs that are known now are stored, or the store has failed."""
        ended = [attempt.id for attempt in self.attempts.values() if attempt.cost is not None]
        while not self.outage and any(name in self.attempts for name in ended):
            await self._wait_for_step()

    async def refresh(self) -> None:
        """Read the record now; in an outage the last known one stays."""
        self.must_read()
        await self._wait_for_step()

    async def _wait_for_step(self) -> None:
        """Wake the task, and wait until it has ended a step (`_step`)."""
        stepped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_for_step.append(stepped)
        self.wake()
        await stepped

    async def aclose(self) -> None:
        """Store all known costs, and stop."""
        if self._wakes_soon is not None:
            self._wakes_soon.cancel()
        if self._task is not None:
            await cancel_until_ended(self._task)
        with suppress(Unavailable):
            for _ in range(2):  # an attempt that is not stored is reserved first, and then settled
                if self._is_unsure or any(attempt.cost is not None for attempt in self.attempts.values()):
                    await self._update()

    async def _run(self) -> None:
        """Step until nothing is due; `wake` starts this task again."""
        try:
            while True:
                self._woken.clear()
                pause_s = await self._step()
                for stepped in self._waiting_for_step:
                    if not stepped.done():
                        stepped.set_result(None)
                self._waiting_for_step.clear()
                if pause_s is None and not self._woken.is_set():
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
        finally:
            self._task = None

    async def _step(self) -> float | None:
        """Write once, unless an outage was found less than `_RETRY_S` ago.

        Return the seconds until the next step is due; None: only once `wake` is called.
        """
        loop = asyncio.get_running_loop()
        if self.outage and loop.time() < self._retry_at:
            return self._retry_at - loop.time()
        try:
            await self._update()
        except Contended:
            return _CONFLICTS_S
        except Unavailable as unavailable:
            self._retry_at = loop.time() + _RETRY_S
            self._go_on_without_store(unavailable)
            return _RETRY_S
        except Exception:  # a defect; if this task ended, every call would wait until its deadline
            log.exception(
                "internal error in a shared record", extra={"action": "limits.broken", "key": self.record_name}
            )
            self._known = self._readable = None
            return _RETRY_S
        has_costs_to_write = any(attempt.cost is not None for attempt in self.attempts.values())
        return SETTLE_S if has_costs_to_write else self.next_s()

    def _go_on_without_store(self, unavailable: Unavailable) -> None:
        self.decode(self._readable)  # the last record that is known to be stored: without what `apply` has added
        if not self.outage:
            self.outage = str(unavailable) or "unavailable"
            self.begin_outage()
        self.decide_offline()

    async def _update(self) -> None:
        """Change the stored record once. Raises Contended, Unavailable."""

        def changed(value: bytes | None) -> bytes | None:
            self.abort()
            if not self.decode(value):
                self.decode(self._readable)
            return encode(self.record) if self.apply(self.now()) else None

        known = self._known
        self._known = None  # if the write fails, the record may have been stored: it must be read again
        try:
            stored = await change(self._store, self.record_name, changed, known)
        except BaseException:
            self.abort()
            self._is_unsure = True
            raise
        self.outage = ""
        self._is_unsure = False
        self._adopt(stored.revision, exists=stored.value is not None)
        for attempt in self.attempts.values():
            attempt.stored |= attempt.id in self.record.open
        for attempt in self._settled:
            self.attempts.pop(attempt.id, None)
        self.confirm()

    def _adopt(self, revision: int, *, exists: bool = True) -> None:
        """Keep the record for the next write; `exists` is False if nothing is stored.

        It is kept with its times as `decode` has corrected them. If the stored bytes were kept, the next write would
        decode them, and cap a time of a forged record at a moment after now again: that moment would never come.
        """
        if exists:
            self._readable = encode(self.record)
        self._known = Stored(self._readable if exists else None, revision)
