"""SQL that writes a result, for all protocol versions (protocol sections 3, 6)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from openapi_tool.protocol.cards import ArtifactCard
from openapi_tool.protocol.report import Report

RECENT = "created_at between now() - interval '10 s' and now() + interval '10 s'"
"""SQL condition on the age of an unread result that may delay others: an older one is left over from a worker that
died."""

SENT_LATELY = "(:quiet_s::float8 is null or abs(extract(epoch from now() - created_at)) < :quiet_s)"
"""SQL condition that another command of the step counts: sent in the last `quiet_s` seconds, or at any time if that is
null."""


class Mode(StrEnum):
    """What COMMIT and REPORT do.

    | mode | takes the turn's lock | writes |
    | --- | --- | --- |
    | LOOK | no | nothing; tells whether the turn is busy |
    | LOCK | to the end of the transaction | nothing |
    | IN_TURN | needs that of LOCK, earlier in the transaction | unless the turn is busy |
    | ALONE | yes | unless the turn is busy |
    | AT_ONCE | no | in any case |
    | TEST | no | also if no turn accepts the report; to be rolled back |
    """

    LOOK = "look"
    LOCK = "lock"
    IN_TURN = "in turn"
    ALONE = "alone"
    AT_ONCE = "at once"
    TEST = "test"


_REPORT_PARAMETERS: dict[str, object] = {
    "project_id": "x",
    "card_id": "x",
    "inbox_id": "x",
    "agent_id": "x",
    "channel_id": "x",
    "tool_call_id": "x",
    "agent_turn_id": "x",
    "payload": {},
    "edge_id": "x",
    "actor_id": "x",
    "depth": 0,
    "trace_id": "x",
    "parent_step_id": "x",
    "edge_metadata": {},
    "request_edge_id": "x",
    "lock": 0,
    "quiet_s": 0.0,
    "mode": Mode.LOOK,
}
"""Names with a sample value each, in the order of `report_values`.

Those of the version follow, then, for COMMIT, those of the new cards.
"""

_CARD_PARAMETERS: dict[str, object] = {
    "content": {},
    "metadata": {},
    "artifact_id": "x",
    "artifact_text": bytearray(b"{}"),
    "artifact_metadata": {},
    "artifact_ttl_s": 0,
}

# The turn is busy if another result of it is unread, or if its step has other commands (SENT_LATELY); that is the
# version's condition `busy`. It also counts as busy if this transaction does not get the lock: the `case` tells whether
# it has the lock or needs none. The lock is only tried: if statements waited for it, one blocked commit would take a
# connection for each result of its turn.
_TURN = """
turn as materialized (
    select *, :mode::text in ('at once', 'test') or (:mode in ('alone', 'in turn') and not busy) as writes
    from (
        select not case :mode
            when 'alone' then pg_try_advisory_xact_lock(:lock)
            when 'lock'
                then set_config('openapi_tool.turn_locked', pg_try_advisory_xact_lock(:lock)::text, true) = 'true'
            when 'in turn' then coalesce(current_setting('openapi_tool.turn_locked', true), '') = 'true'
            else true
        end or (:mode not in ('at once', 'test') and ({busy})) as busy
    ) as found
)
"""

# `on conflict` names the columns of the unique indexes, so that PostgreSQL refuses the statement if one is missing:
# without it a call could get two results.
_NEW_CARDS = """
card as (
    insert into cards (card_id, tenant_id, content, tool_call_id, metadata)
    select :card_id, :project_id, :content, :tool_call_id, :metadata
    from turn where writes and (:mode = 'test' or {accepted})
    on conflict (tenant_id, md5(tool_call_id)) where tool_call_id is not null and metadata ->> 'type' = 'tool.result'
    do nothing
    returning card_id
), artifact as (
    insert into cards (card_id, tenant_id, content, metadata, ttl_seconds, expires_at)
    select :artifact_id, :project_id, :artifact_text, :artifact_metadata, :artifact_ttl_s::int,
        now() + make_interval(secs => :artifact_ttl_s::int)
    from card where :artifact_id::text is not null
    returning card_id
)
"""
_EARLIER_CARD = """
card as (
    select card_id from cards
    where card_id = :card_id and tenant_id = :project_id and deleted_at is null
        and (select writes from turn) and {accepted}
)
"""
_EDGE = """
edge as (
    insert into state.execution_edges (
        edge_id, project_id, channel_id, primitive, edge_phase, source_agent_id, target_agent_id,
        target_agent_turn_id, correlation_id, recursion_depth, trace_id, parent_step_id, metadata
    )
    select :edge_id, :project_id, :channel_id, 'report', 'response', :actor_id, :agent_id, {edge_turn}, :tool_call_id,
        :depth, :trace_id, :parent_step_id, :edge_metadata
    from inbox
    on conflict (project_id, md5(correlation_id), primitive, edge_phase) do nothing
    returning edge_id
)
"""

# A trigger that returns null discards a row. Then the statement must fail, so that the others are not written without
# it. It fails by a division by zero: SQL has no expression that raises an error, a function would be DDL in the
# database of the kernel, and a column that says so could not undo the other rows.
#
# TEST does not fail: it returns the tables of such rows. Only in TEST a card that was not written is a discarded one:
# elsewhere the call may have another result.
_OUTCOME = """
select busy, exists (select from inbox) as written, discarded,
    1 / (discarded = '' or :mode = 'test')::int as fails_if_discarded
from turn, (
    select concat_ws(', ',
        case when {no_card} then 'cards' end,
        case when exists (select from card) and not exists (select from inbox) then 'state.agent_inbox' end,
        case when exists (select from inbox) and not exists (select from edge) and not exists (
            select from state.execution_edges
            where project_id = :project_id and md5(correlation_id) = md5(:tool_call_id)
                and primitive = 'report' and edge_phase = 'response'
        ) then 'state.execution_edges' end
    ) as discarded
) as rows
"""
_NO_NEW_CARD = """
    :mode = 'test' and not exists (select from card)
    or exists (select from card) and :artifact_id::text is not null and not exists (select from artifact)
"""

# Each statement is a transaction of its own, without the SQL commands BEGIN and COMMIT. If an inbox row exists without
# its card, the insert raises a unique violation, which rolls the card back.
_COMMIT = f"with {_TURN}, {_NEW_CARDS}, {{inbox}}, {_EDGE} {_OUTCOME.replace('{no_card}', _NO_NEW_CARD)}"
_REPORT = f"with {_TURN}, {_EARLIER_CARD}, {{inbox}}, {_EDGE} {_OUTCOME.replace('{no_card}', 'false')}"


def commit_and_report(
    inbox: str, accepted: str, edge_turn: str, busy: str, own_parameters: tuple[str, ...]
) -> tuple[str, str]:
    """Return the statements COMMIT and REPORT of a version, which write only if the condition `accepted` holds.

    `inbox` has the CTEs that write the inbox row, and `edge_turn` is the turn that its edge names. Parameters are named
    as in `:project_id`; `own_parameters` are those of the version.
    """
    parts = {"inbox": inbox, "accepted": accepted, "edge_turn": edge_turn, "busy": busy}
    names = (*_REPORT_PARAMETERS, *own_parameters, *_CARD_PARAMETERS)
    return _numbered(_COMMIT.format_map(parts), names), _numbered(_REPORT.format_map(parts), names)


def _numbered(sql: str, names: Sequence[str]) -> str:
    """Return the statement with `$1` instead of the first name, and so on; `::text` stays."""
    return re.sub(r"(?<!:):([a-z_]+)", lambda found: f"${names.index(found[1]) + 1}", sql)


def turn_lock(report: Report) -> int:
    """Return the key of the advisory lock of a turn, the same on all replicas."""
    turn = report.acceptance.waiting_turn.agent_turn_id
    owner = f"openapi_tool\0{report.project_id}\0{report.acceptance.identity.agent_id}\0{turn}"
    return int.from_bytes(hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=8).digest(), signed=True)


def artifact_values(artifact: ArtifactCard | None) -> tuple[Any, ...]:
    """Return the last parameters of COMMIT, all null without an artifact."""
    if artifact is None:
        return (None,) * 4
    return artifact.card_id, artifact.content, artifact.metadata, artifact.ttl_s


def sample_commit(*own: object) -> tuple[Any, ...]:
    """Return parameters of COMMIT, each of its column's type; `own` are the version's own, as in `report_values`."""
    return (*_REPORT_PARAMETERS.values(), *own, *_CARD_PARAMETERS.values())


def report_values(card_id: str, report: Report, mode: Mode, quiet_s: float | None, *own: object) -> tuple[Any, ...]:
    """Return the parameters of REPORT; `own` are the version's own."""
    acceptance, identity, turn = report.acceptance, report.acceptance.identity, report.acceptance.waiting_turn
    return (
        identity.project_id,
        card_id,
        report.inbox_id,
        identity.agent_id,
        turn.channel_id,
        identity.tool_call_id,
        turn.agent_turn_id,
        report.payload,
        report.edge_id,
        report.actor_id,
        acceptance.depth,
        report.trace_id,
        report.parent_step_id,
        report.edge_metadata,
        acceptance.request_edge_id,
        turn_lock(report),
        quiet_s,
        mode,
        *own,
    )
