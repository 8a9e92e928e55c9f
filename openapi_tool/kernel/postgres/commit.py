"""SQL that writes a result, for all protocol versions (protocol sections 3, 6).

A *turn* is a run of an agent, and a *step* of it asks for one or more calls. The agent's worker reads results in the
agent's *inbox*. It reads several results of a turn slowly if they come at the same time. So a turn is *busy* while it
has an unread result, or may soon get one, and a result is written only if its turn is not (ADR 8).

A version builds two statements from these parts, by `commit_and_report`:

- COMMIT writes all rows of a result: card, artifact card, inbox row, edge.
- REPORT writes inbox row and edge of a result card that exists already.

Both return one row with the columns `busy`, `written` and `discarded`, and consist of a chain of CTEs, each of which
takes its rows from the one before: `turn` (whether to write) → `card` → `inbox` (of the version) → `edge`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from openapi_tool.protocol.cards import ArtifactCard
from openapi_tool.protocol.report import Report

RECENT = "created_at between now() - interval '10 s' and now() + interval '10 s'"
"""SQL condition that an unread result may delay others, by its age: an older one is left over from a worker that died.

Times may lie in the future, as the clocks of several servers differ."""

SENT_LATELY = "(:quiet_s::float8 is null or abs(extract(epoch from now() - created_at)) < :quiet_s)"
"""SQL condition that another command of the step makes the turn busy, by its age: it was sent in the last `quiet_s`
seconds. If `quiet_s` is null, a command of any age does."""


class Mode(StrEnum):
    """What COMMIT and REPORT do.

    | mode | lock of the turn | writes |
    | --- | --- | --- |
    | LOOK | takes none | nothing; tells whether the turn is busy |
    | LOCK | takes it, to the end of the transaction | nothing |
    | IN_TURN | needs the one that LOCK took in the same transaction | unless the turn is busy |
    | ALONE | takes it | unless the turn is busy |
    | AT_ONCE | takes none | in any case |
    | TEST | takes none | even if no turn accepts the report; to be rolled back |
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
"""Parameters of COMMIT and REPORT by name, in the order of `report_values`, each with a sample value.

The version's own parameters follow; then, for COMMIT, those of the new cards.
"""

_CARD_PARAMETERS: dict[str, object] = {
    "content": {},
    "metadata": {},
    "artifact_id": "x",
    "artifact_text": bytearray(b"{}"),
    "artifact_metadata": {},
    "artifact_ttl_s": 0,
}
"""Parameters of COMMIT for the new cards by name, each with a sample value; the last four are `artifact_values`."""

# `turn` has one row: `busy`, and whether the statement `writes`.
# - The version's condition `{busy}` tells whether another result of the turn is unread, or its step has another command
#   that counts (SENT_LATELY).
# - The turn also counts as busy if this transaction does not get the lock. The `case` is true if the transaction has
#   the lock or needs none. From LOCK to IN_TURN a setting of the transaction carries whether it has the lock.
# - The lock is only tried. If statements waited for it, one blocked commit would take a connection for each result of
#   its turn.
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

# `on conflict` names the columns of the unique index, so that PostgreSQL refuses the statement if the index is missing:
# without the index a call could get two results. `{accepted}` is the version's condition that a turn waits.
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

# A trigger that returns null discards a row. Then the statement must fail, so that the other rows are not written
# without it. It fails by a division by zero (`fails_if_discarded`): SQL has no expression that raises an error, a
# function would be DDL in the kernel's database, and a returned column could not undo the other rows.
#
# TEST does not fail, but returns the tables of discarded rows (`discarded`). Only in TEST a card that was not written
# is a discarded one (`{no_card}`): otherwise the call may have another result. The artifact card is different: its
# insert has no `on conflict`, so if it was not written, it was discarded.
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
    (:mode = 'test' and not exists (select from card))
    or (exists (select from card) and :artifact_id::text is not null and not exists (select from artifact))
"""

# Each statement is a transaction of its own, without BEGIN. If an inbox row exists without its card, the insert of the
# inbox row raises a unique violation, which rolls the card back.
_COMMIT = f"with {_TURN}, {_NEW_CARDS}, {{inbox}}, {_EDGE} {_OUTCOME.replace('{no_card}', _NO_NEW_CARD)}"
_REPORT = f"with {_TURN}, {_EARLIER_CARD}, {{inbox}}, {_EDGE} {_OUTCOME.replace('{no_card}', 'false')}"


def commit_and_report(
    inbox: str, accepted: str, edge_turn: str, busy: str, own_parameters: tuple[str, ...]
) -> tuple[str, str]:
    """Return the statements COMMIT and REPORT of a version, built from its SQL.

    - `inbox`: the CTEs that write the inbox row, the last of them named `inbox`.
    - `accepted`: condition that a turn accepts the report.
    - `edge_turn`: the turn that the edge names.
    - `busy`: condition that the turn is busy, apart from its lock.
    - `own_parameters`: names of the version's own parameters. A parameter is written as in `:project_id`.
    """
    parts = {"inbox": inbox, "accepted": accepted, "edge_turn": edge_turn, "busy": busy}
    names = (*_REPORT_PARAMETERS, *own_parameters, *_CARD_PARAMETERS)
    return _numbered(_COMMIT.format_map(parts), names), _numbered(_REPORT.format_map(parts), names)


def _numbered(sql: str, names: Sequence[str]) -> str:
    """Return the statement with numbered parameters: `:project_id::text` → `$1::text` if the name is the first."""

    def numbered(parameter: re.Match[str]) -> str:
        return f"${names.index(parameter[1]) + 1}"

    # A name after one colon; a cast such as `::text` has two.
    return re.sub(r"(?<!:):([a-z_]+)", numbered, sql)


def turn_lock(report: Report) -> int:
    """Return the key of the advisory lock of a turn, the same on all replicas: a hash of 64 bits."""
    turn = report.acceptance.waiting_turn.agent_turn_id
    owner = f"openapi_tool\0{report.project_id}\0{report.acceptance.identity.agent_id}\0{turn}"
    digest = hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def artifact_values(artifact: ArtifactCard | None) -> tuple[Any, ...]:
    """Return the last parameters of COMMIT, all null without an artifact."""
    if artifact is None:
        return (None,) * 4
    return artifact.card_id, artifact.content, artifact.metadata, artifact.ttl_s


def sample_commit(*own: object) -> tuple[Any, ...]:
    """Return sample parameters of COMMIT, each of its column's type; `own` are samples of the version's own."""
    return (*_REPORT_PARAMETERS.values(), *own, *_CARD_PARAMETERS.values())


def report_values(card_id: str, report: Report, mode: Mode, quiet_s: float | None, *own: object) -> tuple[Any, ...]:
    """Return the parameters of REPORT, in the order of `_REPORT_PARAMETERS`; `own` are the version's own."""
    acceptance = report.acceptance
    identity, turn = acceptance.identity, acceptance.waiting_turn
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
