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
from openapi_tool.budgets.budgets import Budgets
from openapi_tool.jina.failures import key_failure
from openapi_tool.limits.limiter import Limiter
from openapi_tool.state.port import OnChange, Stored
from openapi_tool.state.sqlite import SqliteRecords, StateFile

_LIMITS_TTL_S, _BUDGETS_TTL_S = 2 * 3600, 40 * 86_400  # the second is longer than the month of a budget


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of keys, and budgets, of this process."""

    limiter: Limiter
    budgets: Budgets


@asynccontextmanager
async def shared_quotas(bootstrap: Bootstrap, state: StateFile) -> AsyncIterator[Quotas]:
    """Yield limits and budgets; at the end they give back what they have taken and not used."""
    settings, name = bootstrap.settings, secrets.token_hex(5)
    limits = _Store(state.records("limits", _LIMITS_TTL_S))
    accounts = _Store(state.records("budgets", _BUDGETS_TTL_S))
    limiter = Limiter(name, settings.limits, limits, time.time, key_failure, settings.fairness.weights)
    limiter.keys.set_secrets(bootstrap.secrets)
    budgets = Budgets(name, settings.budgets, accounts, time.time)
    await limiter.keys.load()
    async with (
        limits.records.watch(_on_change(limiter)),
        accounts.records.watch(_on_change(budgets)),
        aclosing(budgets),
        aclosing(limiter),
    ):
        yield Quotas(limiter, budgets)


def _on_change(user: Limiter | Budgets) -> OnChange:
    def adopt(key: str, stored: Stored) -> None:
        user.on_change(key, stored.revision, stored.value or b"")

    return adopt


class _Store:
    """Store of limits and budgets (`limits/permits.py`, `budgets/replica.py`) on records of the state file."""

    def __init__(self, records: SqliteRecords) -> None:
        self.records = records

    async def read(self, name: str) -> tuple[int, bytes | None]:
        """Return revision and value of a record; 0 and None if there is none."""
        stored = await self.records.read(name)
        return stored.revision, stored.value

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision; return the new one, None if another process was faster."""
        return await self.records.write(name, value, revision)

    async def put(self, name: str, value: bytes) -> None:
        """Store a record that only this process writes."""
        await self.records.put(name, value)
