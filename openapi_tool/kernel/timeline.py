"""Rows of one call for `openapi-tool inspect`; read only, scoped by project, every look-up by an index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import asyncpg

from openapi_tool.kernel.failures import translate_connection_errors, translate_statement_errors
from openapi_tool.kernel.fragments import MAX_HEADER_BYTES, fits
from openapi_tool.kernel.inspection import refuse_other_version
from openapi_tool.kernel.statements import STATEMENTS

_TIMEOUT_S = 10.0

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
    """Rows of one call, as dictionaries of their columns, oldest first."""

    inbox: list[dict[str, Any]] = field(default_factory=list)
    edges: list[dict[str, Any]] = field(default_factory=list)
    cards: list[dict[str, Any]] = field(default_factory=list)


async def call_rows(dsn: str, version: str, project_id: str, tool_call_id: str) -> CallRows:
    """Return the rows of a call in a database of this protocol version. Raises Unavailable."""
    statements = STATEMENTS[version]
    queries = (statements.TIMELINE, _EDGES, _CARDS)
    with translate_connection_errors():
        connection = await asyncpg.connect(dsn, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S)
    try:
        with translate_statement_errors():
            await refuse_other_version(connection, statements)
            results = [await connection.fetch(query, project_id, tool_call_id) for query in queries]
    finally:
        await connection.close(timeout=_TIMEOUT_S)
    return CallRows(*([dict(row) for row in rows] for rows in results))
