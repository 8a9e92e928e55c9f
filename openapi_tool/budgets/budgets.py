"""Budgets of this process: accounts that a request is charged to, its estimated cost, its reservation."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from openapi_tool.budgets.account import SCOPES, Account, AccountId
from openapi_tool.budgets.ledger import ALWAYS, NOTHING, AccountLimit, Amount, Period, Periods
from openapi_tool.budgets.replica import AccountStore, BudgetReplica
from openapi_tool.concurrency.background import in_background
from openapi_tool.options.budgets import BudgetLimits, BudgetOptions, time_zone
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.projects import bare_project
from openapi_tool.tools.deadlines import Deadline

_TICK_S = 1.0
_NEWEST_WEIGHT = 0.2  # of the newest request in a tool's moving average
_MAX_MEANS = 10_000  # one per tool
_MAX_ACCOUNTS = 20_000
_CHECKED_PER_TICK = 2_000  # all accounts at once could block the event loop
_MAX_RANKED = 100
_NOT_OPENED: tuple[float, list[Account]] = 0.0, []  # an expired entry of `_charged`


class Spender(NamedTuple):
    """Caller that is charged; `tool_limits` are the budgets of the tool's definition.

    `project` is prefixed with the protocol version for any kernel but the main one, as in AccountId.
    """

    project: str
    agent: str
    session: str
    tool: str
    tool_limits: BudgetLimits | None = None


@dataclass(slots=True, eq=False)
class Charge:
    """Accounts of one call, narrowest first."""

    _budgets: Budgets
    _tool: tuple[str, str]  # project and name
    _accounts: Sequence[Account]
    _has_reserved: bool = False

    async def reserve(self, min_tokens: int, deadline: Deadline) -> Reservation:
        """Reserve the expected cost of a request, at least `min_tokens`. Raises BudgetExceeded, ToolTimeout."""
        budgets, self._has_reserved = self._budgets, True
        need = Amount(1, max(min_tokens, round(budgets.means.get(self._tool, 0.0))))
        reservation = Reservation(need, [])
        now = budgets.clock()
        try:
            for account in self._accounts:
                budgets.active[account.name] = account
                limited = account.allowance.limit.limited_part(need)
                if not account.take(limited, now):
                    await account.reserve(limited, now, deadline)
                    now = budgets.clock()
                reservation.accounts.append((account, limited))
        except BaseException:
            reservation.unsent()
            raise
        return reservation

    async def wait_until_written(self) -> None:
        """Wait until the uses of the call are in the journal, or its write has failed."""
        if self._has_reserved:
            await self._budgets.journal.wait_until_written()

    def record_cost(self, tokens: int) -> None:
        """Count the cost of a request for later estimates."""
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
    """Reserved amount of a request, to be ended once, by `sent` or `unsent`.

    `accounts` contains each account with the part of `need` that it limits.
    """

    need: Amount
    accounts: list[tuple[Account, Amount]]

    def sent(self, tokens: int | None) -> None:
        """Charge the cost of the request, the estimate if it is unknown (None)."""
        actual = self.need if tokens is None else Amount(1, tokens)
        for account, reserved in self.accounts:
            account.settle(reserved, actual)

    def unsent(self) -> None:
        """Free the amount: the request was not sent."""
        for account, reserved in self.accounts:
            account.settle(reserved, NOTHING)


class Budgets:
    """Budgets of this process, named `replica`. `clock` returns the NATS server's time in seconds since the epoch.

    `limited`: the settings have a budget. `active`: accounts by name that hold something or must report. `means`:
    moving averages of a request's tokens by project and tool.
    """

    def __init__(self, replica: str, options: BudgetOptions, store: AccountStore, clock: Callable[[], float]) -> None:
        self._options, self.clock = options, clock
        self._replica = BudgetReplica(replica, store, clock)
        self.journal = self._replica.journal
        self.active: dict[str, Account] = {}
        self.means: dict[tuple[str, str], float] = {}
        self._most_used: dict[str, dict[str, Account]] = {scope: {} for scope in SCOPES}
        # Expiry and accounts by project, agent and session.
        self._charged: dict[tuple[str, str, str], tuple[float, list[Account]]] = {}
        # Accounts that `_drop_unused` has not checked in this round.
        self._to_check: Iterator[tuple[tuple[AccountId, str], Account]] = iter(())
        self._periods = Periods(time_zone(options.time_zone))
        self._accounts: dict[tuple[AccountId, str], Account] = {}
        self._by_name: dict[str, Account] = {}
        self._by_project = {name: options.for_project(name) for name in options.projects}
        self.limited = options.limited or bool(options.projects)
        self._task: asyncio.Task[None] | None = None

    def charge(self, spender: Spender) -> Charge | None:
        """Return what a call is charged to, None without any budget."""
        project, agent, session, tool, tool_limits = spender
        now, key = self.clock(), (project, agent, session)
        until, accounts = self._charged.get(key, _NOT_OPENED)
        if now >= until:
            accounts = self._open(spender, self._by_project.get(bare_project(project), self._options), "", now)
            if len(self._charged) >= _MAX_ACCOUNTS:
                self._charged.clear()
            self._charged[key] = min((account.period.end for account in accounts), default=math.inf), accounts
        if tool_limits is not None:
            accounts = [*accounts, *self._open(spender, tool_limits, tool, now)]
        return Charge(self, (project, tool), accounts) if accounts else None

    def on_change(self, name: str, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        if (account := self._by_name.get(name)) is not None:
            account.on_change(revision, value)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the most used known accounts, those of projects first."""
        ranked = (account for accounts in self._most_used.values() for account in accounts.values())
        accounts = sorted(ranked, key=lambda each: (each.id.owner != "", -each.used_fraction))
        return [account.snapshot() for account in accounts[:_MAX_RANKED]]

    def outage(self) -> str:
        """Return why the store is unavailable; empty if it is not."""
        return self._replica.outage

    def largest_used_fraction(self, scope: str) -> float:
        """Return the largest used fraction of the accounts of a scope."""
        return max((account.used_fraction for account in self._most_used[scope].values()), default=0.0)

    async def aclose(self) -> None:
        """Report, give all blocks back, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(account.aclose() for account in self.active.values()))
        await self.journal.aclose()

    def _open(self, spender: Spender, limits: BudgetLimits, tool: str, now: float) -> list[Account]:
        found = []
        for scope in SCOPES:
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
            account = Account(account_id, limit, period, self._replica, on_write=self._rank)
            self._accounts[key] = self._by_name[account.name] = account
            self._rank(account)
            self._task = self._task or in_background(self._run(), "budgets")
        account.allowance.limit = limit  # the definition may have changed
        return account

    def _period(self, scope: str, now: float) -> Period:
        if scope == "session":
            return ALWAYS
        return self._periods.month(now) if scope == "project_month" else self._periods.day(now)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._replica.outage:
                await self._probe()
                continue
            now = self.clock()
            for account in list(self.active.values()):
                if account.allowance.offline or account.allowance.is_due(now):
                    account.report_soon()
                if account.is_quiet:
                    del self.active[account.name]
            self._drop_unused(now)

    async def _probe(self) -> None:
        """Check with one account whether the store is available again."""
        for account in islice(chain(self.active.values(), self._accounts.values()), 1):
            with suppress(Unavailable):
                await account.report()

    def _drop_unused(self, now: float) -> None:
        """Drop quiet accounts whose period is over, or the oldest if there are too many."""
        checked = list(islice(self._to_check, _CHECKED_PER_TICK))
        if not checked:
            self._to_check = iter(list(self._accounts.items()))
        too_many = len(self._accounts) - _MAX_ACCOUNTS
        for key, account in checked:
            if account.is_quiet and (now >= account.period.end or too_many > 0):
                too_many -= 1
                del self._accounts[key], self._by_name[account.name]
                self._charged.clear()  # it may list the account; the next calls fill it again
                self._most_used[account.id.scope].pop(account.name, None)

    def _rank(self, account: Account) -> None:
        """Add an account to the most used ones of its scope, which are limited to 200."""
        if self._by_name.get(account.name) is not account:  # dropped, but written by an older call
            return
        found = self._most_used[account.id.scope]
        found[account.name] = account
        if len(found) > 2 * _MAX_RANKED:
            largest = heapq.nlargest(_MAX_RANKED, found.values(), key=lambda each: each.used_fraction)
            self._most_used[account.id.scope] = {each.name: each for each in largest}
