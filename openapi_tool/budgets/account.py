"""Account of a budget in one replica.

Requests reserve from the replica's block, a part of the budget taken in advance, or else in the shared record.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from openapi_tool.budgets import ledger
from openapi_tool.budgets.ledger import NOTHING, RETURN_S, AccountLimit, Amount, Period
from openapi_tool.budgets.replica import AccountAllowance, AccountUpdate, BudgetReplica, record_key
from openapi_tool.concurrency.background import in_background
from openapi_tool.protocol.errors import BudgetExceeded, ToolTimeout, Unavailable
from openapi_tool.telemetry import metrics
from openapi_tool.tools.deadlines import Deadline

log = logging.getLogger(__name__)

_OWNER_TEXT = {
    "session": "of this session",
    "agent_day": "of this agent for today",
    "project_day": "of this project for today",
    "project_month": "of this project for this month",
}
SCOPES = tuple(_OWNER_TEXT)  # narrowest first
_MAX_WRITE_ATTEMPTS = 16  # of a compare-and-set
_RETRY_S = 0.25  # after conflicts, or while other replicas may return blocks
_NEARLY_USED_PERCENT = 90  # at which results get a note for the model; the log warns at 80


class AccountId(NamedTuple):
    """Scope and owner of an account: `owner` is an agent or session, empty for a project.

    `tool` is the tool whose definition sets the budget, else empty. `project` is prefixed with the protocol version and
    a space for any kernel but the main one.
    """

    scope: str
    project: str
    owner: str = ""
    tool: str = ""

    def labels(self) -> dict[str, str]:
        """Return the fields for display."""
        owner = f"{self.owner[:12]}…" if self.scope == "session" else self.owner
        return {"scope": self.scope, "project": self.project, "who": owner, "tool": self.tool}


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """Waiting request; `uncovered_since`: when the budget was first found not to cover it, else infinite."""

    need: Amount
    future: asyncio.Future[None]
    uncovered_since: float = math.inf


class Account:
    """Account; `name` is its KV key. `on_write` is called after each write of the record."""

    def __init__(
        self,
        account_id: AccountId,
        limit: AccountLimit,
        period: Period,
        replica: BudgetReplica,
        on_write: Callable[[Account], None],
    ) -> None:
        self.name = record_key(*account_id, period.name)
        self.id, self.period = account_id, period
        self.allowance = AccountAllowance(replica.name, limit)
        self._replica, self._on_write = replica, on_write
        self._now = replica.now
        self._waiting: list[_WaitingRequest] = []
        self._stored: tuple[int, bytes | None] = 0, None  # revision and value
        self._must_read = True
        self._rerun_requested = False
        self._task: asyncio.Task[None] | None = None
        self._refusal_logged = self._unreadable_logged = False

    def take(self, need: Amount, now: float) -> bool:
        """Reserve an amount from the block of this replica; return False if it is too small.

        Here and below, `need` is 0 for a resource that had no limit at the time of the reservation.
        """
        allowance = self.allowance
        if self._waiting or not allowance.take(need, now):
            return False
        if allowance.is_low(now) and not self._replica.outage:
            self.report_soon()
        return True

    async def reserve(self, need: Amount, now: float, deadline: Deadline) -> None:
        """Reserve an amount in the shared record. Raises BudgetExceeded, ToolTimeout."""
        waiter = _WaitingRequest(need, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self.allowance.record_demand(need, now)
        self.report_soon()
        reserved = False
        try:
            async with deadline.limit():
                await waiter.future
            reserved = True
        except TimeoutError:
            raise ToolTimeout("The call's time ended before its budget could be checked; call again.") from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            granted = waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None
            if granted and not reserved:  # the call was cancelled meanwhile
                self.allowance.settle(need, NOTHING, self._now())

    def settle(self, need: Amount, actual: Amount) -> None:
        """Replace a reserved amount by the actual one; NOTHING: not sent."""
        now = self._now()
        self.allowance.settle(need, actual, now)
        if actual != NOTHING:
            self._replica.journal.record(self.name, self.allowance)
        if self.allowance.should_return_block(now):
            self.report_soon()

    def report_soon(self) -> None:
        """Report in the background."""
        self._rerun_requested = True
        if self._task is None:
            self._task = in_background(self._run(), "budget")

    def on_change(self, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        if revision > self._stored[0]:
            self._adopt(revision, value)
            now = self._now()
            if self._covers_a_waiting_request(now) or self.allowance.should_return_block(now):
                self.report_soon()

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing is held, waits or is unreported."""
        allowance = self.allowance
        return allowance.is_quiet and not allowance.offline and not self._waiting and self._task is None

    async def aclose(self) -> None:
        """Report; give the block back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self.allowance.is_quiet:
            with suppress(Unavailable):
                await self.report(leave=True)

    async def _run(self) -> None:
        try:
            while self._rerun_requested:
                self._rerun_requested = False
                if self._replica.outage:
                    self._decide_offline()
                    return
                try:
                    await self.report()
                except Unavailable as outage:
                    self._replica.begin_outage(str(outage))
                    self._decide_offline()
        finally:
            self._task = None

    async def report(self, *, leave: bool = False) -> None:
        """Report uses and reserve for waiting requests; with `leave` keep no block. Raises Unavailable."""
        for _ in range(_MAX_WRITE_ATTEMPTS):
            if self._must_read:
                self._adopt(*await self._replica.store.read(self.name))
                self._must_read = False
            journals = await self._journals_of_dead()
            revision, stored = self._stored
            waiting = list(self._waiting)
            needs = tuple(waiter.need for waiter in waiting)
            planned = self.allowance.plan(stored, needs, self._now(), journals, leave=leave)
            # A refused request creates no record: any number of sessions would fill the store.
            if stored is None and needs and self.allowance.drop_if_refused(planned):
                self._decide(waiting, planned)
                return
            value = ledger.encode(planned.record, self.id.labels())
            self._must_read = True  # after a conflict, and as a write that fails may still have been stored
            written = await self._replica.store.write(self.name, value, revision)
            if written is not None:
                self._must_read, self._stored = False, (written, value)
                self.allowance.confirm(planned)
                self._replica.end_outage()
                self._decide(waiting, planned)
                self._on_write(self)
                return
        asyncio.get_running_loop().call_later(_RETRY_S, self.report_soon)

    def _adopt(self, revision: int, value: bytes | None) -> None:
        """Adopt a stored record, or the last known one if this version cannot read it."""
        record = ledger.parse(value) if value else ledger.unused()
        if record is None:
            # The next write replaces the unreadable one. Then each replica adds its uses that this copy lacks.
            record = self.allowance.record
            value = ledger.encode(record, self.id.labels())
            if not self._unreadable_logged:
                self._unreadable_logged = True
                log.warning(
                    "the record of a budget of project %s cannot be read; its last known state is used",
                    self.id.project,
                    extra={"action": "budget.unreadable", **self._log_fields(), "key": self.name},
                )
        self._stored = revision, value
        self.allowance.adopt(record)

    async def _journals_of_dead(self) -> dict[str, Amount]:
        dead = ledger.dead_replicas(self.allowance.record, self.allowance.name, self._now())
        return {name: await self._replica.journal.read(name, self.name) for name in dead}

    def _decide(self, waiting: list[_WaitingRequest], planned: AccountUpdate) -> None:
        now = self._now()
        for waiter, granted in zip(waiting, planned.grant.granted, strict=True):
            if waiter.future.done():
                if granted:
                    self.allowance.settle(waiter.need, NOTHING, now)
            elif not granted and self._may_be_returned(waiter, now):
                asyncio.get_running_loop().call_later(_RETRY_S, self._report_if_waiting)
            else:
                self._end(waiter, granted=granted)
        if planned.grant.warns:
            self._warn()

    def _may_be_returned(self, waiter: _WaitingRequest, now: float) -> bool:
        allowance = self.allowance
        waiter.uncovered_since = min(waiter.uncovered_since, now)
        returnable = allowance.remaining(now)
        for other in allowance.record.live(now, excluding=allowance.name):
            returnable = returnable.plus(other.idle)
        return returnable.covers(waiter.need) and now - waiter.uncovered_since < RETURN_S

    def _covers_a_waiting_request(self, now: float) -> bool:
        remaining = self.allowance.remaining(now)
        return any(remaining.covers(waiter.need) for waiter in self._waiting)

    def _report_if_waiting(self) -> None:
        if self._waiting:
            self.report_soon()

    def _decide_offline(self) -> None:
        now = self._now()
        self.allowance.go_offline(now)
        for waiter in list(self._waiting):
            if not waiter.future.done():
                self._end(waiter, granted=self.allowance.take(waiter.need, now))

    def _end(self, waiter: _WaitingRequest, *, granted: bool) -> None:
        self._waiting.remove(waiter)
        if granted:
            waiter.future.set_result(None)
        else:
            waiter.future.set_exception(self._refusal(waiter.need))

    def _refusal(self, need: Amount) -> BudgetExceeded:
        metrics.BUDGET_REFUSALS.labels(self.id.scope).inc()
        limit, taken = self.allowance.limit, self.allowance.taken
        exceeds_requests = limit.requests is not None and taken.requests + need.requests > limit.requests
        kind = "requests" if exceeds_requests or limit.tokens is None else "tokens"
        maximum, used, needed = (getattr(amount, kind) for amount in (limit, taken, need))
        renews = f"It renews at {self.period.renews}." if self.period.renews else "It does not renew."
        until = "before that" if self.period.renews else "in this session"
        detail = {
            "budget": f"{self.id.scope}_{kind}",
            "limit": maximum,
            "used": used,
            "needed": needed,
            "renews_at": self.period.renews or None,
        }
        if not self._refusal_logged:
            self._refusal_logged = True
            log.warning(
                "the budget %s of project %s is used up", detail["budget"], self.id.project,
                extra={"action": "budget.exceeded", **self._log_fields(), **detail},
            )  # fmt: skip
        return BudgetExceeded(
            f"The budget {self._owner_text} does not cover this call, so nothing was sent: {used:,} of {maximum:,} "
            f"{kind} are used or reserved, and it needs {needed:,}. {renews} Do not call again {until}; "
            "continue with what you have.",
            detail=detail,
        )

    @property
    def _owner_text(self) -> str:
        return _OWNER_TEXT[self.id.scope] + (" with this tool" if self.id.tool else "")

    def _warn(self) -> None:
        metrics.BUDGET_WARNINGS.labels(self.id.scope).inc()
        log.warning(
            "80 %% of a budget of project %s are used",  # ledger._WARN_PERCENT
            self.id.project,
            extra={"action": "budget.low", **self._log_fields(), **self.left()},
        )

    def _log_fields(self) -> dict[str, str]:
        scope, project, owner, tool = self.id
        agent = {"agent_id": owner} if scope == "agent_day" else {}
        return {"scope": scope, "project_id": project, **agent, "tool_name": tool}

    def left(self) -> dict[str, Any]:
        """Return the rest of each limited resource, as far as known, and when the budget renews."""
        found: dict[str, Any] = {}
        for kind, limit, taken in zip(AccountLimit._fields, self.allowance.limit, self.allowance.taken, strict=True):
            if limit is not None:
                found[kind], found[f"{kind}_left"] = limit, max(0, limit - taken)
        if self.period.renews:
            found["renews_at"] = self.period.renews
        return found

    @property
    def note(self) -> str:
        """Text for the model if less than a tenth is left, else empty."""
        if not self.allowance.limit.reached(self.allowance.taken, _NEARLY_USED_PERCENT):
            return ""
        left = self.left()
        named = (f"{left[f'{kind}_left']:,} of {left[kind]:,} {kind}" for kind in AccountLimit._fields if kind in left)
        renews = f"; it renews at {self.period.renews}" if self.period.renews else ""
        return f"[The budget {self._owner_text} is nearly used up: {' and '.join(named)} are left{renews}.]"

    @property
    def used_fraction(self) -> float:
        """Used fraction, above 1 if more was used."""
        pairs = zip(self.allowance.limit, self.allowance.taken, strict=True)
        return max((taken / max(1, limit) for limit, taken in pairs if limit is not None), default=0.0)

    def snapshot(self) -> dict[str, Any]:
        """Return the state for `openapi-tool budgets`."""
        # Reported uses of all replicas, and this one's unreported ones; `left` subtracts reservations, too.
        used = self.allowance.record.used.plus(self.allowance.spent)
        return {
            **self.id.labels(),
            "period": self.period.name,
            **self.left(),
            "requests_used": used.requests,
            "tokens_used": used.tokens,
            "share": round(self.used_fraction, 4),
            "offline": self.allowance.offline,
            "at": datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="seconds"),
        }
