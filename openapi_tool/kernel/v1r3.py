"""SQL of protocol v1r3 (protocol sections 3, 4, 6)."""

from __future__ import annotations

from typing import Any

from openapi_tool.kernel import commit, load
from openapi_tool.kernel.commit import SENT_LATELY, UNREAD, Mode, writes
from openapi_tool.kernel.load import CALL, COLUMNS
from openapi_tool.kernel.newest_rows import TURN_ROWS
from openapi_tool.kernel.sizes import MAX_HEADER_BYTES
from openapi_tool.protocol import headers as header
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.report import Report

VERSION = "v1r3"
INBOX_COLUMN = "traceparent"  # only v1r3 has it: `inspection` tells versions apart by it

# An inbox row has neither channel nor headers, so those that the doorbell of an earlier report needs are built here; $6
# is the command's channel.
_HEADERS = f"""jsonb_build_object(
        '{header.CHANNEL}', $6::text, '{header.AGENT}', agent_id, '{header.DEPTH}', recursion_depth,
        '{header.TRACEPARENT}', left(traceparent, 256),
        '{header.TRACESTATE}', case when octet_length(tracestate) <= {MAX_HEADER_BYTES} then tracestate end
    )"""

LOAD = f"""
select
{COLUMNS}
from (select 1) as one
{CALL}
{load.written(_HEADERS)}"""  # noqa: S608 - constants only

TIMELINE = """
select message_type, inbox_id, agent_id, status, left(traceparent, 64) as traceparent, created_at, processed_at
from state.agent_inbox
where project_id = $1 and message_type = 'tool_result' and md5(correlation_id) = md5($2) and correlation_id = $2
order by created_at limit 10
"""

# The parameters are those of `report_values`, in its order. A missing request edge is added. Another transaction may
# add it at the same time: then the unique index decides.
_INBOX = f"""
request as (
    insert into state.execution_edges (
        edge_id, project_id, channel_id, primitive, edge_phase, source_agent_id, source_agent_turn_id, source_step_id,
        target_agent_id, target_agent_turn_id, correlation_id, recursion_depth, trace_id
    )
    select $15, $1, $5, 'tool_call', 'request', $4, $7, $13, $4, $7, $6, $11, $12 from card
    where not exists (
        select from state.execution_edges
        where project_id = $1 and md5(correlation_id) = md5($6) and correlation_id = $6 and edge_phase = 'request'
    )
    on conflict {commit.EDGE_KEY} do nothing
), inbox as (
    insert into state.agent_inbox (
        inbox_id, project_id, agent_id, message_type, enqueue_mode, correlation_id, recursion_depth, traceparent,
        tracestate, trace_id, parent_step_id, source_agent_id, payload, status
    )
    select $3, $1, $4, 'tool_result', null, $6, $11, $19, $20, $12, $13, $10, $8, 'pending' from card
    returning inbox_id
)
"""  # noqa: S608 - constants only

# There is no row of the waiting turn that could have been deleted since the load.
# A row's turn is in its payload; a large one, which no worker writes, is not read. There are no anchor rows: the
# commands of a step ($13) have cards.
_BUSY = f"""exists (
            select from (
                select message_type, status, correlation_id, created_at,
                    case when pg_column_size(payload) <= {MAX_HEADER_BYTES} then payload end as payload
                from state.agent_inbox
                where project_id = $1 and agent_id = $4 and {UNREAD}
                order by created_at desc limit {TURN_ROWS}
            ) as newest
            where message_type in ('tool_result', 'timeout') and status in ('pending', 'processing')
                and correlation_id <> $6 and payload ->> 'agent_turn_id' = $7
                and payload ->> 'turn_epoch' is not distinct from $8::jsonb ->> 'turn_epoch'
        ) or exists (
            select from cards
            where metadata ->> 'agent_turn_id' = $7 and metadata ->> 'step_id' = $13
                and metadata ->> 'type' = 'tool.call' and tenant_id = $1 and tool_call_id <> $6 and {SENT_LATELY}
        )"""  # noqa: S608 - constants only

COMMIT, REPORT = writes(_INBOX, accepted="true", edge_turn="null", busy=_BUSY, first=21)
SAMPLE_COMMIT = commit.sample_commit("x", "x")

call_records = load.call_records


def call_values(command: Command) -> tuple[Any, ...]:
    """Return the parameters of LOAD."""
    return load.call_values(command, command.identity.channel_id)


def report_values(card_id: str, report: Report, mode: Mode, quiet_s: float | None) -> tuple[Any, ...]:
    """Return the parameters of REPORT."""
    headers = report.context_headers
    own = headers[header.TRACEPARENT], headers.get(header.TRACESTATE)
    return commit.report_values(card_id, report, mode, quiet_s, *own)
