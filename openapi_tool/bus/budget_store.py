"""Budgets of this process, and their accounts in a KV bucket (ADR 10)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nats.aio.client import Client

from openapi_tool.budgets.budgets import Budgets
from openapi_tool.bus.limit_store import Place, SharedRecords
from openapi_tool.options import BudgetOptions
from openapi_tool.telemetry import metrics

BUCKET = "openapi_tool_budgets"
KEYS = "budget.*"
CHANGES = "openapi_tool.budgets"
"""Messages of changed accounts: `openapi_tool.budgets.ACCOUNT`, with the revision and the record."""

BUDGETS = Place(BUCKET, CHANGES, 40 * 86_400, 128 * 2**20, metrics.BUDGET_OPERATIONS)
"""Kept for longer than a month; the account of a session is forgotten 40 days after its last call."""


class SharedBudgets:
    """Budgets of this process, and their store.

    `instance` names the process; a restarted one may have the same name, and is another replica. `clock` is the
    server's, in seconds since the epoch.
    """

    def __init__(self, instance: str, options: BudgetOptions, clock: Callable[[], float]) -> None:
        self._records = SharedRecords(BUDGETS)
        self.budgets = Budgets(f"{instance}-{secrets.token_hex(3)}", options, self._records, clock)

    @asynccontextmanager
    async def connected(self, client: Client, replicas: int) -> AsyncIterator[None]:
        """Share the budgets over this connection; in the end uses are reported and blocks given back."""
        await self._records.connect(client, replicas, self.budgets.on_change)
        try:
            yield
        finally:
            await self.budgets.aclose()
