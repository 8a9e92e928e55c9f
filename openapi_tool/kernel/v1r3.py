"""SQL of protocol v1r3 over the kernel's tables: statements, parameters, rows (protocol sections 3, 4, 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.kernel import fragments
from openapi_tool.kernel.fragments import CALL, COLUMNS, MAX_HEADER_BYTES
from openapi_tool.protocol import identity as header
from openapi_tool.protocol.command import Command, Report
from openapi_tool.protocol.records import CallRecords
from openapi_tool.tools.problems import unmangled

VERSION = "v1r3"
INBOX_COLUMN = "traceparent"

# An inbox row has no channel and no headers, so those that the doorbell of an earlier report needs are put together
# here; $6 is the channel of the command.
LOAD = f"""
select
{COLUMNS}
from (select 1) as one
{CALL}
{fragments.REQUEST_EDGE}
left join lateral (
    select
        inbox_id, left(status, 16) as status,
        jsonb_build_object(
            '{header.CHANNEL}', $6::text, '{header.AGENT}', agent_id, '{header.DEPTH}', recursion_depth,
            '{header.TRACEPARENT}', left(traceparent, 256),
            '{header.TRACESTATE}', case when octet_length(tracestate) <= {MAX_HEADER_BYTES} then tracestate end
        ) as context_headers
    from state.agent_inbox
    where project_id = $1 and message_type = 'tool_result' and md5(correlation_id) = md5(k.tool_call_id)
    limit 1
) as reported on true
{fragments.RESULT}
"""  # noqa: S608 - constants only

TIMELINE = """
select message_type, inbox_id, agent_id, status, left(traceparent, 64) as traceparent, created_at, processed_at
from state.agent_inbox
where project_id = $1 and message_type = 'tool_result' and md5(correlation_id) = md5($2) and correlation_id = $2
order by created_at limit 10
"""

HAS_RESULT, LAST_RESULT_AGE, ARTIFACT = fragments.HAS_RESULT, fragments.LAST_RESULT_AGE, fragments.ARTIFACT

# A missing request edge is added. Another transaction may add it at the same time: then the unique index decides.
_REPORT = """
request as (
    insert into state.execution_edges (
        edge_id, project_id, channel_id, primitive, edge_phase, source_agent_id, source_agent_turn_id, source_step_id,
        target_agent_id, target_agent_turn_id, correlation_id, recursion_depth, trace_id
    )
    select $17, $1, $5, 'tool_call', 'request', $4, $7, $15, $4, $7, $6, $13, $14 from card
    where not exists (
        select from state.execution_edges
        where project_id = $1 and md5(correlation_id) = md5($6) and correlation_id = $6 and edge_phase = 'request'
    )
    on conflict do nothing
), inbox as (
    insert into state.agent_inbox (
        inbox_id, project_id, agent_id, message_type, enqueue_mode, correlation_id, recursion_depth, traceparent,
        tracestate, trace_id, parent_step_id, source_agent_id, payload, status
    )
    select $3, $1, $4, 'tool_result', null, $6, $13, $8, $9, $14, $15, $12, $10, 'pending' from card
    returning inbox_id
), edge as (
    insert into state.execution_edges (
        edge_id, project_id, channel_id, primitive, edge_phase, source_agent_id, target_agent_id, correlation_id,
        recursion_depth, trace_id, parent_step_id, metadata
    )
    select $11, $1, $5, 'report', 'response', $12, $4, $6, $13, $14, $15, $16 from inbox
    on conflict do nothing
)
select count(*) from inbox
"""

# One statement, as in v1r4. There is no row of the waiting turn that could have been deleted since the load.
COMMIT = f"""
with card as (
    insert into cards (card_id, tenant_id, content, tool_call_id, metadata)
    values ($2, $1, $18, $6, $19)
    on conflict do nothing
    returning card_id
), artifact as (
    insert into cards (card_id, tenant_id, content, metadata, ttl_seconds, expires_at)
    select $20, $1, $21, $22, $23::int, now() + make_interval(secs => $23::int) from card where $20::text is not null
), {_REPORT}
"""  # noqa: S608 - constants only

REPORT = f"""
with card as (
    select card_id from cards where card_id = $2 and tenant_id = $1 and deleted_at is null
), {_REPORT}
"""  # noqa: S608 - constants only


def call_values(command: Command) -> tuple[Any, ...]:
    """Return the parameters of LOAD."""
    identity, tool_name = command.identity, command.tool_name
    return (
        identity.project_id,
        command.card_id,
        identity.tool_call_id,
        identity.agent_id,
        identity.agent_turn_id,
        identity.channel_id,
        tool_name,
        tool_name and unmangled(tool_name),
    )


def report_values(card_id: str, report: Report) -> tuple[Any, ...]:
    """Return the parameters of REPORT; COMMIT takes the same ones first."""
    return (
        report.project_id,
        card_id,
        report.inbox_id,
        report.agent_id,
        report.channel_id,
        report.tool_call_id,
        report.agent_turn_id,
        report.context_headers[header.TRACEPARENT],
        report.context_headers.get(header.TRACESTATE),
        report.payload,
        report.edge_id,
        report.actor_id,
        report.depth,
        report.trace_id,
        report.parent_step_id,
        report.edge_metadata,
        report.request_edge_id,
    )


def call_records(row: Mapping[str, Any]) -> CallRecords:
    """Return the records of a call from a row of LOAD; there is never a row of the waiting turn."""
    return CallRecords(
        card=fragments.card_of(row),
        tool=fragments.tool_of(row),
        worker_target=row["worker_target"],
        waiting_turn=None,
        request_edge=fragments.request_edge_of(row),
        earlier=fragments.earlier_of(row),
        reported_inbox_id=row["reported_inbox_id"],
    )
