"""Limits and budgets of a gateway, shared by all processes with the same state.

A *limit* bounds what is sent with an API key in a minute. A *budget* bounds what an agent or a project may spend in a
period, such as a day.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.gateway.state import GatewayState
from openapi_tool.jina.failures import key_failure
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.quotas.limiter import Limiter


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of keys, and budgets, of this process."""

    limiter: Limiter
    budgets: Budgets


@asynccontextmanager
async def shared_quotas(bootstrap: Bootstrap, state: GatewayState) -> AsyncIterator[Quotas]:
    """Yield limits and budgets; at the end they give back to the shared records what they have taken and not used."""
    name = secrets.token_hex(5)  # of this process in the shared records
    settings = bootstrap.settings
    limits, accounts = state.limits, state.budgets
    # `key_failure` makes the error of a call whose API key Jina has refused.
    limiter = Limiter(name, settings.limits, limits, state.time, key_failure, settings.fairness.weights)
    limiter.keys.set_secrets(bootstrap.secrets)  # of which the limiter takes the API keys of a pool
    # A call waits for a budget for at most the same share of its time as for a permit.
    budgets = Budgets(name, settings.budgets, accounts, state.time, limiter.max_wait_share)
    with suppress(Unavailable):  # a key that Jina refuses is then detected by its next refusal
        await limiter.keys.load()
    async with (
        limits.watch(limiter.on_change),
        accounts.watch(budgets.on_change),
        aclosing(budgets),
        aclosing(limiter),
    ):
        yield Quotas(limiter, budgets)
