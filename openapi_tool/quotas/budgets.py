"""Budgets of this process: accounts that a request is charged to, its estimated cost, its reservation."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from openapi_tool.concurrency.background import in_background, repeat
from openapi_tool.options.budgets import BudgetLimits, BudgetOptions, time_zone
from openapi_tool.protocol.projects import AgentKey, bare_project
from openapi_tool.quotas.account import SCOPES, Account, AccountId, Sharing
from openapi_tool.quotas.account_record import AccountLimit
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.periods import ALWAYS, Period, Periods
from openapi_tool.state.port import ALL_RECORDS, Records, Stored
from openapi_tool.tools.deadlines import Deadline

_TICK_S = 1.0
_NEWEST_WEIGHT = 0.2  # of the newest request in a tool's moving average
_MAX_MEANS = 10_000  # one per tool
_MAX_ACCOUNTS = 20_000
_CHECKED_PER_TICK = 2_000  # all accounts at once could block the event loop
_MAX_RANKED = 100
_NOT_OPENED: tuple[float, list[Account]] = 0.0, []  # an expired entry of `_opened`


class Spender(NamedTuple):
    """Caller that is charged; `tool_limits` are the budgets of the tool's definition.

    `project` is named as in the records (`quota_project`).
    """

    project: str
    agent: str
    session: str
    tool: str
    tool_limits: BudgetLimits | None = None


@dataclass(slots=True, eq=False)
class CallAccounts:
    """Accounts that the requests of one call are charged to, narrowest first."""

    _budgets: Budgets
    _tool: tuple[str, str]  # project and name
    _accounts: Sequence[Account]
    _has_reserved: bool = False

    async def reserve(self, min_tokens: int, deadline: Deadline) -> Reservation:
        """Reserve the expected cost of a request, at least `min_tokens`. Raises BudgetExceeded, ToolTimeout."""
        budgets = self._budgets
        self._has_reserved = True
        latest = budgets.clock() + deadline.remaining() * budgets.max_wait_share()
        amount = Amount(1, max(min_tokens, round(budgets.means.get(self._tool, 0.0))))
        reservation = Reservation(amount, [])
        name = budgets.new_attempt()
        try:
            for account in self._accounts:
                budgets.active[account.record_name] = account
                reservation.attempts.append((account, await account.reserve(name, amount, deadline, latest)))
        except BaseException:
            reservation.release()
            raise
        return reservation

    async def wait_until_written(self) -> None:
        """Wait until the cost of the call is stored, or the store has failed: a crash then loses no use."""
        if self._has_reserved:
            await asyncio.gather(*(account.flush() for account in self._accounts))

    def learn_cost(self, tokens: int) -> None:
        """Use the cost of a request for later estimates; it charges nothing."""
        if tokens > 0:
            means = self._budgets.means
            mean = means.pop(self._tool, float(tokens))
            means[self._tool] = mean + _NEWEST_WEIGHT * (tokens - mean)
            if len(means) > _MAX_MEANS:
                del means[next(iter(means))]

    def left(self) -> dict[str, Any]:
        """Return the rest of each account; those of the tool's definition under `tool`."""
        found: dict[str, Any] = {}
        for account in self._accounts:
            scope, _, _, tool = account.id
            (found.setdefault("tool", {}) if tool else found)[scope] = account.left()
        return found

    @property
    def note(self) -> str:
        """Text for the model about accounts that are nearly used up."""
        return "".join(f"\n\n{note}" for account in self._accounts if (note := account.note))


@dataclass(slots=True)
class Reservation:
    """Reserved amount of one attempt in each account, to be ended once, by `charge` or `release`."""

    amount: Amount
    attempts: list[tuple[Account, Attempt]]

    def charge(self, tokens: int) -> None:
        """Charge the cost of the request, which was sent."""
        for account, attempt in self.attempts:
            account.settle(attempt, Amount(1, tokens))

    def release(self) -> None:
        """Free the amount: the request was not sent."""
        for account, attempt in self.attempts:
            account.settle(attempt, NOTHING)


class Budgets:
    """Budgets of this process, named `replica`. `clock` returns the NATS server's time in seconds since the epoch.

    A request waits for what others have reserved for `max_wait_share()` of its remaining time.
    `limited`: the settings have a budget. `active`: accounts by record name in which requests have reserved. `means`:
    moving averages of a request's tokens by project and tool.
    """

    def __init__(
        self,
        replica: str,
        options: BudgetOptions,
        store: Records,
        clock: Callable[[], float],
        max_wait_share: Callable[[], float],
    ) -> None:
        self.max_wait_share = max_wait_share
        self._replica = replica
        self._options = options
        self._store = store
        self.clock = clock
        self._numbers = count()
        self._sharing = Sharing()
        self.active: dict[str, Account] = {}
        self.means: dict[tuple[str, str], float] = {}
        self._most_used: dict[str, dict[str, Account]] = {scope: {} for scope in SCOPES}
        # Expiry and accounts by project, agent and session.
        self._opened: dict[tuple[str, str, str], tuple[float, list[Account]]] = {}
        # Accounts that `_drop_unused` has not checked in this round.
        self._to_check: Iterator[tuple[tuple[AccountId, str], Account]] = iter(())
        self._periods = Periods(time_zone(options.time_zone))
        self._accounts: dict[tuple[AccountId, str], Account] = {}
        self._by_name: dict[str, Account] = {}
        # Also those that were dropped while a call uses them: two accounts of one record would undo each other's
        # reservations, as both write them in the name of this replica.
        self._existing: WeakValueDictionary[tuple[AccountId, str], Account] = WeakValueDictionary()
        self._by_project = {name: options.for_project(name) for name in options.projects}
        self.limited = options.limited or bool(options.projects)
        self._task: asyncio.Task[None] | None = None

    def accounts_of(self, spender: Spender) -> CallAccounts | None:
        """Return the accounts of a call, None without any budget."""
        project, agent, session, tool, tool_limits = spender
        now = self.clock()
        key = (project, agent, session)
        until, accounts = self._opened.get(key, _NOT_OPENED)
        if now >= until:
            accounts = self._open(spender, self._by_project.get(bare_project(project), self._options), "", now)
            if len(self._opened) >= _MAX_ACCOUNTS:
                self._opened.clear()
            self._opened[key] = min((account.period.end for account in accounts), default=math.inf), accounts
        if tool_limits is not None:
            accounts = [*accounts, *self._open(spender, tool_limits, tool, now)]
        return CallAccounts(self, (project, tool), accounts) if accounts else None

    def new_attempt(self) -> str:
        """Return the id of a new attempt."""
        return f"{self._replica}.{next(self._numbers):x}"

    def on_change(self, name: str, stored: Stored) -> None:
        """Adopt a record that another replica wrote, or that all were deleted."""
        if name == ALL_RECORDS:
            for each in self._accounts.values():
                each.forget()
        elif (account := self._by_name.get(name)) is not None:
            account.on_change(stored)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the most used known accounts, those of projects first."""
        ranked = (account for accounts in self._most_used.values() for account in accounts.values())
        accounts = sorted(ranked, key=lambda each: (each.id.owner != "", -each.used_fraction))
        return [account.snapshot() for account in accounts[:_MAX_RANKED]]

    async def left(self, charged: AgentKey) -> list[dict[str, Any]]:
        """Return what is left of the budgets of an agent and its project, as all replicas know it; none of sessions.

        Both are named as in the records of quotas (`Call.quota_agent`).
        """
        spender = Spender(charged.project, charged.agent, "", "")
        limits = self._by_project.get(bare_project(charged.project), self._options)
        accounts = self._open(spender, limits, "", self.clock(), [scope for scope in SCOPES if scope != "session"])
        await asyncio.gather(*(account.refresh() for account in accounts))
        return [{"budget": account.id.scope, **account.left()} for account in accounts]

    def outage(self) -> str:
        """Return why the store is unavailable; empty if it is not."""
        return self._sharing.outage

    def largest_used_fraction(self, scope: str) -> float:
        """Return the largest used fraction of the accounts of a scope."""
        return max((account.used_fraction for account in self._most_used[scope].values()), default=0.0)

    async def aclose(self) -> None:
        """Store all known costs, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(account.aclose() for account in self.active.values()))

    def _open(
        self, spender: Spender, limits: BudgetLimits, tool: str, now: float, scopes: Sequence[str] = SCOPES
    ) -> list[Account]:
        found = []
        for scope in scopes:
            limit = AccountLimit(*limits.of(scope))
            if limit != (None, None):
                owner = spender.session if scope == "session" else spender.agent if scope == "agent_day" else ""
                found.append(self._account(AccountId(scope, spender.project, owner, tool), limit, now))
        return found

    def _account(self, account_id: AccountId, limit: AccountLimit, now: float) -> Account:
        period = self._period(account_id.scope, now)
        key = account_id, period.name
        account = self._accounts.get(key)
        if account is None:
            account = self._existing.get(key) or Account(
                account_id, limit, period, self._replica, self._store, self.clock, self._sharing, on_write=self._rank
            )
            self._existing[key] = account
            self._accounts[key] = self._by_name[account.record_name] = account
            self._rank(account)
            self._task = self._task or in_background(repeat(self._tick, _TICK_S, "the budgets"), "budgets")
        account.limit = limit  # the definition may have changed
        return account

    def _period(self, scope: str, now: float) -> Period:
        if scope == "session":
            return ALWAYS
        return self._periods.month(now) if scope == "project_month" else self._periods.day(now)

    async def _tick(self) -> None:
        for account in list(self.active.values()):
            if account.is_quiet:
                del self.active[account.record_name]
        self._drop_unused(self.clock())

    def _drop_unused(self, now: float) -> None:
        """Drop quiet accounts whose period is over, or the oldest if there are too many."""
        checked = list(islice(self._to_check, _CHECKED_PER_TICK))
        if not checked:
            self._to_check = iter(list(self._accounts.items()))
        too_many = len(self._accounts) - _MAX_ACCOUNTS
        for key, account in checked:
            if account.is_quiet and (now >= account.period.end or too_many > 0):
                too_many -= 1
                del self._accounts[key], self._by_name[account.record_name]
                self._opened.clear()  # it may list the account; the next calls fill it again
                self._most_used[account.id.scope].pop(account.record_name, None)

    def _rank(self, account: Account) -> None:
        """Add an account to the most used ones of its scope, which are pruned to `_MAX_RANKED` at twice that."""
        if self._by_name.get(account.record_name) is not account:  # dropped, but written by an older call
            return
        found = self._most_used[account.id.scope]
        found[account.record_name] = account
        if len(found) > 2 * _MAX_RANKED:
            largest = heapq.nlargest(_MAX_RANKED, found.values(), key=lambda each: each.used_fraction)
            self._most_used[account.id.scope] = {each.record_name: each for each in largest}
