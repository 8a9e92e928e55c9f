"""SQL of single look-ups, beside the statements of load and commit."""

from __future__ import annotations

from openapi_tool.kernel.postgres.newest_rows import NEWEST_ROWS

# Whether a call has a result. Parameters: project, tool call id. The kernel's index is on the hash of the id, so the
# condition compares both.
HAS_RESULT = """
select exists (
    select from cards
    where tenant_id = $1 and md5(tool_call_id) = md5($2) and tool_call_id = $2
        and metadata ->> 'type' = 'tool.result'
)
"""

# Age in seconds of the newest result of a step, null without one. Parameters: project, turn, step. Uses the index on
# turn, step and type; `limit` bounds the cost of a step with very many calls.
LAST_RESULT_AGE = f"""
select extract(epoch from now() - max(created_at))::float8 from (
    select created_at from cards
    where metadata ->> 'agent_turn_id' = $2 and metadata ->> 'step_id' = $3 and metadata ->> 'type' = 'tool.result'
        and tenant_id = $1 and deleted_at is null
    limit {NEWEST_ROWS}
) as results
"""  # noqa: S608 - constants only

# A part of the text of an artifact, the card with the whole text of a long result, and what describes the whole text.
# Parameters: project, agent, card, first character (from 0 on), number of characters.
ARTIFACT = """
select
    (metadata ->> 'chars')::int as chars, metadata ->> 'sha256' as sha256, metadata -> 'items' as items,
    substr(content ->> 'text', $4::int + 1, $5::int) as text
from cards
where card_id = $3 and tenant_id = $1 and metadata ->> 'agent_id' = $2 and metadata ->> 'type' = 'tool.artifact'
    and deleted_at is null and (expires_at is null or expires_at > now())
"""
