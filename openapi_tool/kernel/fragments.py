"""SQL and row mapping that all protocol versions share (protocol sections 3, 4, 6).

LOAD, which the module of each version builds from these parts, reads everything about a call, joined to the single row
`one`. Its parameters, those of `call_values`, may be null.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from openapi_tool.protocol.cards import MAX_CONTENT_BYTES
from openapi_tool.protocol.command import Command, Report
from openapi_tool.protocol.jsontext import as_object
from openapi_tool.protocol.records import (
    CallRecords,
    CardRecord,
    DefinitionRecord,
    EarlierResult,
    RequestEdgeRecord,
    WaitingTurnRecord,
)
from openapi_tool.tools.bounds import MAX_ROW_BYTES
from openapi_tool.tools.problems import unmangled

MAX_HEADER_BYTES = 64 * 1024
"""Limit of a turn's headers and of a card's metadata; NATS allows no more in headers."""

MAX_NAME_CHARS = 4_096
"""Limit of a value that becomes a token of a subject or is compared with a name."""

_MAX_STORED_BYTES = 256 * 1024  # of an earlier result, in its stored (compressed) form
NEWEST_ROWS = 1_000
"""Rows that are searched where no index finds the one row: an agent's inbox, the results of a step."""

TURN_ROWS = 200
"""Newest rows of an agent's inbox, among which those of a turn are searched."""

UNREAD = "created_at between now() - interval '10 s' and now() + interval '10 s'"
"""SQL condition that an unread result may delay others: an older one is left over from a worker that died."""

_SMALL_BYTES = 1_024
_MAX_UNCOUNTED_BYTES = 16_384
"""Uncompressed size up to which long numbers are not counted, as the text of so little has at most 28 MB."""
_MAX_DIGITS = 4_300  # Python refuses longer integers
_LONG_DIGITS = 500  # of a number that is counted against the size of a definition
_MAX_CARDS = 20  # of a call id, one of them the tool.call card; the kernel writes two
_MAX_EDGES = 100  # of a call, of which the oldest is used; the kernel writes two


def fits(column: str, max_bytes: int) -> str:
    """Return the SQL condition that a jsonb column's text has at most `max_bytes` bytes; null if Python cannot read it.

    Columns are measured before they are read: 24 concurrent calls with 30 MB each took 1 GB of memory in the executor.
    """
    text_fits = f"octet_length({column}::text) <= {max_bytes}"
    return (
        f"case when pg_column_size({column}) > {max_bytes} then false when {_is_small(column)} then {text_fits} "
        f"when {_uncompressed_bytes(column)} > {max_bytes} then false when {_has_large_number(column)} then null "
        f"else {text_fits} end"
    )


def _is_small(column: str) -> str:
    """Return the SQL condition that a value's text has at most 13 MB, which PostgreSQL measures in 50 ms.

    1,024 bytes of jsonb hold at most a hundred numbers such as 1e131071, of 131 kB of text each.
    """
    return f"(pg_column_compression({column}) is null and pg_column_size({column}) <= {_SMALL_BYTES})"


def _uncompressed_bytes(column: str) -> str:
    # The query makes an uncompressed copy: up to 250 times the stored size.
    return f"pg_column_size(jsonb_path_query_first({column}, 'strict $'))"


def _has_large_number(column: str) -> str:
    large = f"@ >= 1e{_MAX_DIGITS} || @ <= -1e{_MAX_DIGITS}"
    return f"""jsonb_path_exists({column}, 'strict $.** ? (@.type() == "number" && ({large}))')"""


def _has_many_long_numbers() -> str:
    """Return the SQL condition that numbers alone take more than MAX_ROW_BYTES bytes of text.

    A number that another program than the kernel wrote can have 16,383 decimal places.
    """
    columns = ("parameters", "options")
    numbers = " || ".join(
        f"""jsonb_path_query_array({column}, 'strict $.** ? (@.type() == "number")')""" for column in columns
    )
    is_long = f"scale(n::numeric) >= {_LONG_DIGITS} or abs(n::numeric) >= 1e{_LONG_DIGITS}"
    count = f"select count(*) from jsonb_array_elements({numbers}) as n where {is_long}"  # noqa: S608 - columns
    total = " + ".join(map(_uncompressed_bytes, columns))
    return f"case when {total} > {_MAX_UNCOUNTED_BYTES} then ({count}) > {MAX_ROW_BYTES // _LONG_DIGITS} end"


def _call_card(source: str) -> str:
    return f"""
    select
        card_id, left(tool_call_id, {MAX_HEADER_BYTES}) as tool_call_id,
        measured.content_fits and measured.metadata_fit as fits,
        case when measured.content_fits then content end as content,
        case when measured.metadata_fit then metadata end as metadata
    from {source}
    cross join lateral (
        select
            {fits("content", MAX_CONTENT_BYTES)} as content_fits,
            {fits("metadata", MAX_HEADER_BYTES)} as metadata_fit
    ) as measured
"""  # noqa: S608 - constants only


# The tool.call card is the one with that type in its metadata. It is searched among a few cards only: the kernel writes
# two for an id, but a hostile project can write thousands.
_CARDS_OF_ID = f"""(
        select card_id, tool_call_id, content, metadata from cards
        where $2::text is null and tool_call_id = $3 and tenant_id = $1 and deleted_at is null
        limit {_MAX_CARDS}
    ) as cards"""  # noqa: S608 - constants only

# The limit is for the sum of both columns' texts. Their jsonb, which is cheaper to measure, is checked first: it has
# less than 64 kB more than its text if there are at most MAX_VALUES values (tools/bounds); with more values it has at
# most four times as much (12 bytes for the text "0, ").
_DEFINITION = f"""
    select
        tool_name, left(after_execution, 16) as after_execution, measured.fits,
        case when measured.fits then parameters end as parameters, case when measured.fits then options end as options,
        measured.fits is not false and jsonb_typeof(parameters) = 'object' and jsonb_typeof(options) = 'object'
            as objects
    from resource.tools
    cross join lateral (
        select case
            when pg_column_size(parameters) + pg_column_size(options) > {MAX_ROW_BYTES + 65_536} then false
            when not {_is_small("parameters")} and {_uncompressed_bytes("parameters")} > {4 * MAX_ROW_BYTES} then false
            when not {_is_small("options")} and {_uncompressed_bytes("options")} > {4 * MAX_ROW_BYTES} then false
            when not {_is_small("parameters")} and {_has_large_number("parameters")} then null
            when not {_is_small("options")} and {_has_large_number("options")} then null
            when {_has_many_long_numbers()} then false
            else octet_length(parameters::text) + octet_length(options::text) <= {MAX_ROW_BYTES}
        end as fits
    ) as measured
"""  # noqa: S608 - constants only

# The content of an earlier result is read only to complete its missing report.
_READS_CONTENT = f"reported.inbox_id is null and pg_column_size(content) <= {_MAX_STORED_BYTES}"

# `limit 1`, even if a key is unique, makes each subquery an index look-up. Else a plan made while a table is small
# joins all rows of the project, and a session keeps its plan while the table grows.
CALL = f"""
left join lateral (
    {_call_card("cards")}
    where card_id = $2 and tenant_id = $1 and deleted_at is null
    union all
    {_call_card(_CARDS_OF_ID)}
    where metadata ->> 'type' = 'tool.call'
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
"""  # noqa: S608 - constants only
"""Joins of LOAD: card `c`, ids `k` (the command's, else those of a tool.call card), definition `t`, roster row `a`.

$7 is the tool's name in the command, $8 the same with dots where a model provider made `__` of them."""

_REQUEST_EDGE = f"""
left join lateral (
    select edge_id, recursion_depth from (
        select edge_id, recursion_depth, created_at from state.execution_edges
        where project_id = $1 and md5(correlation_id) = md5(k.tool_call_id) and correlation_id = k.tool_call_id
            and edge_phase = 'request'
        limit {_MAX_EDGES}
    ) as requests
    order by created_at limit 1
) as e on true
"""  # noqa: S608 - constants only

_RESULT = f"""
left join lateral (
    select
        card_id, deleted_at, tool_call_id = k.tool_call_id as of_call,
        case when {fits("metadata", MAX_HEADER_BYTES)} then left(metadata ->> 'author_id', {MAX_NAME_CHARS}) end
            as author,
        case when {_READS_CONTENT} then left(content ->> 'status', {MAX_NAME_CHARS}) end as status,
        case when {_READS_CONTENT} then left(content ->> 'after_execution', {MAX_NAME_CHARS}) end as after
    from cards
    where tenant_id = $1 and md5(tool_call_id) = md5(k.tool_call_id)  -- only the hash, as in the unique index
        and metadata ->> 'type' = 'tool.result'
    limit 1
) as r on true
"""  # noqa: S608 - constants only


def written(context_headers: str) -> str:
    """Return the joins of LOAD of what was written: request edge `e`, tool_result row `reported`, earlier result `r`.

    `context_headers` is the SQL of the headers of `reported`. All compare the hash, which the kernel's indexes are on;
    those of `reported` and `r` are unique, so the id need not be compared.
    """
    return f"""{_REQUEST_EDGE}
left join lateral (
    select inbox_id, left(status, 16) as status, {context_headers} as context_headers
    from state.agent_inbox
    where project_id = $1 and message_type = 'tool_result' and md5(correlation_id) = md5(k.tool_call_id)
    limit 1
) as reported on true
{_RESULT}"""  # noqa: S608 - constants only


COLUMNS = f"""\
    c.card_id as call_card_id, c.tool_call_id as call_tool_call_id, c.content as call_content,
    c.metadata as call_metadata, c.fits as call_fits,
    t.tool_name, t.after_execution, t.parameters, t.options, t.fits as tool_fits, t.objects as tool_objects,
    left(a.worker_target, {MAX_NAME_CHARS}) as worker_target,
    e.edge_id, e.recursion_depth,
    r.card_id as result_card_id, r.author as result_author, r.status as result_status, r.after as result_after,
    r.deleted_at is not null as result_deleted, r.of_call as result_of_call,
    reported.inbox_id as reported_inbox_id, reported.status as report_status,
    reported.context_headers as report_headers, current_setting('transaction_read_only') = 'on' as read_only"""
"""Columns of LOAD. The store discards a `read_only` load: a standby may lag, so a row that is missing there proves
nothing."""

HAS_RESULT = """
select exists (
    select from cards
    where tenant_id = $1 and md5(tool_call_id) = md5($2) and tool_call_id = $2
        and metadata ->> 'type' = 'tool.result'
)
"""

# Uses the index of turn, step and type; `limit` bounds the cost of a step with very many calls.
LAST_RESULT_AGE = f"""
select extract(epoch from now() - max(created_at))::float8 from (
    select created_at from cards
    where metadata ->> 'agent_turn_id' = $2 and metadata ->> 'step_id' = $3 and metadata ->> 'type' = 'tool.result'
        and tenant_id = $1 and deleted_at is null
    limit {NEWEST_ROWS}
) as results
"""  # noqa: S608 - constants only

ARTIFACT = """
select
    (metadata ->> 'chars')::int as chars, metadata ->> 'sha256' as sha256, metadata -> 'items' as items,
    substr(content ->> 'text', $4::int + 1, $5::int) as text
from cards
where card_id = $3 and tenant_id = $1 and metadata ->> 'agent_id' = $2 and metadata ->> 'type' = 'tool.artifact'
    and deleted_at is null and (expires_at is null or expires_at > now())
"""


EDGE_KEY = "(project_id, md5(correlation_id), primitive, edge_phase)"
SENT_LATELY = "($17::float8 is null or abs(extract(epoch from now() - created_at)) < $17)"
"""SQL condition that another command of the step counts: sent in the last seconds, or (null) at any time."""

_LOCKED = "openapi_tool.turn_locked"  # setting of a transaction


class Mode(StrEnum):
    """Parameter $18 of COMMIT and REPORT. They write AT_ONCE and in TEST; ALONE and IN_TURN unless the turn is busy."""

    LOOK = "look"  # writes nothing
    LOCK = "lock"  # writes nothing; the lock lasts to the end of the transaction
    ALONE = "alone"
    IN_TURN = "in turn"  # after LOCK in the same transaction
    AT_ONCE = "at once"
    TEST = "test"  # also if no turn accepts the report; to be rolled back


def turn_lock(report: Report) -> int:
    """Return the key of the advisory lock of a turn, the same on all replicas."""
    turn = report.acceptance.waiting_turn.agent_turn_id
    owner = f"openapi_tool\0{report.project_id}\0{report.acceptance.identity.agent_id}\0{turn}"
    return int.from_bytes(hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=8).digest(), signed=True)


def writes(inbox: str, accepted: str, edge_turn: str, busy: str, first: int) -> tuple[str, str]:
    """Return the statements COMMIT and REPORT, which write only if the condition `accepted` holds.

    `inbox` has the CTEs that write the inbox row, `edge_turn` is the turn that its edge names, and `first` the number
    of COMMIT's first parameter after those of REPORT.

    One statement is one transaction without BEGIN and COMMIT. If an inbox row exists without its card, the insert
    raises a unique violation, which rolls the card back. `on conflict` names the columns of the unique indexes, so that
    PostgreSQL refuses the statement if one is missing: without it a call could get two results.

    If a row is discarded, as by a trigger that returns null, the statement fails (by a division by zero), so that the
    others are not written without it; TEST returns the tables of such rows instead. Only there a card that was not
    written is a discarded one: elsewhere the call may have another result.

    `busy` is the condition that another result of the turn is unread, or that its step has other commands
    (SENT_LATELY). The lock ($16) is only tried: if statements waited for it, one blocked commit would take a connection
    for each result of its turn.
    """
    turn = f"""
    select *, $18::text in ('{Mode.AT_ONCE}', '{Mode.TEST}')
        or $18 in ('{Mode.ALONE}', '{Mode.IN_TURN}') and not busy as writes
    from (
        select not case $18
            when '{Mode.ALONE}' then pg_try_advisory_xact_lock($16)
            when '{Mode.LOCK}' then set_config('{_LOCKED}', pg_try_advisory_xact_lock($16)::text, true) = 'true'
            when '{Mode.IN_TURN}' then coalesce(current_setting('{_LOCKED}', true), '') = 'true'
            else true
        end or $18 not in ('{Mode.AT_ONCE}', '{Mode.TEST}') and ({busy}) as busy
    ) as found
"""  # noqa: S608 - constants only
    content, metadata, artifact_id, text, artifact_metadata, ttl_s = (f"${first + place}" for place in range(6))
    new_card = f"""
    insert into cards (card_id, tenant_id, content, tool_call_id, metadata)
    select $2, $1, {content}, $6, {metadata} from turn where writes and ($18 = '{Mode.TEST}' or {accepted})
    on conflict (tenant_id, md5(tool_call_id)) where tool_call_id is not null and metadata ->> 'type' = 'tool.result'
    do nothing
    returning card_id
), artifact as (
    insert into cards (card_id, tenant_id, content, metadata, ttl_seconds, expires_at)
    select {artifact_id}, $1, {text}, {artifact_metadata}, {ttl_s}::int, now() + make_interval(secs => {ttl_s}::int)
    from card where {artifact_id}::text is not null
    returning card_id
"""  # noqa: S608 - constants only
    no_new_card = f"""
        $18 = '{Mode.TEST}' and not exists (select from card)
        or exists (select from card) and {artifact_id}::text is not null and not exists (select from artifact)
"""  # noqa: S608 - constants only
    card = f"""
    select card_id from cards
    where card_id = $2 and tenant_id = $1 and deleted_at is null and (select writes from turn) and {accepted}
"""  # noqa: S608 - constants only

    def written(no_card: str) -> str:
        return f"""{inbox}, edge as (
    insert into state.execution_edges (
        edge_id, project_id, channel_id, primitive, edge_phase, source_agent_id, target_agent_id,
        target_agent_turn_id, correlation_id, recursion_depth, trace_id, parent_step_id, metadata
    )
    select $9, $1, $5, 'report', 'response', $10, $4, {edge_turn}, $6, $11, $12, $13, $14 from inbox
    on conflict {EDGE_KEY} do nothing
    returning edge_id
)
select busy, exists (select from inbox) as written, discarded,
    1 / (discarded = '' or $18 = '{Mode.TEST}')::int as none_discarded
from turn, (
    select concat_ws(', ',
        case when {no_card} then 'cards' end,
        case when exists (select from card) and not exists (select from inbox) then 'state.agent_inbox' end,
        case when exists (select from inbox) and not exists (select from edge) and not exists (
            select from state.execution_edges
            where project_id = $1 and md5(correlation_id) = md5($6) and primitive = 'report' and edge_phase = 'response'
        ) then 'state.execution_edges' end
    ) as discarded
) as rows
"""  # noqa: S608 - constants only

    turn = f"with turn as materialized ({turn})"
    return f"{turn}, card as ({new_card}), {written(no_new_card)}", f"{turn}, card as ({card}), {written('false')}"


def call_values(command: Command, own: object) -> tuple[Any, ...]:
    """Return the parameters of LOAD; `own`, $6, is the version's own: the epoch in v1r4, the channel in v1r3."""
    identity, tool_name = command.identity, command.tool_name
    return (
        identity.project_id,
        command.card_id,
        identity.tool_call_id,
        identity.agent_id,
        identity.agent_turn_id,
        own,
        tool_name,
        tool_name and unmangled(tool_name),
    )


def sample_commit(*own: object) -> tuple[Any, ...]:
    """Return parameters of COMMIT, each of its column's type; `own` are the version's own, as in `report_values`."""
    texts = ("x",) * 7
    return (*texts, {}, "x", "x", 0, "x", "x", {}, "x", 0, 0.0, Mode.LOOK, *own, {}, {}, "x", bytearray(b"{}"), {}, 0)


def report_values(card_id: str, report: Report, mode: Mode, quiet_s: float | None, *own: object) -> tuple[Any, ...]:
    """Return the parameters of REPORT; `own` are the version's own, from $19 on."""
    acceptance, identity, turn = report.acceptance, report.acceptance.identity, report.acceptance.waiting_turn
    return (
        identity.project_id,
        card_id,
        report.inbox_id,
        identity.agent_id,
        turn.channel_id,  # $5
        identity.tool_call_id,
        turn.agent_turn_id,
        report.payload,
        report.edge_id,
        report.actor_id,  # $10
        acceptance.depth,
        report.trace_id,
        report.parent_step_id,
        report.edge_metadata,
        acceptance.request_edge_id,  # $15
        turn_lock(report),
        quiet_s,
        mode,
        *own,
    )


def call_records(row: Mapping[str, Any], waiting_turn: WaitingTurnRecord | None = None) -> CallRecords:
    """Return the records in a row of LOAD."""
    return CallRecords(
        card=_card(row),
        definition=_tool(row),
        worker_target=row["worker_target"],
        waiting_turn=waiting_turn,
        request_edge=None if row["edge_id"] is None else RequestEdgeRecord(row["edge_id"], row["recursion_depth"]),
        earlier=_earlier(row),
        reported_inbox_id=row["reported_inbox_id"],
    )


def _card(row: Mapping[str, Any]) -> CardRecord | None:
    if row["call_card_id"] is None:
        return None
    return CardRecord(
        card_id=row["call_card_id"],
        tool_call_id=row["call_tool_call_id"],
        content=row["call_content"],
        metadata=as_object(row["call_metadata"]),
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


def _earlier(row: Mapping[str, Any]) -> EarlierResult | None:
    if row["result_card_id"] is None:
        return None
    return EarlierResult(
        card_id=row["result_card_id"],
        author_id=row["result_author"],
        is_deleted=row["result_deleted"],
        content={"status": row["result_status"], "after_execution": row["result_after"]},
        report_headers=row["report_headers"],
        report_status=row["report_status"],
        is_of_this_call=row["result_of_call"],
    )
