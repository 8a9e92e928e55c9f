"""Sums over the calls of a project, for `openapi-tool usage` and `budgets`, read from the cards of their results.

A *card* is a JSON document in the table `cards`. Each call has one with its result (tool.result), which also says what
the call has used.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from openapi_tool.kernel.postgres.single_connection import connected
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.options.postgres import PoolOptions

MAX_ROWS = 1_000  # of a table of usage, beside the row with the total
_TIMEOUT_S = 60.0  # of a query over many calls

# SQL expressions by which rows are grouped.
_KEYS = {
    By.TOOL: "function_name",
    By.AGENT: "agent_id",
    By.DAY: "to_char(created_at at time zone 'UTC', 'YYYY-MM-DD')",
    By.SESSION: "session",
    By.ERROR: "error_code",
}

# The first row is the total over all calls (`grouping sets ((), …)`); the groups follow. Cards of a time are found by
# their ids, which begin with it. `tool_output` is in the card's metadata, `output` is its content. If `tool_output` has
# the member `truncated`, it has all figures of the result. Then `output` is null, so that no large content is read. A
# figure that a card of an earlier version lacks is null, not 0.
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


async def usage(
    pool: PoolOptions, project_id: str, since: datetime, until: datetime, actor_id: str, by: By
) -> list[dict[str, Any]]:
    """Return a row with the total, then at most `MAX_ROWS` rows grouped by `by`: days ascending, others by tokens.

    A figure is None where no card records it. Raises Unavailable, also for a database of another version.
    """
    values = (project_id, first_card_id(since), first_card_id(until), actor_id, MAX_ROWS + 1)
    async with connected(pool, _TIMEOUT_S) as connection:
        rows = await connection.fetch(usage_query(by), *values)
    return [dict(row) for row in rows]


async def requests_and_tokens(
    pool: PoolOptions, project_id: str, spans: Sequence[tuple[datetime, datetime]], actor_id: str
) -> list[tuple[int, int]]:
    """Return the requests and tokens that the cards of each span count. Raises Unavailable, as `usage` does."""
    totals = []
    async with connected(pool, _TIMEOUT_S) as connection:
        for since, until in spans:
            values = (project_id, first_card_id(since), first_card_id(until), actor_id, 1)
            [total] = await connection.fetch(usage_query(By.TOOL), *values)  # the limit 1 leaves the row with the total
            totals.append((total["requests"] or 0, total["tokens"] or 0))
    return totals


def usage_query(by: By) -> str:
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


def _number(value: str) -> str:
    """Return the SQL of a JSON value as a number; null for other types and impossible numbers."""
    number = f"case when jsonb_typeof({value}) = 'number' then ({value})::numeric end"
    return f"case when {number} between 0 and 1e12 then {number} end"
