"""The SQL of a call: one statement to load it, one to commit its result (schema: protocol 3, 4, 6)."""

from __future__ import annotations

from openapi_tool.protocol.cards import MAX_CONTENT_BYTES
from openapi_tool.tools.bounds import MAX_ROW_BYTES

_BEST_COMPRESSION = 256
_MAX_HEADER_BYTES = 64 * 1024  # of a turn's headers and of a card's metadata: NATS takes no more headers than that
_MAX_NAME_CHARS = 4_096  # of what becomes a token of a subject, or is compared with a name


def _fits(column: str, most: int) -> str:
    """Whether the text of a jsonb column has at most so many bytes.

    It is measured as it is stored, compressed maybe; only where that leaves a doubt, as text. What every row of a call
    brings is measured: one of 30 MB, 24 times at once, was a gigabyte in here.
    """
    return (
        f"case when pg_column_size({column}) <= {most // _BEST_COMPRESSION} then true "
        f"else pg_column_size({column}) <= {most} and octet_length({column}::text) <= {most} end"
    )


_CALL_CARD = f"""
    select
        card_id, tool_call_id, measured.content_fits and measured.metadata_fit as fits,
        case when measured.content_fits then content end as content,
        case when measured.metadata_fit then metadata end as metadata
    from cards
    cross join lateral (
        select
            {_fits("content", MAX_CONTENT_BYTES)} as content_fits,
            {_fits("metadata", _MAX_HEADER_BYTES)} as metadata_fit
    ) as measured
"""  # noqa: S608 - constants only

# A definition is measured in the same way; one that does not fit is never read out. What is large as it is stored is
# not even unpacked: the few values that a definition may have take no more in jsonb than that beside their text.
_JSONB_OVERHEAD = 65_536
_DEFINITION = f"""
    select
        tool_name, left(after_execution, 16) as after_execution, fits.fits,
        case when fits.fits then parameters end as parameters, case when fits.fits then options end as options,
        jsonb_typeof(parameters) = 'object' and jsonb_typeof(options) = 'object' as objects
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

# `limit 1`, also where a key is unique: what has a limit is planned as a look-up of its own. Without it, a plan made
# while a table is small joins all rows of the project, and a session keeps its plan while the table grows.
LOAD = f"""
select
    c.card_id as call_card_id, c.tool_call_id as call_tool_call_id, c.content as call_content,
    c.metadata as call_metadata, c.fits as call_fits,
    t.tool_name, t.after_execution, t.parameters, t.options, t.fits as tool_fits, t.objects as tool_objects,
    left(a.worker_target, {_MAX_NAME_CHARS}) as worker_target,
    coalesce(anchor.inbox_id, turn.inbox_id) as target_inbox_id,
    coalesce(anchor.message_type, turn.message_type) as target_message_type,
    coalesce(anchor.channel_id, turn.channel_id) as target_channel_id,
    coalesce(anchor.agent_turn_id, turn.agent_turn_id) as target_turn_id,
    coalesce(anchor.turn_epoch, turn.turn_epoch) as target_epoch,
    case when headers.fit then headers.headers end as target_headers, headers.fit as target_fits,
    e.edge_id, e.recursion_depth,
    r.card_id as result_card_id, left(r.metadata ->> 'author_id', {_MAX_NAME_CHARS}) as result_author,
    left(r.content ->> 'status', {_MAX_NAME_CHARS}) as result_status,
    left(r.content ->> 'after_execution', {_MAX_NAME_CHARS}) as result_after, r.deleted_at is null as result_live,
    reported.inbox_id as reported_inbox_id, reported.context_headers as report_headers
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
    select i.* from state.agent_inbox as i
    where anchor.inbox_id is null and i.project_id = $1 and i.agent_id = k.agent_id
        and i.agent_turn_id = k.agent_turn_id and ($6::bigint = 0 or i.turn_epoch = $6)
        and i.message_type in ('turn', 'ui_action')
    order by i.created_at desc limit 1
) as turn on true
cross join lateral (
    select headers, {_fits("headers", _MAX_HEADER_BYTES)} as fit
    from (select coalesce(anchor.context_headers, turn.context_headers) as headers) as h
) as headers
left join lateral (
    select edge_id, recursion_depth from state.execution_edges
    where project_id = $1 and correlation_id = k.tool_call_id and edge_phase = 'request'
    order by created_at limit 1
) as e on true
left join lateral (
    select card_id, metadata, content, deleted_at from cards
    where tenant_id = $1 and md5(tool_call_id) = md5(k.tool_call_id) and tool_call_id = k.tool_call_id
        and metadata ->> 'type' = 'tool.result'
    limit 1
) as r on true
left join lateral (
    select
        inbox_id,
        case when {_fits("context_headers", _MAX_HEADER_BYTES)} then context_headers else '{{}}' end as context_headers
    from state.agent_inbox
    where project_id = $1 and message_type = 'tool_result'
        and md5(correlation_id) = md5(k.tool_call_id) and correlation_id = k.tool_call_id
    limit 1
) as reported on true
"""  # noqa: S608 - constants only

ANSWERED = """
select exists (
    select from cards
    where tenant_id = $1 and md5(tool_call_id) = md5($2) and tool_call_id = $2
        and metadata ->> 'type' = 'tool.result'
)
"""

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

# The turn and the request edge are looked at again, because either may have gone since the load.
_ACCEPTED = """
    exists (select from state.agent_inbox where inbox_id = $17 and project_id = $1)
    and exists (select from state.execution_edges where edge_id = $18 and project_id = $1)
"""

# An inbox row that is there without its card raises a unique violation, which takes the card back.
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
    (metadata ->> 'chars')::int as chars, metadata ->> 'sha256' as sha256,
    substr(content ->> 'text', $4::int + 1, $5::int) as text
from cards
where card_id = $3 and tenant_id = $1 and metadata ->> 'agent_id' = $2 and metadata ->> 'type' = 'tool.artifact'
    and deleted_at is null and (expires_at is null or expires_at > now())
"""
