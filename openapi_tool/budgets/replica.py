"""One replica's part of the budgets: its share of each account (no I/O), and its journal of unreported uses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import orjson
from pydantic import TypeAdapter

from openapi_tool.budgets import ledger
from openapi_tool.budgets.ledger import NOTHING, AccountGrant, AccountLimit, AccountRecord, AccountReport, Amount
from openapi_tool.concurrency.background import in_background
from openapi_tool.limits.permits import Store
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_AHEAD_S = 5.0  # seconds of demand that a block covers
_FIRST_BLOCK = 4  # size of the first block in requests
_LOW_SHARE = 0.25  # fraction of the last block, below which the next one is taken
_MIN_INTERVAL_S = 0.25  # between blocks that are taken in advance
_REPORT_S = 5.0  # maximum between a use and its report
_IDLE_S = 20.0  # without a request, after which a block is given back
RENEW_S = 20.0  # between reports while something is held; a third of LEASE_S


@dataclass(frozen=True, slots=True)
class AccountUpdate:
    """Record to be written, with all uses up to `total`; then `growth` is added to the block."""

    record: AccountRecord
    grant: AccountGrant
    needs: tuple[Amount, ...]
    total: Amount
    growth: Amount
    at: float


class AccountAllowance:
    """Part of an account that replica `name` holds. Amounts passed in are 0 for resources without a limit.

    `idle` is the unused part of its block, `reserved` the estimates of running requests, `total` its uses since the
    start. `offline`: it works without the store.
    """

    def __init__(self, name: str, limit: AccountLimit) -> None:
        self.name = name
        self.limit = limit
        self.idle = self.reserved = self.total = self._reported = NOTHING
        self._set_record(ledger.unused())
        self.offline = False
        self._has_unwritten_change = False
        self._has_read_record = False
        self.used_at = 0.0
        self._lease_ends_at = 0.0
        self._demand = 0.0
        self._last_need = self._low_mark = NOTHING
        self._reported_at = 0.0
        self._unreported_since = 0.0

    def take(self, need: Amount, now: float) -> bool:
        """Reserve an amount from the block; return False if it is too small or has expired."""
        if now >= self._lease_ends_at or not self.idle.covers(need):
            return False
        self.idle, self.reserved = self.idle.minus(need), self.reserved.plus(need)
        self.record_demand(need, now)
        return True

    def record_demand(self, need: Amount, now: float) -> None:
        """Count a request for the size of the next block."""
        elapsed = max(0.0, now - self.used_at)
        self._demand = self._demand * math.exp(-elapsed / _AHEAD_S) + 1
        self._last_need = need
        self.used_at = now

    def settle(self, need: Amount, actual: Amount, now: float) -> None:
        """Replace a reserved amount by the actual one."""
        self.reserved = self.reserved.minus(need)
        if (limited := self.limit.limited_part(actual)) != need:
            self.idle = self.idle.plus(need).minus(limited)
        if actual != NOTHING:
            if self.total == self._reported:
                self._unreported_since = now
            self.total = self.total.plus(actual)

    @property
    def spent(self) -> Amount:
        """Unreported uses."""
        return self.total.minus(self._reported)

    def is_low(self, now: float) -> bool:
        """Return whether to take the next block."""
        return not self.idle.covers(self._low_mark) and now - self._reported_at >= _MIN_INTERVAL_S

    def is_due(self, now: float) -> bool:
        """Return whether something must be reported."""
        if self._has_unwritten_change or (self.total != self._reported and now - self._unreported_since >= _REPORT_S):
            return True
        if self.is_quiet:
            return False
        is_unused = self.idle.positive() != NOTHING and now - self.used_at >= _IDLE_S
        return is_unused or now - self._reported_at >= RENEW_S or self.should_return_block(now)

    def should_return_block(self, now: float) -> bool:
        """Return whether another replica waits for this block, or for the report of its use."""
        if now >= self._short_until:
            return False
        own = self.record.shares.get(self.name)
        return own is not None and own.idle != NOTHING

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing is held or unreported."""
        held = self._has_unwritten_change or (self.reserved, self.idle.positive()) != (NOTHING, NOTHING)
        return not held and self.total == self._reported

    def _ahead(self, now: float) -> Amount:
        if now - self.used_at >= _IDLE_S:
            return NOTHING
        demand = self._demand * math.exp(-max(0.0, now - self.used_at) / _AHEAD_S)
        return self._last_need.times(max(_FIRST_BLOCK, demand))

    def plan(
        self,
        stored: bytes | None,
        needs: tuple[Amount, ...],
        now: float,
        journals: Mapping[str, Amount],
        *,
        leave: bool = False,
    ) -> AccountUpdate:
        """Apply this replica's report to a stored record; with `leave` it keeps no block.

        `journals` are the totals of dead replicas. A smaller block takes effect before the write, which lets other
        replicas use the difference.
        """
        record = ledger.decode(stored)
        if now >= self._lease_ends_at:
            self.idle = NOTHING
        report = AccountReport(self.total, self.spent, self.reserved, needs, NOTHING if leave else self._ahead(now))
        grant = ledger.apply_report(record, self.name, report, self.limit, now, journals)
        self.idle = self.idle.minimum(grant.idle)
        self._has_unwritten_change = True  # the stored record may count more than the smaller block
        growth = grant.idle.minus(self.idle)
        return AccountUpdate(record, grant, needs, report.total, growth, now)

    def drop_if_refused(self, planned: AccountUpdate) -> bool:
        """Drop a new record that contains only a refusal; return whether it does."""
        share = planned.record.shares[self.name]
        is_empty = planned.record.used == share.reserved == share.idle == NOTHING and not any(planned.grant.granted)
        self._has_unwritten_change = not is_empty
        return is_empty

    def confirm(self, planned: AccountUpdate) -> None:
        """Adopt a written change."""
        for need, granted in zip(planned.needs, planned.grant.granted, strict=True):
            if granted:
                self.reserved = self.reserved.plus(need)
        self.idle = self.idle.plus(planned.growth)
        self._low_mark = planned.grant.idle.times(_LOW_SHARE)
        self._reported = planned.total
        self._unreported_since = self._reported_at = planned.at
        self._lease_ends_at = planned.at + ledger.LEASE_S
        self.offline = self._has_unwritten_change = False
        self._set_record(planned.record)

    def adopt(self, record: AccountRecord) -> None:
        """Adopt a record that was read, or that another replica wrote.

        It may contain a report of this replica whose write had an unknown outcome; the next one gives back what that
        one was granted. The first record may contain reports from before this replica dropped the account; `total`
        continues from them.
        """
        own = record.shares.get(self.name)
        if own is not None:
            self.total = self.total if self._has_read_record else self.total.plus(own.total)
            self._reported = own.total
        self._has_read_record = True
        self._set_record(record)

    def _set_record(self, record: AccountRecord) -> None:
        self.record = record
        self._short_until = 0.0  # until then requests of others wait for blocks
        self._used_elsewhere = record.used.minus(self._reported)
        for name, share in record.shares.items():
            if name != self.name:
                self._short_until = max(self._short_until, share.short_until)
                self._used_elsewhere = self._used_elsewhere.plus(share.reserved)

    def remaining(self, now: float) -> Amount:
        """Return what the replicas leave of the budget, by the last known record."""
        return self.limit.remaining(self.record.used.plus(self.record.held(now)))

    def go_offline(self, now: float) -> None:
        """Continue without the store: add this replica's share of what was left at the last read."""
        if self.offline:
            return
        remaining = self.limit.limited_part(self.remaining(now)).positive()
        share = remaining.times(1 / (1 + len(self.record.live(now, excluding=self.name))))
        if now < self._lease_ends_at:
            self.idle = self.idle.plus(share)
        else:  # the record does not count what this replica holds
            self.idle = share.minus(self.reserved).minus(self.limit.limited_part(self.spent))
        self.offline, self._lease_ends_at, self._low_mark = True, math.inf, NOTHING

    @property
    def taken(self) -> Amount:
        """Known uses and reservations of all replicas, without idle blocks."""
        return self._used_elsewhere.plus_both(self.total, self.reserved)


_WRITE_INTERVAL_S = 0.05  # minimum between writes of the journal
_MAX_ACCOUNTS = 3_000  # the last used ones; a record may have 256 KiB
_AMOUNT = TypeAdapter(Amount)


class AccountStore(Store, Protocol):
    """Store of accounts and journals; every method raises Unavailable."""

    async def put(self, name: str, value: bytes) -> None:
        """Send a record that only this replica writes, as `RecordStore.put`: no message to others, no confirmation."""


class BudgetReplica:
    """Name, store and journal of this process; `now` returns the server's time in seconds since the epoch.

    `outage` is why the store is unavailable, empty while it is available.
    """

    def __init__(self, name: str, store: AccountStore, now: Callable[[], float]) -> None:
        self.name, self.store, self.now, self.outage = name, store, now, ""
        self.journal = Journal(self)

    def begin_outage(self, reason: str) -> None:
        """Record that the store is unavailable."""
        if not self.outage:
            log.warning(
                "cannot share budgets; calls are checked against the last known use: %s",
                reason,
                extra={"action": "budgets.not_shared"},
            )
        self.outage = reason
        metrics.BUDGETS_NOT_SHARED.set(1)

    def end_outage(self) -> None:
        """Record that the store is available."""
        if self.outage:
            log.info("budgets are shared again", extra={"action": "budgets.shared"})
        self.outage = ""
        metrics.BUDGETS_NOT_SHARED.set(0)


class Journal:
    """Write-ahead journal (ADR 10): one record with the totals of the accounts that have unreported uses.

    A call commits its result after its uses were sent to the store, so a killed process loses only the uses of calls
    that it was running.
    """

    def __init__(self, replica: BudgetReplica) -> None:
        self._replica, self._key = replica, record_key("journal", replica.name)
        self._unreported: dict[str, AccountAllowance] = {}
        self._next: asyncio.Task[None] | None = None  # write that has not begun
        self._current: asyncio.Task[None] | None = None  # last write that has begun
        self._next_at = 0.0
        self._is_empty = True

    def record(self, account: str, allowance: AccountAllowance) -> None:
        """Schedule a write of an account's total, except during an outage: the account's next report contains it."""
        self._unreported.pop(account, None)  # move to the end: the last ones are written
        self._unreported[account] = allowance
        if self._next is None and not self._replica.outage:
            self._next = in_background(self._write_after(self._current), "budget_journal")

    async def wait_until_written(self) -> None:
        """Wait until everything recorded is written, or the write has failed."""
        if (write := self._next or self._current) is not None:
            await asyncio.wait([write])

    async def read(self, replica: str, account: str) -> Amount:
        """Return the uses of an account that a replica wrote since its start. Raises Unavailable."""
        _, value = await self._replica.store.read(record_key("journal", replica))
        try:
            return _AMOUNT.validate_python(orjson.loads(value or b"{}").get(account, NOTHING))
        except (ValueError, AttributeError):
            return NOTHING

    async def aclose(self) -> None:
        """Stop; write the unreported uses, without any an empty record. To be called after all reports."""
        for write in filter(None, (self._next, self._current)):
            write.cancel()
            await asyncio.wait([write])
        self._next = self._current = None
        self._drop_reported()
        if not self._is_empty:
            await self._write()

    async def _write_after(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._next_at - loop.time()))
        self._next_at = loop.time() + _WRITE_INTERVAL_S
        self._current, self._next = self._next, None
        self._drop_reported()
        if self._unreported:
            await self._write()

    def _drop_reported(self) -> None:
        self._unreported = {name: each for name, each in self._unreported.items() if each.spent != NOTHING}

    async def _write(self) -> None:
        last = list(self._unreported.items())[-_MAX_ACCOUNTS:]
        self._is_empty = not last
        totals = orjson.dumps({name: allowance.total for name, allowance in last}, default=list)
        try:
            await self._replica.store.put(self._key, totals)
        except Unavailable as outage:
            self._replica.begin_outage(str(outage))


def record_key(*parts: str) -> str:
    """Return a KV key: a hash, because ids may contain any characters."""
    return f"budget.{hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()}"
