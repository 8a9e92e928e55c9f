"""The rows of one call in the kernel's database, for `openapi-tool inspect`: inbox rows, edges, cards.

The cards have the arguments and the result of the call, the inbox rows announce the result to the agent, and the edges
record who sent what to whom.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from openapi_tool.kernel.postgres.single_connection import connected
from openapi_tool.kernel.postgres.sizes import MAX_HEADER_BYTES, fits
from openapi_tool.kernel.postgres.statements import STATEMENTS
from openapi_tool.options.postgres import PoolOptions

_TIMEOUT_S = 10.0  # of a query

# The kernel's index is on the hash of the id, so the condition compares both.
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


async def call_rows(pool: PoolOptions, project_id: str, tool_call_id: str) -> CallRows:
    """Return the rows of a call. Raises Unavailable, also for a database of another version."""
    queries = (STATEMENTS[pool.version].TIMELINE, _EDGES, _CARDS)
    async with connected(pool, _TIMEOUT_S) as connection:
        inbox, edges, cards = [await connection.fetch(query, project_id, tool_call_id) for query in queries]
    return CallRows(
        inbox=[dict(row) for row in inbox],
        edges=[dict(row) for row in edges],
        cards=[dict(row) for row in cards],
    )
