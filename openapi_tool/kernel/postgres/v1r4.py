"""SQL of protocol v1r4 (protocol sections 3, 4, 6), built from the parts in `load.py` and `commit.py`.

In this version a row of an agent's inbox names its turn, the run of the agent, in the columns `agent_turn_id` and
`turn_epoch`; the epoch rises whenever a turn is restarted. With each command the kernel writes an *anchor* row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.kernel.postgres import commit, load
from openapi_tool.kernel.postgres.commit import RECENT, SENT_LATELY, Mode, commit_and_report
from openapi_tool.kernel.postgres.load import CALL, COLUMNS
from openapi_tool.kernel.postgres.newest_rows import NEWEST_ROWS, TURN_ROWS
from openapi_tool.kernel.postgres.sizes import MAX_HEADER_BYTES, MAX_NAME_CHARS, fits
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.jsontext import as_object
from openapi_tool.protocol.records import CallRecords, WaitingTurnRecord
from openapi_tool.protocol.report import Report

VERSION = "v1r4"
INBOX_COLUMN = "context_headers"

# Headers of the row that reports an earlier result; empty if they are too large.
_HEADERS = f"case when {fits('context_headers', MAX_HEADER_BYTES)} then context_headers else '{{}}' end"

# The row that describes the waiting turn is the call's anchor row (`anchor`), which the kernel writes with the command.
# Without one it is the turn's newest row (`turn`). $6 is the command's epoch, 0 if it is unknown.
LOAD = f"""
select
{COLUMNS},
    coalesce(anchor.inbox_id, turn.inbox_id) as waiting_inbox_id,
    coalesce(anchor.message_type, turn.message_type) as waiting_message_type,
    left(coalesce(anchor.channel_id, turn.channel_id), {MAX_NAME_CHARS}) as waiting_channel_id,
    coalesce(anchor.agent_turn_id, turn.agent_turn_id) as waiting_turn_id,
    coalesce(anchor.turn_epoch, turn.turn_epoch) as waiting_epoch,
    case when headers.fit then headers.headers end as waiting_headers, headers.fit as waiting_fits
from (select 1) as one
{CALL}
left join lateral (
    select i.* from state.agent_inbox as i
    where i.project_id = $1 and i.message_type = 'command_anchor'
        and md5(i.correlation_id) = md5(k.tool_call_id) and i.correlation_id = k.tool_call_id
        and i.agent_id = k.agent_id and i.agent_turn_id = k.agent_turn_id
        and ($6::bigint = 0 or i.turn_epoch = $6)
    limit 1
) as anchor on true
left join lateral (
    select newest.* from (
        select inbox_id, message_type, channel_id, agent_turn_id, turn_epoch, context_headers, created_at
        from state.agent_inbox
        where anchor.inbox_id is null and project_id = $1 and agent_id = k.agent_id
        order by created_at desc limit {NEWEST_ROWS}
    ) as newest
    where newest.agent_turn_id = k.agent_turn_id and ($6::bigint = 0 or newest.turn_epoch = $6)
        and newest.message_type in ('turn', 'ui_action')
    order by newest.created_at desc limit 1
) as turn on true
cross join lateral (
    select headers, {fits("headers", MAX_HEADER_BYTES)} as fit
    from (select coalesce(anchor.context_headers, turn.context_headers) as headers) as h
) as headers
{load.joins_of_written_rows(_HEADERS)}"""  # noqa: S608 - constants only

TIMELINE = """
select message_type, inbox_id, agent_id, left(channel_id, 128) as channel_id, agent_turn_id, turn_epoch, status,
    retry_count, left(last_error, 500) as last_error, left(context_headers ->> 'traceparent', 64) as traceparent,
    created_at, processed_at
from state.agent_inbox
where project_id = $1 and message_type in ('command_anchor', 'tool_result')
    and md5(correlation_id) = md5($2) and correlation_id = $2
order by created_at limit 10
"""

_INBOX = """
inbox as (
    insert into state.agent_inbox (
        inbox_id, project_id, agent_id, channel_id, message_type, enqueue_mode, correlation_id,
        agent_turn_id, turn_epoch, context_headers, payload, status, retry_count
    )
    select :inbox_id, :project_id, :agent_id, :channel_id, 'tool_result', null, :tool_call_id, :agent_turn_id,
        :turn_epoch, :context_headers, :payload, 'pending', 0
    from card
    returning inbox_id
)
"""

# The row of the waiting turn, or the request edge, may have been deleted since the load.
_ACCEPTED = """
    exists (select from state.agent_inbox where inbox_id = :waiting_inbox_id and project_id = :project_id)
    and exists (select from state.execution_edges where edge_id = :request_edge_id and project_id = :project_id)
"""

_STEP_S = 60
"""Upper bound in seconds of the time between the first and the last command of a step; in fact they are seconds
apart."""

# Among the newest rows of the agent, the first condition finds unread results of the turn, the second one other
# commands of the step. The kernel writes an anchor row right before it sends a command, and all anchor rows of a step
# have the same epoch.
_BUSY = f"""exists (
            select from (
                select message_type, correlation_id, agent_turn_id, turn_epoch, status, next_retry_at, created_at
                from state.agent_inbox
                where project_id = :project_id and agent_id = :agent_id
                    and created_at > (
                        select created_at - interval '{_STEP_S} s'
                        from state.agent_inbox where inbox_id = :waiting_inbox_id
                    )
                order by created_at desc limit {TURN_ROWS}
            ) as newest
            where agent_turn_id = :agent_turn_id and turn_epoch = :turn_epoch and correlation_id <> :tool_call_id and (
                (message_type in ('tool_result', 'timeout') and {RECENT}
                    and (status in ('pending', 'processing') or (status = 'deferred' and next_retry_at <= now())))
                or (message_type = 'command_anchor' and {SENT_LATELY})
            )
        )"""  # noqa: S608 - constants only

COMMIT, REPORT = commit_and_report(
    _INBOX,
    accepted=_ACCEPTED,
    edge_turn=":agent_turn_id",
    busy=_BUSY,
    own_parameters=("turn_epoch", "context_headers", "waiting_inbox_id"),
)
SAMPLE_COMMIT = commit.sample_commit(0, {}, "x")


def call_values(command: Command) -> tuple[Any, ...]:
    """Return the parameters of LOAD."""
    return load.call_values(command, command.identity.turn_epoch or 0)


def call_records(row: Mapping[str, Any]) -> CallRecords:
    """Return the records in a row of LOAD."""
    if row["waiting_inbox_id"] is None:
        return load.call_records(row)
    turn = WaitingTurnRecord(
        inbox_id=row["waiting_inbox_id"],
        message_type=row["waiting_message_type"],
        channel_id=row["waiting_channel_id"],
        agent_turn_id=row["waiting_turn_id"],
        turn_epoch=row["waiting_epoch"],
        context_headers=as_object(row["waiting_headers"]),
        oversized=row["waiting_fits"] is False,
    )
    return load.call_records(row, turn)


def report_values(card_id: str, report: Report, mode: Mode, quiet_s: float | None) -> tuple[Any, ...]:
    """Return the parameters of REPORT."""
    turn = report.acceptance.waiting_turn
    own = turn.turn_epoch, report.context_headers, turn.inbox_id
    return commit.report_values(card_id, report, mode, quiet_s, *own)
