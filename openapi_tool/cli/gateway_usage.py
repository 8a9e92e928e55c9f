"""What the calls of a project have cost in a gateway, from the rows of its state, for `openapi-tool usage`."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openapi_tool.cli.gateway_state import with_state
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.kernel_usage import charged_in_nats
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.usage_sums import UsageQuery, UsageSums
from openapi_tool.gateway.opening import NATS
from openapi_tool.gateway.state import BUDGETS_TTL_S
from openapi_tool.gateway.usage import COLUMNS
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.options.budgets import time_zone
from openapi_tool.protocol.projects import quota_project
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.charged import charged, without_result
from openapi_tool.quotas.periods import Period
from openapi_tool.settings import load_settings

if TYPE_CHECKING:
    from openapi_tool.bootstrap import Bootstrap
    from openapi_tool.nats_client.client import BusClient
    from openapi_tool.state.sqlite import StateFile

_KEYS: Mapping[By, str] = {
    By.TOOL: "tool",
    By.AGENT: "agent",
    By.DAY: "date(at, 'unixepoch')",
    By.SESSION: "session",
    By.ERROR: "error",
}
"""SQL of the key by which rows are summed up."""


def gateway_usage(path: Path, query: UsageQuery) -> UsageSums:
    """Return what the calls have cost. Days are in ascending order, other rows by tokens, the largest first."""
    # `path` may stand for NATS: then `with_state` gives the rows of calls only, so the budgets are read here.
    charged_by_nats = _charged_in_nats(query) if path == NATS else None

    async def read(state: StateFile) -> UsageSums:
        total, rows = await state.run(lambda connection: _sums(connection, query))
        charged_by_period = await _charged_in_file(state, query) if charged_by_nats is None else charged_by_nats
        amounts_of_rows = [await _amount_of_rows(state, query.project, period) for period in charged_by_period]
        return UsageSums(total, rows, without_result(charged_by_period, amounts_of_rows))

    return with_state(path, read, lambda rows: rows.of_project(query.project))


def _sums(connection: sqlite3.Connection, query: UsageQuery) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the sum over the rows of calls, and the sums by key, with quantiles of the latency."""
    connection.row_factory = sqlite3.Row
    where = "FROM calls WHERE project = :project AND at >= :since AND at < :until"
    values = {
        "project": query.project,
        "since": query.start.timestamp(),
        "until": query.end.timestamp(),
    }
    key = _KEYS[query.by]
    order = "key" if query.by is By.DAY else "tokens DESC, key"
    # The texts that are put into the statements are constants.
    [total] = connection.execute(f"SELECT {COLUMNS} {where}", values)
    rows = connection.execute(f"SELECT {key} AS key, {COLUMNS} {where} GROUP BY key ORDER BY {order}", values)
    times = connection.execute(f"SELECT {key} AS key, latency_ms {where} ORDER BY latency_ms", values)
    all_latencies, latencies_by_key = _latencies(times)
    sums = [{**dict(row), **_quantiles(latencies_by_key[row["key"]])} for row in rows]
    # SQL's sum of no rows is null.
    total_sum = {name: value or 0 for name, value in dict(total).items()}
    return {**total_sum, **_quantiles(all_latencies)}, sums


def _latencies(times: Iterable[Sequence[Any]]) -> tuple[list[int], Mapping[object, list[int]]]:
    """Return all latencies, and those of each key, from pairs of key and latency; the order stays."""
    by_key = defaultdict[object, list[int]](list)
    everything = []
    for key, latency_ms in times:
        by_key[key].append(latency_ms)
        everything.append(latency_ms)
    return everything, by_key


def _quantiles(ordered: Sequence[int]) -> dict[str, int | None]:
    return {"p50_ms": _quantile(ordered, 0.5), "p95_ms": _quantile(ordered, 0.95)}


def _quantile(ordered: Sequence[int], share: float) -> int | None:
    if not ordered:
        return None
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


async def _charged_in_file(file: StateFile, query: UsageQuery) -> Mapping[Period, Amount]:
    """Return what the records of budgets in a state file say was charged, by period."""
    settings = load_settings(NO_DATABASE)
    records = file.records("budgets", BUDGETS_TTL_S)
    account_project = quota_project(settings.quota_namespace, query.project)
    return await charged(records, account_project, query.start, query.end, time_zone(settings.budgets.time_zone))


def _charged_in_nats(query: UsageQuery) -> Mapping[Period, Amount]:
    """Return what the records of budgets in NATS say was charged, by period."""

    async def work(bootstrap: Bootstrap, _: BusClient) -> Mapping[Period, Amount]:
        return await charged_in_nats(bootstrap, query, NatsUser.GATEWAY)

    return with_nats(work, user=NatsUser.GATEWAY)


async def _amount_of_rows(state: StateFile, project: str, period: Period) -> Amount:
    """Return what the rows of a project in a period have cost."""
    statement = (
        "SELECT coalesce(sum(requests), 0), coalesce(sum(tokens), 0) FROM calls "
        "WHERE project = ? AND at >= ? AND at < ?"
    )
    [(requests, tokens)] = await state.read(statement, (project, period.start, period.end))
    return Amount(requests, tokens)
