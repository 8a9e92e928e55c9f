"""What the calls of a project have cost at a kernel, for `openapi-tool usage`.

The cards of results in PostgreSQL say what each call has cost. The accounts of budgets, which executors keep in NATS,
say what was charged to the project. They also count calls without a card: their process died, or they still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.kernel import kernel_bootstrap
from openapi_tool.cli.nats_connection import run_connected
from openapi_tool.cli.output import fail, print_status
from openapi_tool.cli.usage_sums import UsageQuery, UsageSums
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.usage import MAX_ROWS, requests_and_tokens, usage
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.record_store import BUDGETS
from openapi_tool.options.budgets import time_zone
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.projects import quota_project
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.charged import WithoutResult, charged, without_result
from openapi_tool.quotas.periods import Period
from openapi_tool.state.nats_kv import NatsKvRecords

SUMS_OF_RESULTS = ("calls", "tokens", "requests", "cache_hits", "errors", "truncated", "retries", "p50_ms", "p95_ms")


def kernel_usage(query: UsageQuery) -> UsageSums:
    """Return what the calls have cost; exit with 2 if the database cannot be reached."""
    bootstrap = kernel_bootstrap()
    try:
        total_and_rows, beyond_results = asyncio.run(_read(bootstrap, query))
    except Unavailable as error:
        fail(bootstrap.redactor.text(located(str(error), bootstrap.pool)))
    total_row, *other_rows = total_and_rows
    if len(other_rows) >= MAX_ROWS:  # the statement returns no more
        print_status(f"only the first {MAX_ROWS:,} rows are shown; name a shorter time with --since and --until")
    rows = [{"key": row["key"], **_sums(row)} for row in other_rows]
    return UsageSums(_sums(total_row), rows, beyond_results)


def _sums(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in SUMS_OF_RESULTS}


async def _read(bootstrap: Bootstrap, query: UsageQuery) -> tuple[list[dict[str, Any]], WithoutResult]:
    """Return the total and the rows from the cards, and what accounts hold beyond the cards."""
    pool, actor_id = bootstrap.pool, bootstrap.settings.actor_id
    rows = await usage(pool, query.project, query.start, query.end, actor_id, query.by)
    try:
        charged_by_period = await charged_in_nats(bootstrap, query)
    except Unavailable as error:
        reason = bootstrap.redactor.text(str(error))
        print_status(f"no data for requests without a card, which are in the accounts of budgets: {reason}")
        return rows, {}
    if not charged_by_period:
        return rows, {}
    spans = [_as_datetimes(period) for period in charged_by_period]
    amounts_of_cards = [Amount(*amount) for amount in await requests_and_tokens(pool, query.project, spans, actor_id)]
    return rows, without_result(charged_by_period, amounts_of_cards)


def _as_datetimes(period: Period) -> tuple[datetime, datetime]:
    return datetime.fromtimestamp(period.start, UTC), datetime.fromtimestamp(period.end, UTC)


async def charged_in_nats(
    bootstrap: Bootstrap, query: UsageQuery, user: NatsUser = NatsUser.INSPECT
) -> Mapping[Period, Amount]:
    """Return what the accounts of the project in NATS hold, by day or month (`charged`). Raises Unavailable."""
    settings = bootstrap.settings
    account_project = quota_project(settings.quota_namespace, query.project)
    zone = time_zone(settings.budgets.time_zone)

    async def read(_: Bootstrap, client: BusClient) -> Mapping[Period, Amount]:
        accounts = NatsKvRecords(client, BUDGETS.bucket)
        return await charged(accounts, account_project, query.start, query.end, zone)

    # Executors may keep the accounts in other NATS servers than the kernel's (`quotas.nats`).
    bus = bootstrap.quotas or bootstrap.bus
    return await run_connected(replace(bootstrap, bus=bus), read, user)
