"""SQL that loads a call, and its rows as records, for all protocol versions (protocol sections 3, 4, 6).

A *card* is a JSON document that never changes: the arguments of a call (tool.call), or a result (tool.result). An
*edge* records who sent what to whom, for audits. The *inbox* of an agent is a table of messages to it, and the *roster*
is the table of the project's agents.

The module of each version builds the statement LOAD from these parts. It reads everything about a call as one row: the
parts are joined to the single row `one`, each under a short alias:

| alias | what |
| --- | --- |
| `c` | the tool.call card |
| `k` | the call's ids: those of the command, else those of the card |
| `t` | the definition |
| `a` | the agent's row in the roster |
| `e` | the request edge |
| `r` | an earlier result card |
| `reported` | the inbox row of that result |

The parameters, which `call_values` returns, may be null: $1 project, $2 card, $3 tool call, $4 agent, $5 turn, $6 the
version's own, $7 the tool's name, $8 the same name unmangled (`unmangled`: with dots where a model provider made `__`
of them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.kernel.postgres.sizes import (
    MAX_HEADER_BYTES,
    MAX_NAME_CHARS,
    fits,
    has_large_number,
    has_many_long_numbers,
    is_small,
    uncompressed_bytes,
)
from openapi_tool.protocol.cards import MAX_CONTENT_BYTES
from openapi_tool.protocol.command import Command
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
from openapi_tool.tools.tool_names import unmangled

_MAX_STORED_BYTES = 256 * 1024  # of an earlier result that is read, in its stored (compressed) form

_MAX_ID_CHARS = MAX_HEADER_BYTES  # of a call id that is read; a command may name the id in a header

# Rows that are searched. The kernel writes two of each for a call, but a hostile project can write thousands.
_MAX_CARDS = 20  # cards with a call id, for the tool.call card among them
_MAX_EDGES = 100  # request edges of a call, for the oldest one


def _call_card(source: str) -> str:
    """Return the SQL that reads cards of `source`, without columns that are too large."""
    return f"""
    select
        card_id, left(tool_call_id, {_MAX_ID_CHARS}) as tool_call_id,
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


# Cards in which the tool.call card is searched, if the command does not name it.
_CARDS_OF_ID = f"""(
        select card_id, tool_call_id, content, metadata from cards
        where $2::text is null and tool_call_id = $3 and tenant_id = $1 and deleted_at is null
        limit {_MAX_CARDS}
    ) as cards"""  # noqa: S608 - constants only

# Limits for the jsonb of a definition, which is cheaper to measure than its text. They follow from MAX_ROW_BYTES, the
# limit for the texts of both columns together. Compared with its text, the jsonb of a value is largest for a small
# number: 12 bytes instead of the 3 of "0, ".
# - So a column has at most four times the bytes of its text.
# - A valid definition has at most 2,000 values in each column (MAX_VALUES in tools/bounds). So both columns have at
#   most 2 * 2,000 * (12 - 3) = 36,000 bytes more than their texts.
_MAX_COLUMN_BYTES = 4 * MAX_ROW_BYTES
_MAX_COLUMNS_BYTES = MAX_ROW_BYTES + 64 * 1024

# `fits` says whether the texts of `parameters` and `options` are small enough to be read; null if Python cannot read a
# number in them. Their jsonb is checked first. `objects` says whether both are JSON objects, as far as they were read.
_DEFINITION = f"""
    select
        tool_name, left(after_execution, 16) as after_execution, measured.fits,
        case when measured.fits then parameters end as parameters, case when measured.fits then options end as options,
        measured.fits is not false and jsonb_typeof(parameters) = 'object' and jsonb_typeof(options) = 'object'
            as objects
    from resource.tools
    cross join lateral (
        select case
            when pg_column_size(parameters) + pg_column_size(options) > {_MAX_COLUMNS_BYTES} then false
            when not {is_small("parameters")} and {uncompressed_bytes("parameters")} > {_MAX_COLUMN_BYTES} then false
            when not {is_small("options")} and {uncompressed_bytes("options")} > {_MAX_COLUMN_BYTES} then false
            when not {is_small("parameters")} and {has_large_number("parameters")} then null
            when not {is_small("options")} and {has_large_number("options")} then null
            when {has_many_long_numbers()} then false
            else octet_length(parameters::text) + octet_length(options::text) <= {MAX_ROW_BYTES}
        end as fits
    ) as measured
"""  # noqa: S608 - constants only

# The content of an earlier result is needed only to complete its missing report.
_READS_CONTENT = f"reported.inbox_id is null and pg_column_size(content) <= {_MAX_STORED_BYTES}"

# Each subquery has `limit 1`, even if its key is unique: that makes it an index look-up. Without the limit, a plan that
# is made while a table is small joins all rows of the project, and a session keeps its plan while the table grows.
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
"""Joins of LOAD that find the call: `c`, `k`, `t` and `a`."""

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


def joins_of_written_rows(context_headers: str) -> str:
    """Return the joins of LOAD that find what was written for the call: `e`, `reported` and `r`.

    `context_headers` is the SQL of the headers of `reported`. All joins compare the hash of the call's id, which the
    kernel's indexes are on. The indexes of `reported` and `r` are unique, so there the id itself is not compared.
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
"""Columns of LOAD. The store discards what it read in a `read_only` database: this may be a standby, which lags, so a
row that is missing there proves nothing."""


def call_values(command: Command, own: object) -> tuple[Any, ...]:
    """Return the parameters of LOAD; `own` is the version's own: the epoch in v1r4, the channel in v1r3."""
    identity, tool_name = command.identity, command.tool_name
    other_name = unmangled(tool_name) if tool_name else tool_name
    return (
        identity.project_id,
        command.card_id,
        identity.tool_call_id,
        identity.agent_id,
        identity.agent_turn_id,
        own,
        tool_name,
        other_name,
    )


def call_records(row: Mapping[str, Any], waiting_turn: WaitingTurnRecord | None = None) -> CallRecords:
    """Return the records in a row of LOAD."""
    return CallRecords(
        card=_card(row),
        definition=_definition(row),
        worker_target=row["worker_target"],
        waiting_turn=waiting_turn,
        request_edge=_request_edge(row),
        earlier=_earlier_result(row),
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


def _definition(row: Mapping[str, Any]) -> DefinitionRecord | None:
    if row["tool_name"] is None:
        return None
    parameters, options = row["parameters"], row["options"]
    oversized = row["tool_fits"] is False
    lacks_column = parameters is None or options is None
    # Both columns are stored as objects, but one is None here: Python refuses a number in it, or its nesting.
    unreadable = not oversized and row["tool_objects"] and lacks_column
    return DefinitionRecord(
        tool_name=row["tool_name"],
        after_execution=row["after_execution"],
        parameters=parameters,
        options=options,
        oversized=oversized,
        unreadable=unreadable,
    )


def _request_edge(row: Mapping[str, Any]) -> RequestEdgeRecord | None:
    if row["edge_id"] is None:
        return None
    return RequestEdgeRecord(row["edge_id"], row["recursion_depth"])


def _earlier_result(row: Mapping[str, Any]) -> EarlierResult | None:
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
