"""SQL that writes a result, for all protocol versions (protocol sections 3, 6)."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

from openapi_tool.protocol.report import Report

UNREAD = "created_at between now() - interval '10 s' and now() + interval '10 s'"
"""SQL condition that an unread result may delay others: an older one is left over from a worker that died."""

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

    If a row is discarded, as by a trigger that returns null, the statement fails, so that the others are not written
    without it; TEST returns the tables of such rows instead. Only there a card that was not written is a discarded one:
    elsewhere the call may have another result. It fails by a division by zero, as SQL has no expression that raises an
    error, and a function would be DDL in the kernel's database. A column that says so could not undo the other rows.

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
