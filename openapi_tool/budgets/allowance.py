"""One replica's part of an account: its block, what it has reserved and used, and what to do without the store.

Pure, as `ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from openapi_tool.budgets import ledger
from openapi_tool.budgets.ledger import NO_JOURNALS, NOTHING, Amount, Grant, Limit, Record, Report

_AHEAD_S = 5.0
"""Seconds of demand for which a block is taken."""

_LOW = 0.25
_LEAST_S = 0.25
"""Least seconds between blocks that are taken ahead of need."""

_FIRST = 4
"""Size of the first block, in requests like the one that needs it."""

REPORT_S, IDLE_S, RENEW_S = 5.0, 20.0, 20.0
"""Seconds until uses are reported, until an unused block goes back, and between reports that renew a share."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A change of the record that is being written; it reports all uses up to `total`."""

    record: Record
    grant: Grant
    needs: tuple[Amount, ...]
    total: Amount
    block: Amount
    at: float


class Allowance:
    """Part of the replica `name` of one account. Amounts given are without the resources that have no limit."""

    def __init__(self, name: str, limit: Limit) -> None:
        self.name = name
        self.limit = limit
        self.idle = self.reserved = self.total = self._reported = NOTHING
        self._adopt(Record(), 0)
        self.alone = False
        self._is_changed = False
        self._is_known = False
        self.used_at = 0.0
        self._until = 0.0
        self._demand = 0.0
        self._each = self._low = NOTHING
        self._reported_at = 0.0
        self._spent_at = 0.0

    def take(self, need: Amount, now: float) -> bool:
        """Reserve an amount from the block; return False if that is too small or not ours any more."""
        if now >= self._until or not self.idle.covers(need):
            return False
        self.idle, self.reserved = self.idle.minus(need), self.reserved.plus(need)
        self.note_demand(need, now)
        return True

    def note_demand(self, need: Amount, now: float) -> None:
        """Count a request for the size of the next block."""
        elapsed = max(0.0, now - self.used_at)
        self._demand = self._demand * math.exp(-elapsed / _AHEAD_S) + 1
        self._each = need
        self.used_at = now

    def settle(self, need: Amount, actual: Amount, now: float) -> None:
        """Replace a reserved amount by what was used; the difference is at hand again."""
        self.reserved = self.reserved.minus(need)
        if (limited := self.limit.of(actual)) != need:
            self.idle = self.idle.plus(need).minus(limited)
        if actual != NOTHING:
            if self.total == self._reported:
                self._spent_at = now
            self.total = self.total.plus(actual)

    @property
    def spent(self) -> Amount:
        """Used and not reported yet."""
        return self.total.minus(self._reported)

    def is_low(self, now: float) -> bool:
        """Return whether the next block should be taken, because a fourth of the last one is left."""
        return not self.idle.covers(self._low) and now - self._reported_at >= _LEAST_S

    def is_due(self, now: float) -> bool:
        """Return whether something must be reported."""
        if self._is_changed or (self.total != self._reported and now - self._spent_at >= REPORT_S):
            return True
        if self.is_quiet:
            return False
        return now - self._reported_at >= RENEW_S or self._is_unused(now) or self.returns(now)

    def returns(self, now: float) -> bool:
        """Return whether others wait for the block, or for the news that it is used."""
        if now >= self._short_until:
            return False
        own = self.record.shares.get(self.name)
        return own is not None and own.idle != NOTHING

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing is held and all is reported."""
        held = self._is_changed or (self.reserved, self.idle.positive()) != (NOTHING, NOTHING)
        return not held and self.total == self._reported

    def _is_unused(self, now: float) -> bool:
        return self.idle.positive() != NOTHING and now - self.used_at >= IDLE_S

    def _ahead(self, now: float) -> Amount:
        if now - self.used_at >= IDLE_S:
            return NOTHING
        demand = self._demand * math.exp(-max(0.0, now - self.used_at) / _AHEAD_S)
        return self._each.times(max(_FIRST, demand))

    def plan(
        self,
        stored: bytes | None,
        needs: tuple[Amount, ...],
        now: float,
        *,
        journals: Mapping[str, Amount] = NO_JOURNALS,
        leave: bool = False,
    ) -> Planned:
        """Enter this replica's report into a stored record; with `leave` it keeps no block.

        `journals` are the totals of dead replicas.
        A block that shrinks does so at once: while the record is written, nobody may take what others get by it.
        """
        record = ledger.decode(stored)
        if now >= self._until:
            self.idle = NOTHING
        told = Report(self.total, self.spent, self.reserved, needs, NOTHING if leave else self._ahead(now))
        grant = ledger.report(record, self.name, told, self.limit, now, journals)
        self.idle = self.idle.least(grant.idle)
        self._is_changed = True  # until it is written: the record may count a block that is not used any more
        block = grant.idle.minus(self.idle)
        return Planned(record, grant, needs, told.total, block, now)

    def drop_if_empty(self, planned: Planned) -> bool:
        """Drop a change that enters nothing but a refusal, and return whether it did.

        Without a record nobody else holds anything, and refusals of any number of sessions must not fill the store.
        """
        share = planned.record.shares[self.name]
        is_empty = planned.record.used == share.reserved == share.idle == NOTHING and not any(planned.grant.granted)
        self._is_changed = not is_empty
        return is_empty

    def confirm(self, planned: Planned, revision: int) -> None:
        """Adopt a written change: the granted needs are reserved, the block is at hand."""
        for need, granted in zip(planned.needs, planned.grant.granted, strict=True):
            if granted:
                self.reserved = self.reserved.plus(need)
        self.idle = self.idle.plus(planned.block)
        self._low = planned.grant.idle.times(_LOW)
        self._reported = planned.total
        self._spent_at = self._reported_at = planned.at
        self._until = planned.at + ledger.LEASE_S
        self.alone = self._is_changed = False
        self._adopt(planned.record, revision)

    def see(self, record: Record, revision: int) -> None:
        """Adopt a record that was read, or that another replica wrote.

        It may hold a report of this replica whose outcome was unknown. What that granted goes back with the next one.
        The first one may hold reports from before this replica forgot the account; its total goes on from there.
        """
        own = record.shares.get(self.name)
        if own is not None:
            self.total = self.total if self._is_known else self.total.plus(own.total)
            self._reported = own.total
        self._is_known = True
        self._adopt(record, revision)

    def _adopt(self, record: Record, revision: int) -> None:
        self.record, self.revision = record, revision
        self._short_until, self._elsewhere = 0.0, record.used.minus(self._reported)
        for name, share in record.shares.items():
            if name != self.name:
                self._short_until = max(self._short_until, share.short_until)
                self._elsewhere = self._elsewhere.plus(share.reserved)

    def go_alone(self, now: float) -> None:
        """Go on without the store: the block grows by this replica's part of what was left when it was last read."""
        if self.alone:
            return
        record = self.record
        remaining = self.limit.of(self.limit.remaining(record.used.plus(record.held(now)))).positive()
        part = remaining.times(1 / (1 + record.replicas(now, but=self.name)))
        if now < self._until:
            self.idle = self.idle.plus(part)
        else:  # the record does not count what this replica holds
            self.idle = part.minus(self.reserved).minus(self.limit.of(self.spent))
        self.alone, self._until, self._low = True, math.inf, NOTHING

    @property
    def taken(self) -> Amount:
        """Used and reserved by all replicas, as far as this one knows; blocks that nobody uses are not counted."""
        return self._elsewhere.plus_both(self.total, self.reserved)
