"""Account of a budget in this process: requests that wait for a reservation, and requests that have one.

`Budgets` opens the accounts that a call is charged to. All replicas share an account by its record (`account_record`),
which `Account` writes as `shared_record` describes. What it tells models and the log is in `account_messages`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from openapi_tool.protocol.errors import BudgetExceeded, ToolTimeout
from openapi_tool.quotas.account_id import AccountId
from openapi_tool.quotas.account_messages import AccountMessages, BudgetUse
from openapi_tool.quotas.account_record import AccountLimit, AccountRecord, parse, unused
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.periods import Period
from openapi_tool.quotas.shared_record import SharedRecord
from openapi_tool.state.port import Records, Stored
from openapi_tool.telemetry import metrics
from openapi_tool.tools.deadlines import Deadline

log = logging.getLogger(__name__)

_NEARLY_USED_PERCENT = 90  # used, at which results get a note for the model; the log warns at `WARN_PERCENT`
_WAIT_S = 1.0  # between two reads of a record while requests wait for reservations of other replicas


@dataclass(slots=True, eq=False)
class _Request:
    """Request that waits for its reservation in one account.

    If others have reserved what it needs, it waits for them until `latest` (server time).
    """

    attempt: Attempt
    latest: float
    reserved: asyncio.Future[None]


@dataclass
class Sharing:
    """Whether the accounts of this process are shared with the other replicas; `outage` is why they are not."""

    outage: str = ""

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


class Account(SharedRecord):
    """One account for one period, and its budget `limit`. `on_write` is called after each write of the record."""

    record: AccountRecord
    restores = False  # an attempt that is no longer in the record was charged by a replica, as its time was over

    def __init__(
        self,
        account_id: AccountId,
        limit: AccountLimit,
        period: Period,
        replica: str,
        store: Records,
        clock: Callable[[], float],
        sharing: Sharing,
        on_write: Callable[[Account], None],
    ) -> None:
        super().__init__(account_id.record_name(period), replica, store, clock)
        self.id = account_id
        self.period = period
        self.limit = limit
        self.record = unused(account_id.labels())
        self._sharing = sharing
        self._on_write = on_write
        self._messages = AccountMessages(account_id, period)
        self._waiting: list[_Request] = []
        # Of the last `apply`, for `confirm`.
        self._granted: list[_Request] = []
        self._refused: list[_Request] = []
        self._wrote = False
        self._warns = False
        # Each is logged once.
        self._refusal_logged = False
        self._unreadable_logged = False

    async def reserve(self, need: Amount, deadline: Deadline, latest: float) -> Attempt:
        """Reserve an amount for an attempt; wait until `latest` (server time) for what others have reserved.

        Raises BudgetExceeded, and ToolTimeout if the account could not be checked before the deadline.
        """
        attempt = self.new_attempt(self.now(), need, deadline)
        request = _Request(attempt, latest, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.wake()
        has_reservation = False
        try:
            async with deadline.limit():
                await request.reserved
            has_reservation = True
        except TimeoutError:
            if not self.limit.covers(self.taken.plus(need)):
                raise self._error_while_held(need) from None
            raise ToolTimeout("The call's time ended before its budget could be checked; call again.") from None
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
            request.reserved.cancel()
            if not has_reservation and attempt.id in self.attempts:  # the call was cancelled as it got it
                self.settle(attempt, NOTHING)
        return attempt

    def settle(self, attempt: Attempt, cost: Amount) -> None:
        """Replace the reserved amount of an attempt by its cost; NOTHING: it was not sent."""
        if attempt.cost is None:
            attempt.cost = cost
            self.wake_soon()

    def on_change(self, stored: Stored) -> bool:
        """Adopt a record that another replica wrote."""
        adopted = super().on_change(stored)
        if adopted and self._waiting:
            self.wake()
        return adopted

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing runs, waits or must be written."""
        return not (self.attempts or self._waiting or self.outage) and self.is_idle

    # What is left.

    @property
    def taken(self) -> Amount:
        """What is used or reserved, as far as known: by the record, and by attempts here that are not in it yet."""
        taken = self.record.charged.plus(self.record.reserved)
        for attempt in self.attempts.values():
            if attempt.id not in self.record.open:
                taken = taken.plus(attempt.cost or attempt.need)
            elif attempt.cost is not None:  # the record still has what it reserved
                taken = taken.plus(attempt.cost).minus(attempt.need)
        return taken

    @property
    def use(self) -> BudgetUse:
        """What is charged and taken of the limit now."""
        return BudgetUse(self.limit, self.record.charged, self.taken)

    def left(self) -> dict[str, Any]:
        """Return what is left of each limited resource, as far as known, and when the budget renews."""
        return {**self.use.left(), **self._renewal()}

    def _renewal(self) -> dict[str, str]:
        return {"renews_at": self.period.renews} if self.period.renews else {}

    @property
    def note(self) -> str:
        """Text for the model if less than a tenth is left, else empty."""
        is_nearly_used = self.limit.reached(self.taken, _NEARLY_USED_PERCENT)
        return self._messages.nearly_used_up(self.use) if is_nearly_used else ""

    @property
    def used_fraction(self) -> float:
        """Used fraction of the resource of which the larger part is used; above 1 if more than the limit was used."""
        pairs = zip(self.taken, self.limit, strict=True)
        return max((taken / max(1, limit) for taken, limit in pairs if limit is not None), default=0.0)

    def snapshot(self) -> dict[str, Any]:
        """Return the state for `openapi-tool budgets`; `lost` are estimated uses of processes that died."""
        record = self.record
        return {
            **self.id.labels(),
            "period": self.period.name,
            **self.left(),
            "requests_used": record.used.requests,
            "tokens_used": record.used.tokens,
            "requests_lost": record.lost.requests,
            "tokens_lost": record.lost.tokens,
            "share": round(self.used_fraction, 4),
            "offline": bool(self.outage),
            "at": datetime.fromtimestamp(self.now(), UTC).isoformat(timespec="seconds"),
        }

    # The record (`SharedRecord`).

    def decode(self, value: bytes | None) -> bool:
        """Use a stored record of the account."""
        record = parse(value)
        self.record = record or unused(self.id.labels())
        if record is None and value is not None and not self._unreadable_logged:
            self._unreadable_logged = True
            self._messages.log_unreadable(self.record_name, is_remembered=self.remembers)
        return record is not None

    def apply(self, now: float) -> bool:
        """Charge what has expired or ended, and reserve for the requests that wait."""
        changed = self.record.expire(now)
        changed |= self.store_attempts(now)
        changed |= self._reserve(now)
        self._wrote = changed
        if changed:
            self.record.report(self.replica, now)
            self._warns = self.record.warns(self.limit)
        return changed

    def reserve_attempt(self, attempt: Attempt) -> None:
        """Reserve what the attempt is expected to cost."""
        self.record.reserve(attempt)

    def settle_attempt(self, name: str, cost: Amount) -> None:
        """Charge the attempt's cost instead of what it reserved."""
        self.record.settle(name, cost)

    def settle_missing(self, attempt: Attempt) -> bool:
        """Charge the attempt's cost; without one, what it was to reserve.

        If the attempt was stored, a replica has charged what it reserved (`AccountRecord.expire`). Then only the tokens
        beyond that are charged.
        """
        cost = attempt.need if attempt.cost is None else attempt.cost
        if attempt.stored:
            cost = Amount(0, max(0, cost.tokens - attempt.need.tokens))
        self.record.add(cost)
        return cost != NOTHING

    def confirm(self) -> None:
        """Tell the requests that they have their reservation, or get none."""
        self._sharing.end_outage()
        for request in self._granted:
            request.attempt.stored = True
            self._grant(request)
        for request in self._refused:
            self._refuse(request, self._error_of(request.attempt.need))
        self._granted = []
        self._refused = []
        if self._wrote:
            self._on_write(self)
        if self._warns:
            self._warns = False
            metrics.BUDGET_WARNINGS.labels(self.id.scope).inc()
            self._messages.log_low(self.use, self._renewal())

    def abort(self) -> None:
        """Let the requests wait on: none of them has an answer."""
        self._granted = []
        self._refused = []
        self._warns = False

    def next_s(self) -> float | None:
        """Return when to read the record again while requests wait: others may have ended."""
        if not self._waiting:
            return None
        self.must_read()
        next_latest = min(request.latest for request in self._waiting)
        return max(0.0, min(_WAIT_S, next_latest - self.now()))

    def _reserve(self, now: float) -> bool:
        """Reserve for waiting requests in their order; return whether the record changed.

        A request that the rest does not cover waits for others to end, as they may cost less than they have reserved.
        It is refused if that cannot suffice, or at its latest time.
        """
        record = self.record
        charged = record.charged
        taken = charged.plus(record.reserved)
        for request in self._waiting:
            need = request.attempt.need
            if request.reserved.done():
                continue
            if self.limit.covers(taken.plus(need)) and record.room:
                record.reserve(request.attempt)
                taken = taken.plus(need)
                self._granted.append(request)
            elif now >= request.latest or not self.limit.covers(charged.plus(need)):
                self._refused.append(request)
        return bool(self._granted)

    def _grant(self, request: _Request) -> None:
        """Tell a request that it has its reservation."""
        self.attempts[request.attempt.id] = request.attempt
        if request in self._waiting:
            self._waiting.remove(request)
        if request.reserved.done():  # the call was cancelled meanwhile
            self.settle(request.attempt, NOTHING)
        else:
            request.reserved.set_result(None)

    def _refuse(self, request: _Request, error: BudgetExceeded) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        if not request.reserved.done():
            request.reserved.set_exception(error)

    # Without the store (`SharedRecord`).

    def begin_outage(self) -> None:
        """Tell that accounts are not shared now."""
        self._sharing.begin_outage(self.outage)

    def decide_offline(self) -> None:
        """Grant or refuse each waiting request: this replica uses an equal part of what the last record leaves."""
        record = self.record
        taken = record.charged.plus(record.reserved)
        parts = len({self.replica, *record.replicas})
        own = self._used_here()
        for request in list(self._waiting):
            own_with_request = own.plus(request.attempt.need)
            of_all_parts = Amount(own_with_request.requests * parts, own_with_request.tokens * parts)
            if self.limit.covers(taken.plus(of_all_parts)):
                own = own_with_request
                self._grant(request)
            else:
                self._refuse(request, self._error_when_used_up(request.attempt.need))

    def _used_here(self) -> Amount:
        """Return what this replica uses that the last known record does not contain."""
        used = NOTHING
        for attempt in self.attempts.values():
            if attempt.id not in self.record.open:
                used = used.plus(attempt.cost or attempt.need)
        return used

    # Errors of requests that get no reservation.

    def _error_of(self, need: Amount) -> BudgetExceeded:
        """Return the error of a request, by whether the budget would cover it if nothing was reserved."""
        would_be_covered = self.limit.covers(self.record.charged.plus(need))
        return self._error_while_held(need) if would_be_covered else self._error_when_used_up(need)

    def _error_while_held(self, need: Amount) -> BudgetExceeded:
        """Count a refusal; return the error of a request for which too little is left until others have ended."""
        metrics.BUDGET_REFUSALS.labels(self.id.scope).inc()
        held_s = self.record.held_until(self.limit, need) - self.now()
        return self._messages.held(self.use, need, retry_after_s=max(1, math.ceil(held_s)))

    def _error_when_used_up(self, need: Amount) -> BudgetExceeded:
        """Count a refusal, and log the first one; return the error of a request that the rest does not cover."""
        metrics.BUDGET_REFUSALS.labels(self.id.scope).inc()
        if not self._refusal_logged:
            self._refusal_logged = True
            self._messages.log_used_up(self.use, need)
        return self._messages.used_up(self.use, need)
