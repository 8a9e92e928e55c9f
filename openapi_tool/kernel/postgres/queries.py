"""Queries of the command line: rows of one call, for `inspect`, and sums over calls, for `usage` and `budgets`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg

from openapi_tool.kernel.postgres.failures import (
    translate_connection_errors,
    translate_statement_errors,
)
from openapi_tool.kernel.postgres.inspection import refuse_other_version
from openapi_tool.kernel.postgres.sizes import MAX_HEADER_BYTES, fits
from openapi_tool.kernel.postgres.statements import STATEMENTS
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.options.postgres import PoolOptions

_TIMEOUT_S = 10.0  # to connect, and of a query of one call
_USAGE_TIMEOUT_S = 60.0  # of a query over many calls

# The kernel's index is on the hash of the id, so conditions on it compare both.
_EDGES = """
select edge_phase, source_agent_id, recursion_depth, trace_id, created_at
from state.execution_edges
where project_id = $1 and md5(correlation_id) = md5($2) and correlation_id = $2
order by created_at limit 10
"""
_CARDS = f"""
select card_id, metadata ->> 'type' as type, metadata ->> 'author_id' as author_id,
    metadata ->> 'function_name' as function_name, left(content ->> 'status', 32) as status,
    left(content #>> '{{error,code}}', 64) as error_code, left(content #>> '{{error,message}}', 500) as error_message,
    case when {fits("metadata", MAX_HEADER_BYTES)} then (metadata #> '{{tool_output,attempts}}')::text end
        as attempts,
    created_at
from cards
where tenant_id = $1 and tool_call_id = $2 and metadata ->> 'type' in ('tool.call', 'tool.result')
order by created_at limit 10
"""  # noqa: S608 - constants only


@dataclass(frozen=True, slots=True)
class CallRows:
    """Rows of one call by column, oldest first."""

    inbox: list[dict[str, Any]] = field(default_factory=list)
    edges: list[dict[str, Any]] = field(default_factory=list)
    cards: list[dict[str, Any]] = field(default_factory=list)


@asynccontextmanager
async def _connected(pool: PoolOptions, timeout_s: float) -> AsyncIterator[asyncpg.Connection]:
    """Connect, with a timeout for each statement. Raises Unavailable, also for errors in the context."""
    with translate_connection_errors():
        connection = await asyncpg.connect(pool.dsn, timeout=_TIMEOUT_S, command_timeout=timeout_s)
    try:
        with translate_statement_errors():
            await refuse_other_version(connection, STATEMENTS[pool.version])
            yield connection
    finally:
        await connection.close(timeout=_TIMEOUT_S)


async def call_rows(pool: PoolOptions, project_id: str, tool_call_id: str) -> CallRows:
    """Return the rows of a call. Raises Unavailable, also for a database of another version."""
    queries = (STATEMENTS[pool.version].TIMELINE, _EDGES, _CARDS)
    async with _connected(pool, _TIMEOUT_S) as connection:
        results = [await connection.fetch(query, project_id, tool_call_id) for query in queries]
    return CallRows(*([dict(row) for row in rows] for rows in results))


MAX_ROWS = 1_000  # of a table of usage

# Expressions by which rows are grouped.
_KEYS = {
    By.TOOL: "function_name",
    By.AGENT: "agent_id",
    By.DAY: "to_char(created_at at time zone 'UTC', 'YYYY-MM-DD')",
    By.SESSION: "session",
    By.ERROR: "error_code",
}

# `tool_output` is in the card's metadata, `output` is its content. If `tool_output` has the member `truncated`, it has
# all figures of the result. Then `output` is null, so that no large content is read. A figure that a card of an earlier
# version lacks is null, not 0.
_CALLS = """
with calls as materialized (
    select tool_call_id, created_at, metadata ->> 'function_name' as function_name,
        metadata -> 'tool_output' as tool_output,
        case when (metadata -> 'tool_output') ? 'truncated' then null else content end as output
    from cards
    where tenant_id = $1 and card_id >= $2 and card_id < $3
        and metadata ->> 'type' = 'tool.result' and metadata ->> 'author_id' = $4
), facts as (
    select tool_call_id, created_at, left(function_name, 128) as function_name,
        left(tool_output ->> 'session', 128) as session,
        coalesce(tool_output -> 'usage', output #> '{{result,usage}}') as usage,
        coalesce(tool_output -> 'cached', output #> '{{result,cached}}') = 'true' as cached,
        coalesce(tool_output -> 'truncated', output #> '{{result,truncated}}') = 'true' as truncated,
        coalesce(tool_output -> 'latency_ms', output #> '{{result,latency_ms}}') as latency_ms,
        tool_output -> 'retries' as retries,
        output is not null and output ->> 'status' is distinct from 'success' as failed,
        left(output #>> '{{error,code}}', 64) as error_code
    from calls
), numbers as (
    select function_name, session, created_at, cached, truncated, failed, error_code, {agent} as agent_id,
        {tokens} as tokens, {requests} as requests, {retries} as retries, {latency} as latency_ms
    from facts
)
select {key} as key, count(*) as calls, sum(tokens)::bigint as tokens, sum(requests)::bigint as requests,
    count(*) filter (where cached) as cache_hits, count(*) filter (where failed) as errors,
    count(*) filter (where truncated) as truncated, sum(retries)::bigint as retries,
    percentile_disc(0.5) within group (order by latency_ms)::bigint as p50_ms,
    percentile_disc(0.95) within group (order by latency_ms)::bigint as p95_ms,
    grouping({key}) = 1 as total
from numbers
group by grouping sets ((), ({key}))
order by total desc, {order}
limit $5
"""
_AGENT = """(
        select agent_id from state.agent_inbox i
        where i.project_id = $1 and i.message_type = 'tool_result'
            and md5(i.correlation_id) = md5(facts.tool_call_id) and i.correlation_id = facts.tool_call_id
    )"""


def _number(value: str) -> str:
    """Return the SQL of a JSON value as a number; null for other types and impossible numbers."""
    number = f"case when jsonb_typeof({value}) = 'number' then ({value})::numeric end"
    return f"case when {number} between 0 and 1e12 then {number} end"


def statement(by: By) -> str:
    """Return the query for `usage`; its parameters: project, first card id, card id after the last, actor id, limit."""
    return _CALLS.format(
        key=_KEYS[by],
        agent=_AGENT if by is By.AGENT else "null::text",
        order="key" if by is By.DAY else "tokens desc nulls last, key",
        tokens=_number("usage -> 'tokens'"),
        requests=_number("usage -> 'requests'"),
        retries=_number("retries"),
        latency=_number("latency_ms"),
    )


def first_card_id(moment: datetime) -> str:
    """Return the lowest id of a card of this moment: a UUID of version 7 begins with the time in ms (RFC 9562)."""
    return f"{max(0, int(moment.timestamp() * 1000)):012x}"


async def usage(
    pool: PoolOptions, project_id: str, since: datetime, until: datetime, actor_id: str, by: By
) -> list[dict[str, Any]]:
    """Return a row with the total, then at most `MAX_ROWS` rows grouped by `by`: days ascending, others by tokens.

    A figure is None where no card records it. Raises Unavailable, also for a database of another version.
    """
    values = (project_id, first_card_id(since), first_card_id(until), actor_id, MAX_ROWS + 1)
    async with _connected(pool, _USAGE_TIMEOUT_S) as connection:
        return [dict(row) for row in await connection.fetch(statement(by), *values)]


async def reported(
    pool: PoolOptions, project_id: str, spans: Sequence[tuple[datetime, datetime]], actor_id: str
) -> list[tuple[int, int]]:
    """Return the requests and tokens that the cards of each span count. Raises Unavailable, as `usage` does."""
    found = []
    async with _connected(pool, _USAGE_TIMEOUT_S) as connection:
        for since, until in spans:
            values = (project_id, first_card_id(since), first_card_id(until), actor_id, 1)
            [total] = await connection.fetch(statement(By.TOOL), *values)  # the limit 1 leaves the row with the total
            found.append((total["requests"] or 0, total["tokens"] or 0))
    return found
