"""Limits and budgets of a gateway, shared by all processes that use the same state file.

The only module of the gateway that knows how limits and budgets store their records.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.jina.failures import key_failure
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.state.port import Records
from openapi_tool.state.sqlite import StateFile

_LIMITS_TTL_S, _BUDGETS_TTL_S = 2 * 3600, 40 * 86_400  # the second is longer than the month of a budget


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of keys, and budgets, of this process."""

    limiter: Limiter
    budgets: Budgets


def budget_records(state: StateFile) -> Records:
    """Return the records of accounts in a state file."""
    return state.records("budgets", _BUDGETS_TTL_S)


@asynccontextmanager
async def shared_quotas(bootstrap: Bootstrap, state: StateFile) -> AsyncIterator[Quotas]:
    """Yield limits and budgets; at the end they give back what they have taken and not used."""
    settings, name = bootstrap.settings, secrets.token_hex(5)
    limits, accounts = state.records("limits", _LIMITS_TTL_S), budget_records(state)
    limiter = Limiter(name, settings.limits, limits, time.time, key_failure, settings.fairness.weights)
    limiter.keys.set_secrets(bootstrap.secrets)
    budgets = Budgets(name, settings.budgets, accounts, time.time, limiter.max_wait_share)
    await limiter.keys.load()
    async with (
        limits.watch(limiter.on_change),
        accounts.watch(budgets.on_change),
        aclosing(budgets),
        aclosing(limiter),
    ):
        yield Quotas(limiter, budgets)
