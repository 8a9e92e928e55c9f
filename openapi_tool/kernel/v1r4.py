"""Protocol v1r4 in the kernel's tables: one statement to load a call, one to commit its result, and their rows.

Schema: protocol sections 3, 4 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.protocol.cards import MAX_CONTENT_BYTES
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import (
    CallRecords,
    CardRecord,
    DefinitionRecord,
    EarlierResult,
    RequestEdgeRecord,
    WaitingTurnRecord,
)
from openapi_tool.protocol.report import Report
from openapi_tool.tools.bounds import MAX_ROW_BYTES
from openapi_tool.tools.naming import unmangled

_BEST_COMPRESSION = 256
_MAX_HEADER_BYTES = 64 * 1024  # of a turn's headers and of a card's metadata; NATS allows no more in headers
_MAX_NAME_CHARS = 4_096  # of a value that becomes a token of a subject or is compared with a name
_MAX_STORED_BYTES = 256 * 1024  # of an earlier result, in its stored (compressed) form
_NEWEST_ROWS = 1_000  # of an agent's inbox, among which the turn of a call without an anchor is searched
_MAX_EDGES = 100  # of a call, of which the oldest is used; the kernel writes two


def _fits(column: str, most: int) -> str:
    """Return the SQL condition that the text of a jsonb column has at most `most` bytes.

    The stored size, possibly compressed, is read without unpacking the value, and decides most cases; only a value
    between both bounds is converted to text. Every column of a call is measured before it is read: 24 calls at once
    with 30 MB each took 1 GB of memory in the executor.
    """
    return (
        f"case when pg_column_size({column}) <= {most // _BEST_COMPRESSION} then true "
        f"else pg_column_size({column}) <= {most} and octet_length({column}::text) <= {most} end"
    )


_CALL_CARD = f"""
    select
        card_id, left(tool_call_id, {_MAX_HEADER_BYTES}) as tool_call_id,
        measured.content_fits and measured.metadata_fit as fits,
        case when measured.content_fits then content end as content,
        case when measured.metadata_fit then metadata end as metadata
    from cards
    cross join lateral (
        select
            {_fits("content", MAX_CONTENT_BYTES)} as content_fits,
            {_fits("metadata", _MAX_HEADER_BYTES)} as metadata_fit
    ) as measured
"""  # noqa: S608 - constants only

# A definition is measured in the same way, but by the sum of two columns. An uncompressed jsonb value may be larger
# than its text, for a definition within the bounds by at most _JSONB_OVERHEAD. So a larger stored size is refused
# without unpacking.
_JSONB_OVERHEAD = 65_536
_DEFINITION = f"""
    select
        tool_name, left(after_execution, 16) as after_execution, fits.fits,
        case when fits.fits then parameters end as parameters, case when fits.fits then options end as options,
        case when fits.fits then jsonb_typeof(parameters) = 'object' and jsonb_typeof(options) = 'object' end as objects
    from resource.tools
    cross join lateral (
        select case
            when stored.size <= {MAX_ROW_BYTES // _BEST_COMPRESSION} then true
            when stored.size > {MAX_ROW_BYTES + _JSONB_OVERHEAD} then false
            else octet_length(parameters::text) + octet_length(options::text) <= {MAX_ROW_BYTES}
        end as fits
        from (select pg_column_size(parameters) + pg_column_size(options) as size) as stored
    ) as fits
"""  # noqa: S608 - constants only

_READ_AGAIN = f"reported.inbox_id is null and pg_column_size(content) <= {_MAX_STORED_BYTES}"

# `read_only`: a standby may lag behind the primary. A row that is missing there proves nothing, so the store discards
# the load.
#
# `limit 1`, even if a key is unique: PostgreSQL then plans each subquery as an index look-up. Without it, a plan made
# while a table is small joins all rows of the project, and a session keeps its plan while the table grows.
LOAD = f"""
select
    c.card_id as call_card_id, c.tool_call_id as call_tool_call_id, c.content as call_content,
    c.metadata as call_metadata, c.fits as call_fits,
    t.tool_name, t.after_execution, t.parameters, t.options, t.fits as tool_fits, t.objects as tool_objects,
    left(a.worker_target, {_MAX_NAME_CHARS}) as worker_target,
    coalesce(anchor.inbox_id, turn.inbox_id) as waiting_inbox_id,
    coalesce(anchor.message_type, turn.message_type) as waiting_message_type,
    left(coalesce(anchor.channel_id, turn.channel_id), {_MAX_NAME_CHARS}) as waiting_channel_id,
    coalesce(anchor.agent_turn_id, turn.agent_turn_id) as waiting_turn_id,
    coalesce(anchor.turn_epoch, turn.turn_epoch) as waiting_epoch,
    case when headers.fit then headers.headers end as waiting_headers, headers.fit as waiting_fits,
    e.edge_id, e.recursion_depth,
    r.card_id as result_card_id, r.author as result_author, r.status as result_status, r.after as result_after,
    r.deleted_at is null as result_live, r.of_call as result_of_call,
    reported.inbox_id as reported_inbox_id, reported.status as report_status,
    reported.context_headers as report_headers, current_setting('transaction_read_only') = 'on' as read_only
from (select 1) as one
left join lateral (
    {_CALL_CARD}
    where card_id = $2 and tenant_id = $1 and deleted_at is null
    union all
    {_CALL_CARD}
    where $2::text is null and tool_call_id = $3 and tenant_id = $1 and deleted_at is null
        and metadata ->> 'type' = 'tool.call'
    limit 1
) as c on true
cross join lateral (
    select
        coalesce($3, call.tool_call_id) as tool_call_id,
        coalesce($4, call.metadata ->> 'author_id') as agent_id,
        coalesce($5, call.metadata ->> 'agent_turn_id') as agent_turn_id
    from (select 1) as one
    left join lateral (
        select c.tool_call_id, c.metadata where c.metadata ->> 'type' = 'tool.call'
    ) as call on true
) as k
left join lateral (
    {_DEFINITION}
    where project_id = $1 and tool_name in ($7, $8)
    order by tool_name <> $7 limit 1
) as t on true
left join lateral (
    select worker_target from resource.project_agents
    where project_id = $1 and agent_id = k.agent_id
    limit 1
) as a on true
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
        order by created_at desc limit {_NEWEST_ROWS}
    ) as newest
    where newest.agent_turn_id = k.agent_turn_id and ($6::bigint = 0 or newest.turn_epoch = $6)
        and newest.message_type in ('turn', 'ui_action')
    order by newest.created_at desc limit 1
) as turn on true
cross join lateral (
    select headers, {_fits("headers", _MAX_HEADER_BYTES)} as fit
    from (select coalesce(anchor.context_headers, turn.context_headers) as headers) as h
) as headers
left join lateral (
    select edge_id, recursion_depth from (
        select edge_id, recursion_depth, created_at from state.execution_edges
        where project_id = $1 and md5(correlation_id) = md5(k.tool_call_id) and correlation_id = k.tool_call_id
            and edge_phase = 'request'
        limit {_MAX_EDGES}
    ) as requests
    order by created_at limit 1
) as e on true
left join lateral (
    select
        inbox_id, left(status, 16) as status,
        case when {_fits("context_headers", _MAX_HEADER_BYTES)} then context_headers else '{{}}' end as context_headers
    from state.agent_inbox
    where project_id = $1 and message_type = 'tool_result' and md5(correlation_id) = md5(k.tool_call_id)
    limit 1
) as reported on true
left join lateral (
    select
        card_id, deleted_at, tool_call_id = k.tool_call_id as of_call,
        case when {_fits("metadata", _MAX_HEADER_BYTES)} then left(metadata ->> 'author_id', {_MAX_NAME_CHARS}) end
            as author,
        case when {_READ_AGAIN} then left(content ->> 'status', {_MAX_NAME_CHARS}) end as status,
        case when {_READ_AGAIN} then left(content ->> 'after_execution', {_MAX_NAME_CHARS}) end as after
    from cards
    where tenant_id = $1 and md5(tool_call_id) = md5(k.tool_call_id)  -- alone, as in the unique index
        and metadata ->> 'type' = 'tool.result'
    limit 1
) as r on true
"""  # noqa: S608 - constants only

ANSWERED = """
select exists (
    select from cards
    where tenant_id = $1 and md5(tool_call_id) = md5($2) and tool_call_id = $2
        and metadata ->> 'type' = 'tool.result'
)
"""

# Uses the index of turn, step and type; `limit` bounds the cost of a step with very many calls.
LAST_ANSWER = f"""
select extract(epoch from now() - max(created_at))::float8 from (
    select created_at from cards
    where metadata ->> 'agent_turn_id' = $2 and metadata ->> 'step_id' = $3 and metadata ->> 'type' = 'tool.result'
        and tenant_id = $1 and deleted_at is null
    limit {_NEWEST_ROWS}
) as answers
"""  # noqa: S608 - constants only

_REPORT = """
inbox as (
    insert into state.agent_inbox (
        inbox_id, project_id, agent_id, channel_id, message_type, enqueue_mode, correlation_id,
        agent_turn_id, turn_epoch, context_headers, payload, status, retry_count
    )
    select $3, $1, $4, $5, 'tool_result', null, $6, $7, $8, $9, $10, 'pending', 0 from card
    returning inbox_id
), edge as (
    insert into state.execution_edges (
        edge_id, project_id, channel_id, primitive, edge_phase, source_agent_id, target_agent_id,
        target_agent_turn_id, correlation_id, recursion_depth, trace_id, parent_step_id, metadata
    )
    select $11, $1, $5, 'report', 'response', $12, $4, $7, $6, $13, $14, $15, $16 from inbox
    on conflict do nothing
)
select count(*) from inbox
"""

# Check turn and request edge again: either may have been deleted since the load.
_ACCEPTED = """
    exists (select from state.agent_inbox where inbox_id = $17 and project_id = $1)
    and exists (select from state.execution_edges where edge_id = $18 and project_id = $1)
"""

# Data-modifying CTEs make all four inserts one statement and so one transaction without BEGIN and COMMIT. If an inbox
# row exists without its card, the insert raises a unique violation, which rolls the card back.
COMMIT = f"""
with card as (
    insert into cards (card_id, tenant_id, content, tool_call_id, metadata)
    select $2, $1, $19, $6, $20 where {_ACCEPTED}
    on conflict do nothing
    returning card_id
), artifact as (
    insert into cards (card_id, tenant_id, content, metadata, ttl_seconds, expires_at)
    select $21, $1, $22, $23, $24::int, now() + make_interval(secs => $24::int) from card where $21::text is not null
), {_REPORT}
"""  # noqa: S608 - constants only

REPORT = f"""
with card as (
    select card_id from cards
    where card_id = $2 and tenant_id = $1 and deleted_at is null and {_ACCEPTED}
), {_REPORT}
"""  # noqa: S608 - constants only

ARTIFACT = """
select
    (metadata ->> 'chars')::int as chars, metadata ->> 'sha256' as sha256, metadata -> 'items' as items,
    substr(content ->> 'text', $4::int + 1, $5::int) as text
from cards
where card_id = $3 and tenant_id = $1 and metadata ->> 'agent_id' = $2 and metadata ->> 'type' = 'tool.artifact'
    and deleted_at is null and (expires_at is null or expires_at > now())
"""


def call_values(command: Command) -> tuple[Any, ...]:
    """Return the parameters of LOAD; $1 is the project."""
    identity, tool_name = command.identity, command.tool_name
    return (
        identity.project_id,
        command.card_id,
        identity.tool_call_id,
        identity.agent_id,
        identity.agent_turn_id,
        identity.turn_epoch or 0,
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
        report.turn_epoch,
        report.context_headers,
        report.payload,
        report.edge_id,
        report.actor_id,
        report.depth,
        report.trace_id,
        report.parent_step_id,
        report.edge_metadata,
        report.waiting_inbox_id,
        report.request_edge_id,
    )


def call_records(row: Mapping[str, Any]) -> CallRecords:
    """Return the records of a call from a row of LOAD."""
    return CallRecords(
        card=_card(row),
        tool=_tool(row),
        worker_target=row["worker_target"],
        waiting_turn=_waiting_turn(row),
        request_edge=None if row["edge_id"] is None else RequestEdgeRecord(row["edge_id"], row["recursion_depth"]),
        earlier=_earlier(row),
        reported_inbox_id=row["reported_inbox_id"],
    )


def _card(row: Mapping[str, Any]) -> CardRecord | None:
    if row["call_card_id"] is None:
        return None
    metadata = row["call_metadata"]
    return CardRecord(
        card_id=row["call_card_id"],
        tool_call_id=row["call_tool_call_id"],
        content=row["call_content"],
        metadata=metadata if isinstance(metadata, dict) else {},
        oversized=row["call_fits"] is False,
    )


def _tool(row: Mapping[str, Any]) -> DefinitionRecord | None:
    if row["tool_name"] is None:
        return None
    parameters, options, oversized = row["parameters"], row["options"], row["tool_fits"] is False
    return DefinitionRecord(
        tool_name=row["tool_name"],
        after_execution=row["after_execution"],
        parameters=parameters,
        options=options,
        oversized=oversized,
        unreadable=not oversized and row["tool_objects"] and (parameters is None or options is None),
    )


def _waiting_turn(row: Mapping[str, Any]) -> WaitingTurnRecord | None:
    if row["waiting_inbox_id"] is None:
        return None
    headers = row["waiting_headers"]
    return WaitingTurnRecord(
        inbox_id=row["waiting_inbox_id"],
        message_type=row["waiting_message_type"],
        channel_id=row["waiting_channel_id"],
        agent_turn_id=row["waiting_turn_id"],
        turn_epoch=row["waiting_epoch"],
        context_headers=headers if isinstance(headers, dict) else {},
        oversized=row["waiting_fits"] is False,
    )


def _earlier(row: Mapping[str, Any]) -> EarlierResult | None:
    if row["result_card_id"] is None:
        return None
    return EarlierResult(
        card_id=row["result_card_id"],
        author_id=row["result_author"],
        live=row["result_live"],
        content={"status": row["result_status"], "after_execution": row["result_after"]},
        report_headers=row["report_headers"],
        report_status=row["report_status"],
        of_call=row["result_of_call"],
    )
