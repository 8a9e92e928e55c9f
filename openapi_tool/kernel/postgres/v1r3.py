"""SQL of protocol v1r3 (protocol sections 3, 4, 6), built from the parts in `load.py` and `commit.py`.

In this version no row describes the turn (run of an agent) that waits for a result. A row of an agent's inbox names its
turn in the payload, and has columns instead of headers.
"""

from __future__ import annotations

from typing import Any

from openapi_tool.kernel.postgres import commit, load
from openapi_tool.kernel.postgres.commit import RECENT, SENT_LATELY, Mode, commit_and_report
from openapi_tool.kernel.postgres.load import CALL, COLUMNS
from openapi_tool.kernel.postgres.newest_rows import TURN_ROWS
from openapi_tool.kernel.postgres.sizes import MAX_HEADER_BYTES
from openapi_tool.protocol import headers as header
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.report import Report

VERSION = "v1r3"
INBOX_COLUMN = "traceparent"

# The doorbell of an earlier report needs headers. In this version an inbox row has none, so they are built from its
# columns; the channel, which it lacks, is that of the command ($6).
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
{load.joins_of_written_rows(_HEADERS)}"""  # noqa: S608 - constants only

TIMELINE = """
select message_type, inbox_id, agent_id, status, left(traceparent, 64) as traceparent, created_at, processed_at
from state.agent_inbox
where project_id = $1 and message_type = 'tool_result' and md5(correlation_id) = md5($2) and correlation_id = $2
order by created_at limit 10
"""

# In this version the call may lack its request edge, which is then added. Another transaction may add it at the same
# time: then the unique index decides.
_INBOX = """
request as (
    insert into state.execution_edges (
        edge_id, project_id, channel_id, primitive, edge_phase, source_agent_id, source_agent_turn_id, source_step_id,
        target_agent_id, target_agent_turn_id, correlation_id, recursion_depth, trace_id
    )
    select :request_edge_id, :project_id, :channel_id, 'tool_call', 'request', :agent_id, :agent_turn_id,
        :parent_step_id, :agent_id, :agent_turn_id, :tool_call_id, :depth, :trace_id
    from card
    where not exists (
        select from state.execution_edges
        where project_id = :project_id and md5(correlation_id) = md5(:tool_call_id)
            and correlation_id = :tool_call_id and edge_phase = 'request'
    )
    on conflict (project_id, md5(correlation_id), primitive, edge_phase) do nothing
), inbox as (
    insert into state.agent_inbox (
        inbox_id, project_id, agent_id, message_type, enqueue_mode, correlation_id, recursion_depth, traceparent,
        tracestate, trace_id, parent_step_id, source_agent_id, payload, status
    )
    select :inbox_id, :project_id, :agent_id, 'tool_result', null, :tool_call_id, :depth, :traceparent,
        :tracestate, :trace_id, :parent_step_id, :actor_id, :payload, 'pending'
    from card
    returning inbox_id
)
"""

# The first part finds unread results of the turn. A row's turn is in its payload; a large payload, which no worker
# writes, is not read. The second part finds other commands of the step (`parent_step_id`), by their cards.
_BUSY = f"""exists (
            select from (
                select message_type, status, correlation_id, created_at,
                    case when pg_column_size(payload) <= {MAX_HEADER_BYTES} then payload end as payload
                from state.agent_inbox
                where project_id = :project_id and agent_id = :agent_id and {RECENT}
                order by created_at desc limit {TURN_ROWS}
            ) as newest
            where message_type in ('tool_result', 'timeout') and status in ('pending', 'processing')
                and correlation_id <> :tool_call_id and payload ->> 'agent_turn_id' = :agent_turn_id
                and payload ->> 'turn_epoch' is not distinct from :payload::jsonb ->> 'turn_epoch'
        ) or exists (
            select from cards
            where metadata ->> 'agent_turn_id' = :agent_turn_id and metadata ->> 'step_id' = :parent_step_id
                and metadata ->> 'type' = 'tool.call' and tenant_id = :project_id and tool_call_id <> :tool_call_id
                and {SENT_LATELY}
        )"""  # noqa: S608 - constants only

# A report is accepted in any case: there is no row of the waiting turn that could have been deleted since the load.
COMMIT, REPORT = commit_and_report(
    _INBOX, accepted="true", edge_turn="null", busy=_BUSY, own_parameters=("traceparent", "tracestate")
)
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
