"""Budgets of this process: accounts that a request is charged to, its estimated cost, its reservation.

A call asks `Budgets.accounts_of` for its accounts. Before each request it calls `CallAccounts.reserve`, and afterwards
`Reservation.charge`, or `Reservation.release` if the request was not sent.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from openapi_tool.concurrency.background import in_background, repeat
from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.options.budgets import SCOPES, BudgetLimits, BudgetOptions, time_zone
from openapi_tool.protocol.projects import AgentKey, bare_project
from openapi_tool.quotas.account import Account, Sharing
from openapi_tool.quotas.account_id import AccountId
from openapi_tool.quotas.account_record import AccountLimit
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.periods import ALWAYS, Period, Periods
from openapi_tool.state.port import ALL_RECORDS, Records, Stored
from openapi_tool.tools.deadlines import Deadline

_NEWEST_WEIGHT = 0.2  # of the newest request in a tool's moving average of tokens
_MAX_MEANS = 10_000  # of tools; the one that was not used for the longest time is forgotten first
_MAX_ACCOUNTS = 20_000  # above it, accounts that nothing uses are dropped from memory, although their period goes on
_TICK_S = 1.0  # between checks for accounts to drop
_CHECKED_PER_TICK = 2_000  # a check of all accounts at once could block the event loop
_MAX_RANKED = 100  # accounts in statistics, of each scope and of all together


class Spender(NamedTuple):
    """Caller that is charged, by ids; `tool_limits` are the budgets of the tool's definition, None if it has none.

    `project` is named as in the records (`quota_project`).
    """

    project: str
    agent: str
    session: str
    tool: str
    tool_limits: BudgetLimits | None = None


class Budgets:
    """Budgets of this process, named `replica`. `clock` returns the NATS server's time in seconds since the epoch.

    A request that needs what others have reserved waits for them for the part `max_wait_share()` of its remaining time.
    `limited` says whether the settings have a budget. `means` are moving averages of a request's tokens by project and
    tool.
    """

    def __init__(
        self,
        replica: str,
        options: BudgetOptions,
        store: Records,
        clock: Callable[[], float],
        max_wait_share: Callable[[], float],
    ) -> None:
        self.limited = options.limited or bool(options.projects)
        self.max_wait_share = max_wait_share
        self.clock = clock
        self.means: dict[tuple[str, str], float] = {}
        self._replica = replica
        self._store = store
        self._sharing = Sharing()
        self._limits = options
        self._limits_by_project = {name: options.for_project(name) for name in options.projects}
        self._periods = Periods(time_zone(options.time_zone))
        # The accounts in use, by the name of the record.
        self._accounts: dict[str, Account] = {}
        # `_accounts`, and those that were dropped from there while a call still uses them. If there were two accounts
        # of one record, each would take the other's reservations for its own that were never sent, and remove them.
        self._existing: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._most_used: dict[str, dict[str, Account]] = {scope: {} for scope in SCOPES}  # then by name of the record
        self._to_check: Iterator[Account] = iter(())  # accounts that `_tick` has not checked in this round
        self._task: asyncio.Task[None] | None = None  # runs `_tick` once there is an account

    def accounts_of(self, spender: Spender) -> CallAccounts | None:
        """Return the accounts of a call; None if no budget applies to it."""
        accounts = self._open(spender, self._limits_of(spender.project), "")
        if spender.tool_limits is not None:
            accounts += self._open(spender, spender.tool_limits, spender.tool)
        return CallAccounts(self, (spender.project, spender.tool), accounts) if accounts else None

    def known_left(self, spender: Spender) -> dict[str, Any]:
        """Return what is left of the accounts of a call that this process has read: it opens none, and reads none."""
        now = self.clock()
        needed = self._needed(spender, self._limits_of(spender.project), "")
        if spender.tool_limits is not None:
            needed += self._needed(spender, spender.tool_limits, spender.tool)
        names = [account_id.record_name(self._period(account_id.scope, now)) for account_id, _ in needed]
        open_accounts = [account for name in names if (account := self._accounts.get(name)) is not None]
        return _left_of([account for account in open_accounts if account.remembers])

    def on_change(self, name: str, stored: Stored) -> None:
        """Adopt a record that another replica wrote, or that all were deleted."""
        if name == ALL_RECORDS:
            for each in self._accounts.values():
                each.forget()
        elif (account := self._accounts.get(name)) is not None:
            account.on_change(stored)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the most used accounts that this process knows, those of projects first."""
        ranked = (account for accounts in self._most_used.values() for account in accounts.values())
        accounts = sorted(ranked, key=lambda each: (each.id.owner != "", -each.used_fraction))
        return [account.snapshot() for account in accounts[:_MAX_RANKED]]

    async def left(self, charged: AgentKey) -> list[dict[str, Any]]:
        """Return what is left of the budgets of an agent and its project, read from the store; none of sessions.

        Agent and project are named as in the records (`Call.quota_agent`).
        """
        spender = Spender(charged.project, charged.agent, "", "")
        scopes = [scope for scope in SCOPES if scope != "session"]
        accounts = self._open(spender, self._limits_of(spender.project), "", scopes)
        await asyncio.gather(*(account.refresh() for account in accounts))
        return [{"budget": account.id.scope, **account.left()} for account in accounts]

    def outage(self) -> str:
        """Return why the store is unavailable; empty if it is available."""
        return self._sharing.outage

    def largest_used_fraction(self, scope: str) -> float:
        """Return the largest used fraction of the accounts of a scope."""
        return max((account.used_fraction for account in self._most_used[scope].values()), default=0.0)

    async def aclose(self) -> None:
        """Store all known costs, and stop."""
        if self._task is not None:
            await cancel_until_ended(self._task)
        await asyncio.gather(*(account.aclose() for account in self._existing.values() if not account.is_quiet))

    def _limits_of(self, project: str) -> BudgetLimits:
        return self._limits_by_project.get(bare_project(project), self._limits)

    def _open(self, spender: Spender, limits: BudgetLimits, tool: str, scopes: Sequence[str] = SCOPES) -> list[Account]:
        """Return the accounts of a caller for which `limits` has a budget; `tool` is as in `AccountId`."""
        now = self.clock()
        needed = self._needed(spender, limits, tool, scopes)
        return [self._account(account_id, limit, now) for account_id, limit in needed]

    def _needed(
        self, spender: Spender, limits: BudgetLimits, tool: str, scopes: Sequence[str] = SCOPES
    ) -> list[tuple[AccountId, AccountLimit]]:
        """Return the id of each account that `_open` returns, with its budget."""
        owners = {"session": spender.session, "agent_day": spender.agent}
        found = []
        for scope in scopes:
            limit = AccountLimit(*limits.of(scope))
            if limit != (None, None):
                found.append((AccountId(scope, spender.project, owners.get(scope, ""), tool), limit))
        return found

    def _account(self, account_id: AccountId, limit: AccountLimit, now: float) -> Account:
        period = self._period(account_id.scope, now)
        name = account_id.record_name(period)
        account = self._accounts.get(name)
        if account is None:
            account = self._existing.get(name) or Account(
                account_id, limit, period, self._replica, self._store, self.clock, self._sharing, on_write=self._rank
            )
            self._existing[name] = self._accounts[name] = account
            self._rank(account)
            self._task = self._task or in_background(repeat(self._tick, _TICK_S, "the budgets"), "budgets")
        account.limit = limit  # the definition may have changed
        return account

    def _period(self, scope: str, now: float) -> Period:
        if scope == "session":
            return ALWAYS
        return self._periods.month(now) if scope == "project_month" else self._periods.day(now)

    async def _tick(self) -> None:
        """Drop accounts that nothing uses now: those whose period is over, and the oldest if there are too many."""
        now = self.clock()
        checked = list(islice(self._to_check, _CHECKED_PER_TICK))
        if not checked:
            self._to_check = iter(list(self._accounts.values()))
        too_many = len(self._accounts) - _MAX_ACCOUNTS
        for account in checked:
            if account.is_quiet and (now >= account.period.end or too_many > 0):
                too_many -= 1
                del self._accounts[account.record_name]
                self._most_used[account.id.scope].pop(account.record_name, None)

    def _rank(self, account: Account) -> None:
        """Add an account to the most used ones of its scope; from 200 of them, only `_MAX_RANKED` are kept."""
        was_dropped = self._accounts.get(account.record_name) is not account
        if was_dropped:  # but a call still uses and writes it
            return
        found = self._most_used[account.id.scope]
        found[account.record_name] = account
        if len(found) > 2 * _MAX_RANKED:
            largest = heapq.nlargest(_MAX_RANKED, found.values(), key=lambda each: each.used_fraction)
            self._most_used[account.id.scope] = {each.record_name: each for each in largest}


@dataclass(slots=True, eq=False)
class CallAccounts:
    """Accounts that the requests of one call are charged to, narrowest first; those of the tool's definition last."""

    _budgets: Budgets
    _tool: tuple[str, str]  # project and name: key of `Budgets.means`
    _accounts: Sequence[Account]
    _has_reserved: bool = False

    async def reserve(self, min_tokens: int, deadline: Deadline) -> Reservation:
        """Reserve the expected cost of a request, at least `min_tokens`, in all accounts or none.

        Raises BudgetExceeded, ToolTimeout.
        """
        budgets = self._budgets
        self._has_reserved = True
        latest = budgets.clock() + deadline.remaining() * budgets.max_wait_share()
        mean_tokens = round(budgets.means.get(self._tool, 0.0))
        amount = Amount(1, max(min_tokens, mean_tokens))
        reservation = Reservation(amount, [])
        try:
            for account in self._accounts:
                reservation.attempts.append((account, await account.reserve(amount, deadline, latest)))
        except BaseException:
            reservation.release()
            raise
        return reservation

    async def wait_until_written(self) -> None:
        """Wait until the cost of the call is stored, or the store has failed: a crash then loses no use."""
        if self._has_reserved:
            await asyncio.gather(*(account.flush() for account in self._accounts))

    def learn_cost(self, tokens: int) -> None:
        """Use the cost of a request for later estimates; this charges nothing."""
        if tokens <= 0:
            return
        means = self._budgets.means
        mean = means.pop(self._tool, float(tokens))
        means[self._tool] = mean + _NEWEST_WEIGHT * (tokens - mean)
        if len(means) > _MAX_MEANS:
            del means[next(iter(means))]

    def left(self) -> dict[str, Any]:
        """Return what is left of each account by scope; accounts of the tool's definition are under `tool`."""
        return _left_of(self._accounts)

    @property
    def note(self) -> str:
        """Text for the model about accounts that are nearly used up."""
        notes = [account.note for account in self._accounts]
        return "".join(f"\n\n{note}" for note in notes if note)


def _left_of(accounts: Sequence[Account]) -> dict[str, Any]:
    """Return what is left of each account by scope; accounts of a tool's definition are under `tool`."""
    found: dict[str, Any] = {}
    for account in accounts:
        place = found.setdefault("tool", {}) if account.id.tool else found
        place[account.id.scope] = account.left()
    return found


@dataclass(slots=True)
class Reservation:
    """Amount that one request has reserved, and its attempt in each account: to be ended by `charge` or `release`."""

    amount: Amount
    attempts: list[tuple[Account, Attempt]]

    def charge(self, tokens: int) -> None:
        """Charge the request, which was sent, with its real cost."""
        for account, attempt in self.attempts:
            account.settle(attempt, Amount(1, tokens))

    def release(self) -> None:
        """Free the amount: the request was not sent."""
        for account, attempt in self.attempts:
            account.settle(attempt, NOTHING)
