"""One shared record in this process: all that waits at the same moment is written at once."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import ClassVar

from openapi_tool.concurrency.background import in_background
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.account_record import AccountRecord
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.limit_record import LimitRecord
from openapi_tool.state.change import change
from openapi_tool.state.port import Contended, Records, Stored
from openapi_tool.tools.deadlines import Deadline

log = logging.getLogger(__name__)

SETTLE_S = 0.05  # for which a settlement waits for others, or for a reservation
END_MARGIN_S = 60.0  # from the deadline of a call until its requests have certainly ended
_RETRY_S = 1.0  # after a failed write
_CONFLICTS_S = 0.1  # after too many conflicts
_NUMBERS = count()


def encode(record: AccountRecord | LimitRecord) -> bytes:
    """Return the stored form."""
    return record.model_dump_json().encode()


class SharedRecord(ABC):
    """A record that contains the `attempts` of this process, and the task that writes it while there is a change.

    The subclass changes the record in `apply`, again after each conflict, and takes the result over in `confirm`.
    Neither awaits anything, so that each sees the attempts of one moment. `record_name` is the record's name in the
    store, `outage` why that is unavailable. `restores`: a running attempt that the record has lost is reserved again.
    """

    record: AccountRecord | LimitRecord
    restores: ClassVar[bool]

    def __init__(self, record_name: str, replica: str, store: Records, clock: Callable[[], float]) -> None:
        self.record_name = record_name
        self.replica = replica
        self.now = clock
        self.attempts: dict[str, Attempt] = {}
        self.outage = ""
        self._store = store
        self._known: Stored | None = None  # the last known record; None: it must be read
        self._readable: bytes | None = None  # its last readable value, which replaces a deleted or damaged one
        self._settled: list[Attempt] = []  # by `apply`
        self._is_unsure = False  # whether a write had an unknown outcome
        self._retry_at = 0.0
        self._event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._flushing: list[asyncio.Future[None]] = []

    @abstractmethod
    def decode(self, value: bytes | None) -> bool:
        """Use a stored value, with its times corrected; return False, and use an empty record, if it is none."""

    @abstractmethod
    def apply(self, now: float) -> bool:
        """Change the record; return whether it must be written."""

    @abstractmethod
    def reserve_attempt(self, attempt: Attempt) -> None:
        """Add an attempt to the record."""

    @abstractmethod
    def settle_attempt(self, name: str, cost: Amount) -> None:
        """Replace an attempt of the record by its cost."""

    @abstractmethod
    def confirm(self) -> None:
        """Take over what `apply` did: it is stored, or it was nothing."""

    @abstractmethod
    def abort(self) -> None:
        """Undo what `apply` did besides changing the record: nobody knows whether it is stored."""

    @abstractmethod
    def begin_outage(self) -> None:
        """Go on without the store, by the last known record; called once for each outage."""

    @abstractmethod
    def decide_offline(self) -> None:
        """Serve what waits without the store."""

    @abstractmethod
    def next_s(self) -> float | None:
        """Return the seconds until the next change is due; None: it is only once `wake` is called."""

    @property
    def is_idle(self) -> bool:
        """Return whether no task runs."""
        return self._task is None

    @property
    def remembers(self) -> bool:
        """Return whether a readable value is known, which would replace a damaged one."""
        return self._readable is not None

    def settle_missing(self, attempt: Attempt) -> bool:  # noqa: ARG002
        """Settle an attempt that has ended or expired, and is not in the record; return whether that changes it."""
        return False

    def new_attempt(self, now: float, need: Amount, deadline: Deadline, project: str = "") -> Attempt:
        """Return a new attempt of a call."""
        until = now + max(0.0, deadline.remaining()) + END_MARGIN_S
        return Attempt(f"{self.replica}.{next(_NUMBERS):x}", now, need, until, project)

    def store_attempts(self, now: float) -> bool:
        """Reserve what the record does not contain, settle what it contains and ended; return whether it changed."""
        record = self.record
        changed = False
        missing: list[Attempt] = []
        self._settled = []
        for attempt in self.attempts.values():
            cost = attempt.cost if attempt.stored or attempt.cost == NOTHING else None  # else it is reserved first
            if attempt.id in record.open:
                if cost is not None:
                    self.settle_attempt(attempt.id, cost)
                    self._settled.append(attempt)
                    changed = True
            elif cost is None and attempt.stored and not self.restores:
                continue
            elif cost is None and attempt.until > now:
                missing.append(attempt)
            else:
                changed |= self.settle_missing(attempt)
                self._settled.append(attempt)
        prefix = f"{self.replica}."
        for name in [name for name in record.open if name.startswith(prefix) and name not in self.attempts]:
            self.settle_attempt(name, NOTHING)  # of a write that was believed to have failed: it was never sent
            changed = True
        for attempt in missing[: record.room]:  # the others once there is room
            self.reserve_attempt(attempt)
            changed = True
        return changed

    def wake(self) -> None:
        """Write what there is to write now."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self.outage:
            self.decide_offline()
        self._event.set()
        if self._task is None:
            self._task = in_background(self._run(), f"record {self.record_name}")

    def wake_soon(self) -> None:
        """Write within SETTLE_S, so that what ends at about the same time is written at once."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(SETTLE_S, self.wake)

    def on_change(self, stored: Stored) -> bool:
        """Adopt a record that another replica wrote, unless a newer one is known; return whether it was adopted."""
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
        """Start anew: an operator has deleted the record on purpose."""
        self._known = self._readable = None
        self.decode(None)

    async def flush(self) -> None:
        """Wait until the costs that are known now are stored, or the store has failed."""
        ended = [attempt.id for attempt in self.attempts.values() if attempt.cost is not None]
        while not self.outage and any(name in self.attempts for name in ended):
            await self._stepped()

    async def refresh(self) -> None:
        """Read the record now; in an outage the last known one stays."""
        self.must_read()
        await self._stepped()

    async def _stepped(self) -> None:
        stepped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushing.append(stepped)
        self.wake()
        await stepped

    async def aclose(self) -> None:
        """Store all known costs, and stop."""
        if self._soon is not None:
            self._soon.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with suppress(Unavailable):
            for _ in range(2):  # an attempt that is not stored is reserved first, and then settled
                if self._is_unsure or any(attempt.cost is not None for attempt in self.attempts.values()):
                    await self._update()

    async def _run(self) -> None:
        try:
            while True:
                self._event.clear()
                pause_s = await self._step()
                for written in self._flushing:
                    if not written.done():
                        written.set_result(None)
                self._flushing.clear()
                if pause_s is None and not self._event.is_set():
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._event.wait()
        finally:
            self._task = None

    async def _step(self) -> float | None:
        """Write once, unless an outage was found a moment ago; return the seconds until the next step is due."""
        loop = asyncio.get_running_loop()
        if self.outage and loop.time() < self._retry_at:
            return self._retry_at - loop.time()
        try:
            await self._update()
        except Contended:
            return _CONFLICTS_S
        except Unavailable as unavailable:
            self._retry_at = loop.time() + _RETRY_S
            self.decode(self._readable)  # without what `apply` has added
            if not self.outage:
                self.outage = str(unavailable) or "unavailable"
                self.begin_outage()
            self.decide_offline()
            return _RETRY_S
        except Exception:  # a defect; if this task ended, every call would wait until its deadline
            log.exception(
                "internal error in a shared record", extra={"action": "limits.broken", "key": self.record_name}
            )
            self._known = self._readable = None
            return _RETRY_S
        return SETTLE_S if any(attempt.cost is not None for attempt in self.attempts.values()) else self.next_s()

    async def _update(self) -> None:
        def changed(value: bytes | None) -> bytes | None:
            self.abort()
            if not self.decode(value):
                self.decode(self._readable)
            return encode(self.record) if self.apply(self.now()) else None

        known = self._known
        self._known = None  # if this fails: the record may have been written
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
        """Keep the record as it was decoded: if its times were corrected again and again, they would never pass."""
        if exists:
            self._readable = encode(self.record)
        self._known = Stored(self._readable if exists else None, revision)
