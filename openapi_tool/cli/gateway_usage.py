"""What the calls of a project have cost in a gateway, from the rows of its state, for `openapi-tool usage`."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openapi_tool.cli.gateway import with_state
from openapi_tool.cli.kernel import NO_DATABASE, charged_in_nats, with_nats
from openapi_tool.gateway.opening import NATS
from openapi_tool.gateway.state import BUDGETS_TTL_S
from openapi_tool.gateway.usage import COLUMNS
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.options.budgets import time_zone
from openapi_tool.protocol.projects import quota_project
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.charged import WithoutResult, charged, without_result
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


def usage(
    path: Path, project: str, start: datetime, end: datetime, by: By
) -> tuple[dict[str, Any], list[dict[str, Any]], WithoutResult]:
    """Return the sum over all calls of a project, the sums by `by`, and what was charged for calls without a row.

    Days are in ascending order, other sums by tokens, the largest first.
    """
    selection = _Selection(project, start, end)
    charged_by_nats = _charged_in_nats(selection) if path == NATS else None

    async def work(state: StateFile) -> tuple[dict[str, Any], list[dict[str, Any]], WithoutResult]:
        total, rows = await state.run(lambda connection: _sums(connection, selection, by))
        held = await _charged_in_file(state, selection) if charged_by_nats is None else charged_by_nats
        stored = [await _amount_of_rows(state, project, period) for period in held]
        return total, rows, without_result(held, stored)

    return with_state(path, work, lambda rows: rows.of_project(project))


@dataclass(frozen=True, slots=True)
class _Selection:
    """The calls of a project that began at `start` or later, and before `end`."""

    project: str
    start: datetime
    end: datetime


def _sums(connection: sqlite3.Connection, selection: _Selection, by: By) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the sum over the selected rows, and the sums by `by`, with quantiles of the latency."""
    connection.row_factory = sqlite3.Row
    where = "FROM calls WHERE project = :project AND at >= :since AND at < :until"
    values = {
        "project": selection.project,
        "since": selection.start.timestamp(),
        "until": selection.end.timestamp(),
    }
    key = _KEYS[by]
    order = "key" if by is By.DAY else "tokens DESC, key"
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


async def _charged_in_file(file: StateFile, selection: _Selection) -> Mapping[Period, Amount]:
    """Return what the records of budgets in a state file say was charged, by period."""
    settings = load_settings(NO_DATABASE)
    records = file.records("budgets", BUDGETS_TTL_S)
    account_project = quota_project(settings.quota_namespace, selection.project)
    return await charged(
        records, account_project, selection.start, selection.end, time_zone(settings.budgets.time_zone)
    )


def _charged_in_nats(selection: _Selection) -> Mapping[Period, Amount]:
    """Return what the records of budgets in NATS say was charged, by period."""

    async def work(bootstrap: Bootstrap, _: BusClient) -> Mapping[Period, Amount]:
        return await charged_in_nats(bootstrap, selection.project, selection.start, selection.end, NatsUser.GATEWAY)

    return with_nats(work, user=NatsUser.GATEWAY)


async def _amount_of_rows(state: StateFile, project: str, period: Period) -> Amount:
    """Return what the rows of a project in a period have cost."""
    query = (
        "SELECT coalesce(sum(requests), 0), coalesce(sum(tokens), 0) FROM calls "
        "WHERE project = ? AND at >= ? AND at < ?"
    )
    [(requests, tokens)] = await state.read(query, (project, period.start, period.end))
    return Amount(requests, tokens)
