"""Account of a budget in this process: requests that wait for a reservation, and requests that have one.

`Budgets` opens the accounts that a call is charged to. All replicas share an account by its record (`account_record`),
which `Account` writes as `shared_record` describes. The texts for models and logs are at the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from openapi_tool.protocol.errors import BudgetExceeded, ToolTimeout
from openapi_tool.quotas.account_record import WARN_PERCENT, AccountLimit, AccountRecord, parse, reaches, unused
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.periods import Period
from openapi_tool.quotas.shared_record import SharedRecord
from openapi_tool.state.port import Records, Stored
from openapi_tool.telemetry import metrics
from openapi_tool.tools.deadlines import Deadline

log = logging.getLogger(__name__)

_OWNER_TEXT = {  # by scope
    "session": "of this session",
    "agent_day": "of this agent for today",
    "project_day": "of this project for today",
    "project_month": "of this project for this month",
}
_NEARLY_USED_PERCENT = 90  # used, at which results get a note for the model; the log warns at WARN_PERCENT
_WAIT_S = 1.0  # between two reads of a record while requests wait for reservations of other replicas


class AccountId(NamedTuple):
    """What an account is for.

    `scope` is one of `SCOPES` in `options/budgets.py`. `owner` is an agent or a session, empty for a project. `tool` is
    the tool whose definition sets the budget, empty for a budget of the settings. `project` is named as in the records
    (`quota_project`).
    """

    scope: str
    project: str
    owner: str = ""
    tool: str = ""

    def labels(self) -> dict[str, str]:
        """Return the fields for display."""
        owner = f"{self.owner[:12]}…" if self.scope == "session" else self.owner
        return {"scope": self.scope, "project": self.project, "who": owner, "tool": self.tool}

    def record_name(self, period: Period) -> str:
        """Return the name of the record: a hash, because ids may contain any characters."""
        name = json.dumps((*self, period.name)).encode()
        return f"budget.{hashlib.blake2b(name, digest_size=20).hexdigest()}"


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
                raise self._held(need) from None
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

    def left(self) -> dict[str, Any]:
        """Return what is left of each limited resource, as far as known, and when the budget renews."""
        found: dict[str, Any] = {}
        for kind, limit, taken in zip(AccountLimit._fields, self.limit, self.taken, strict=True):
            if limit is not None:
                found[kind] = limit
                found[f"{kind}_left"] = max(0, limit - taken)
        if self.period.renews:
            found["renews_at"] = self.period.renews
        return found

    @property
    def note(self) -> str:
        """Text for the model if less than a tenth is left, else empty."""
        if not self.limit.reached(self.taken, _NEARLY_USED_PERCENT):
            return ""
        left = self.left()
        limited = [kind for kind in AccountLimit._fields if kind in left]
        rests = " and ".join(f"{left[f'{kind}_left']:,} of {left[kind]:,} {kind}" for kind in limited)
        renews = f"; it renews at {self.period.renews}" if self.period.renews else ""
        return f"[The budget {self._owner_text} is nearly used up: {rests} are left{renews}.]"

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
            self._log_unreadable()
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
            self._warn()

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
                self._refuse(request, self._used_up(request.attempt.need))

    def _used_here(self) -> Amount:
        """Return what this replica uses that the last known record does not contain."""
        used = NOTHING
        for attempt in self.attempts.values():
            if attempt.id not in self.record.open:
                used = used.plus(attempt.cost or attempt.need)
        return used

    # Errors and log lines.

    def _error_of(self, need: Amount) -> BudgetExceeded:
        """Return the error of a request that gets no reservation."""
        would_be_covered = self.limit.covers(self.record.charged.plus(need))  # if nothing was reserved
        return self._held(need) if would_be_covered else self._used_up(need)

    def _lacking(self, need: Amount) -> str:
        """Return the resource of which too little is left; if that is so of both, `requests`."""
        limit = self.limit
        taken = self.taken
        exceeds_requests = limit.requests is not None and taken.requests + need.requests > limit.requests
        return "requests" if exceeds_requests or limit.tokens is None else "tokens"

    def _held(self, need: Amount) -> BudgetExceeded:
        """Count a refusal; return the error of a request for which too little is left until others have ended."""
        metrics.BUDGET_REFUSALS.labels(self.id.scope).inc()
        kind = self._lacking(need)
        maximum = getattr(self.limit, kind)
        used = getattr(self.record.charged, kind)
        reserved = getattr(self.taken, kind) - used
        needed = getattr(need, kind)
        seconds = max(1, math.ceil(self.record.held_until(self.limit, need) - self.now()))
        return BudgetExceeded(
            f"The budget {self._owner_text} is held by requests that have not ended, so nothing was sent: {used:,} of "
            f"{maximum:,} {kind} are used, {reserved:,} are reserved for them, and this call needs {needed:,}. "
            f"Call again in {seconds} s: what has not ended by then counts as used.",
            detail={
                "budget": f"{self.id.scope}_{kind}",
                "limit": maximum,
                "used": used,
                "reserved": reserved,
                "needed": needed,
                "retry_after_s": seconds,
            },
            retryable=True,
            retry_after=float(seconds),
        )

    def _used_up(self, need: Amount) -> BudgetExceeded:
        """Count a refusal; return the error of a request that what is left of the budget does not cover."""
        metrics.BUDGET_REFUSALS.labels(self.id.scope).inc()
        kind = self._lacking(need)
        maximum = getattr(self.limit, kind)
        used = getattr(self.taken, kind)
        needed = getattr(need, kind)
        renews = f"It renews at {self.period.renews}." if self.period.renews else "It does not renew."
        until = "before that" if self.period.renews else "in this session"
        detail = {
            "budget": f"{self.id.scope}_{kind}",
            "limit": maximum,
            "used": used,
            "needed": needed,
            "renews_at": self.period.renews or None,
        }
        self._log_used_up(detail)
        return BudgetExceeded(
            f"The budget {self._owner_text} does not cover this call, so nothing was sent: {used:,} of {maximum:,} "
            f"{kind} are used or reserved, and it needs {needed:,}. {renews} Do not call again {until}; "
            "continue with what you have.",
            detail=detail,
        )

    def _log_used_up(self, detail: dict[str, Any]) -> None:
        if self._refusal_logged:
            return
        self._refusal_logged = True
        log.warning(
            "the budget %s%s of project %s is used up", detail["budget"], self._tool_text, self.id.project,
            extra={"action": "budget.exceeded", **self._log_fields(), **detail},
        )  # fmt: skip

    @property
    def _owner_text(self) -> str:
        return _OWNER_TEXT[self.id.scope] + (" with this tool" if self.id.tool else "")

    @property
    def _tool_text(self) -> str:
        return f" for the tool {self.id.tool}" if self.id.tool else ""

    def _log_unreadable(self) -> None:
        fields = {**self._log_fields(), "key": self.record_name}
        if self.remembers:
            log.warning(
                "the record of a budget of project %s cannot be read; its last known state is used",
                self.id.project,
                extra={"action": "budget.unreadable", **fields},
            )
        else:
            log.error(
                "the record of a budget of project %s cannot be read: it is damaged or of a later version; this "
                "replica remembers none of its uses, so its count begins anew at zero",
                self.id.project,
                extra={"action": "budget.unreadable", **fields},
            )

    def _warn(self) -> None:
        """Log that little is left; the record says that this was not logged before (`AccountRecord.warns`)."""
        metrics.BUDGET_WARNINGS.labels(self.id.scope).inc()
        charged = self.record.charged
        low = [
            kind
            for kind in AccountLimit._fields
            if reaches(getattr(self.limit, kind), getattr(charged, kind), WARN_PERCENT)
        ]
        budget = " and ".join(f"{self.id.scope}_{kind}" for kind in low)
        log.warning(
            "80 %% of the budget %s%s of project %s are used",  # WARN_PERCENT; docs/operations.md shows this text
            budget,
            self._tool_text,
            self.id.project,
            extra={"action": "budget.low", **self._log_fields(), **self.left(), "budget": budget},
        )

    def _log_fields(self) -> dict[str, str]:
        scope, project, owner, tool = self.id
        agent = {"agent_id": owner} if scope == "agent_day" else {}
        return {"scope": scope, "project_id": project, **agent, "tool_name": tool}
