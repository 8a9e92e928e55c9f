"""Commits that wait for the other results of their turn (ADR 8), in PostgreSQL with the tables of both versions."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from openapi_tool.kernel.postgres import v1r4
from openapi_tool.kernel.postgres.commit import Mode, turn_lock
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.local.caller import Caller
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.protocol.cards import ResultCard
from openapi_tool.protocol.errors import TurnBusy
from openapi_tool.protocol.report import Report, TurnCondition
from openapi_tool.tools.secret_variables import Secret
from tests.conftest import AGENT, PROJECT
from tests.kernel.test_store import command_of, result_of, v1r3_command_of, v1r3_result_of
from tests.requirements import requirement
from tests.support import dsn_of

ALONE, IN_TURN = TurnCondition.no_other_command(), TurnCondition.others_older_than(0)


@pytest.fixture
async def store(stack: EmbeddedStack, database: str) -> AsyncIterator[KernelStore]:
    store = await KernelStore.open(PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 4)))
    yield store
    await store.aclose()


@pytest.fixture
async def call(caller: Caller) -> PlacedCall:
    return await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)


async def loaded(store: KernelStore, call: PlacedCall) -> tuple[ResultCard, Report]:
    return result_of(call, await store.load(command_of(call)))


async def commit(store: KernelStore, call: PlacedCall, condition: TurnCondition | None) -> bool:
    card, report = await loaded(store, call)
    return await store.commit(card, report, None, condition)


async def add_row(caller: Caller, call: PlacedCall, **changes: Any) -> None:
    """Add an inbox row of the call's turn, by default a pending result."""
    row = {
        "inbox_id": "other",
        "project_id": call.project_id,
        "agent_id": call.agent_id,
        "message_type": "tool_result",
        "correlation_id": "other call",
        "agent_turn_id": call.agent_turn_id,
        "turn_epoch": call.turn_epoch,
        "status": "pending",
        **changes,
    }
    if row["correlation_id"] == "OWN":
        row["correlation_id"] = call.tool_call_id
    names, places = ", ".join(row), ", ".join(f"${number}" for number in range(1, len(row) + 1))
    await caller.database.execute(f"insert into state.agent_inbox ({names}) values ({places})", *row.values())  # noqa: S608 - names of this file


async def add_sibling(caller: Caller, call: PlacedCall) -> None:
    """Add a card of another call of the step, as the kernel saves it before its command."""
    await caller.save(replace(call, tool_call_id=f"sibling_{uuid.uuid4().hex}", card_id=uuid.uuid4().hex), {}, {})


async def results(caller: Caller) -> int:
    return int(await caller.database.fetchval("select count(*) from cards where metadata ->> 'type' = 'tool.result'"))


UNREAD: Mapping[str, dict[str, Any]] = {
    "pending": {"status": "pending"},
    "being read": {"status": "processing"},
    "deferred and due": {"status": "deferred"},
    "timeout of the watchdog": {"message_type": "timeout"},
}
OTHERS: Mapping[str, dict[str, Any]] = {
    "read": {"status": "consumed"},
    "another turn": {"agent_turn_id": "other turn"},
    "another step": {"turn_epoch": 2},
    "its own": {"correlation_id": "OWN", "message_type": "timeout"},
    "another agent": {"agent_id": "other agent"},
    "another project": {"project_id": "other project"},
    "another message": {"message_type": "turn"},
}


@requirement("result.order", "answer.atomic")
@pytest.mark.parametrize("condition", [ALONE, IN_TURN])
@pytest.mark.parametrize("row", UNREAD.values(), ids=UNREAD)
async def test_nothing_is_written_while_another_result_of_the_turn_is_unread(
    caller: Caller, store: KernelStore, call: PlacedCall, row: dict[str, Any], condition: TurnCondition | None
) -> None:
    await add_row(caller, call, **row)
    with pytest.raises(TurnBusy):
        await commit(store, call, condition)
    assert await results(caller) == 0
    assert await commit(store, call, None)


@requirement("result.order")
@pytest.mark.parametrize("row", OTHERS.values(), ids=OTHERS)
async def test_other_rows_delay_no_result(
    caller: Caller, store: KernelStore, call: PlacedCall, row: dict[str, Any]
) -> None:
    await add_row(caller, call, **row)
    assert await commit(store, call, ALONE)


@requirement("result.order")
@pytest.mark.parametrize(
    "change",
    [
        "status = 'deferred', next_retry_at = now() + interval '1 s'",
        "created_at = now() - interval '11 s'",
        "created_at = now() + interval '1 hour'",
    ],
    ids=["deferred and not due", "left over", "of the future"],
)
async def test_a_row_that_the_worker_will_not_read_soon_delays_no_result(
    caller: Caller, store: KernelStore, call: PlacedCall, change: str
) -> None:
    await add_row(caller, call, status="processing")
    await caller.database.execute(f"update state.agent_inbox set {change} where inbox_id = 'other'")  # noqa: S608
    assert await commit(store, call, ALONE)


@requirement("result.order")
async def test_a_result_of_a_step_with_other_calls_is_not_written_without_the_lock(
    caller: Caller, store: KernelStore, call: PlacedCall
) -> None:
    await add_sibling(caller, call)
    with pytest.raises(TurnBusy):
        await commit(store, call, ALONE)
    assert await commit(store, call, IN_TURN)


@requirement("result.delay")
@pytest.mark.parametrize(("age_s", "written"), [(0.2, False), (0.4, True)])
async def test_a_result_waits_for_the_newest_command_of_its_step_whatever_replica_received_it(
    caller: Caller,
    store: KernelStore,
    call: PlacedCall,
    age_s: float,
    written: bool,  # noqa: FBT001
) -> None:
    await add_sibling(caller, call)
    card, report = await loaded(store, call)
    condition = TurnCondition.others_older_than(0.3)
    async with caller.database.transaction():
        await caller.database.execute(
            "update state.agent_inbox set created_at = now() - make_interval(secs => $1) "
            "where correlation_id like 'sibling%'",
            age_s,
        )
    if written:
        assert await store.commit(card, report, None, condition)
    else:
        with pytest.raises(TurnBusy):
            await store.commit(card, report, None, condition)


@requirement("result.order")
async def test_a_call_of_another_step_is_no_sibling(caller: Caller, store: KernelStore, call: PlacedCall) -> None:
    await add_sibling(caller, replace(call, turn_epoch=2))  # of a turn's next step
    await add_sibling(caller, replace(call, agent_turn_id="other turn"))
    await add_sibling(caller, replace(call, project_id="other project"))
    assert await commit(store, call, ALONE)


@requirement("result.order")
@pytest.mark.parametrize("condition", [ALONE, IN_TURN], ids=["alone", "in turn"])
async def test_a_turn_whose_lock_is_held_is_busy_and_no_statement_waits_for_it(
    caller: Caller, store: KernelStore, call: PlacedCall, condition: TurnCondition
) -> None:
    """The holder may be another replica, a commit that waits at a row, or a process that is stopped."""
    card, report = await loaded(store, call)
    async with caller.database.transaction():
        await caller.database.execute("select pg_advisory_xact_lock($1)", turn_lock(report))
        with pytest.raises(TurnBusy):
            await store.commit(card, report, None, condition)
        assert not await store.is_turn_busy(report, 0)
        assert await store.commit(card, report, None, None)


@requirement("result.order")
async def test_a_result_is_not_written_if_the_lock_became_free_only_after_it_was_tried(
    caller: Caller, store: KernelStore, call: PlacedCall
) -> None:
    """Whoever held it may have written a result that this statement's snapshot does not show."""
    card, report = await loaded(store, call)
    values = (*v1r4.report_values(card.card_id, report, Mode.IN_TURN, 0), card.content, card.metadata, *(None,) * 4)
    row = await caller.database.fetchrow(v1r4.COMMIT, *values)
    assert (row["busy"], row["written"]) == (True, False)
    assert await results(caller) == 0


@requirement("result.order")
async def test_a_commit_in_turn_locks_the_turn_before_its_snapshot(
    caller: Caller, store: KernelStore, call: PlacedCall
) -> None:
    card, report = await loaded(store, call)
    values = (*v1r4.report_values(card.card_id, report, Mode.LOCK, 0), *(None,) * 6)
    async with caller.database.transaction():
        locked = await caller.database.fetchrow(v1r4.COMMIT, *values)
        assert (locked["busy"], locked["written"]) == (False, False)
        with pytest.raises(TurnBusy):
            await store.commit(card, report, None, IN_TURN)
    assert await store.commit(card, report, None, IN_TURN)


@requirement("result.order")
async def test_no_lock_outlives_a_commit(caller: Caller, store: KernelStore, call: PlacedCall) -> None:
    await add_row(caller, call)
    with pytest.raises(TurnBusy):
        await commit(store, call, IN_TURN)
    await caller.database.execute("delete from state.agent_inbox where inbox_id = 'other'")
    assert await commit(store, call, IN_TURN)
    assert await caller.database.fetchval("select count(*) from pg_locks where locktype = 'advisory'") == 0


@requirement("result.order")
async def test_a_report_of_an_existing_card_waits_as_a_commit_does(
    caller: Caller, store: KernelStore, call: PlacedCall
) -> None:
    card, report = await loaded(store, call)
    assert await store.commit(card, report)
    await caller.database.execute("delete from state.agent_inbox where message_type = 'tool_result'")
    await caller.database.execute("delete from state.execution_edges where primitive = 'report'")
    await add_row(caller, call)
    for condition in (ALONE, IN_TURN):
        with pytest.raises(TurnBusy):
            await store.report(card.card_id, report, condition)
    await caller.database.execute("update state.agent_inbox set status = 'consumed' where inbox_id = 'other'")
    assert await store.report(card.card_id, report, IN_TURN)


@requirement("result.order", "performance")
async def test_the_search_for_unread_results_reads_few_rows_of_a_large_inbox(
    caller: Caller, store: KernelStore, call: PlacedCall
) -> None:
    await caller.database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id, status) "
        "select 'old_' || n, $1, $2, 'turn', 'old_' || n, 'consumed' from generate_series(1, 20000) as n",
        PROJECT,
        AGENT,
    )
    await caller.database.execute("analyze state.agent_inbox")
    card, report = await loaded(store, call)
    values = (*v1r4.report_values(card.card_id, report, Mode.ALONE, None), card.content, card.metadata, *(None,) * 4)
    async with caller.database.transaction():
        explained = await caller.database.fetchval(f"explain (analyze, format json) {v1r4.COMMIT}", *values)
    scans = [
        node
        for node in nodes(json.loads(explained)[0]["Plan"])
        if node.get("Relation Name") == "agent_inbox" and node.get("Node Type", "").endswith("Scan")
    ]
    assert scans
    assert max(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in scans) <= 200


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a plan's node and all below it."""
    return [plan, *(node for child in plan.get("Plans", ()) for node in nodes(child))]


@requirement("result.order", "v1r3.report")
@pytest.mark.parametrize(
    ("status", "turn", "busy"),
    [("pending", "", True), ("processing", "", True), ("consumed", "", False), ("pending", "other turn", False)],
)
async def test_in_v1r3_the_turn_of_a_row_is_in_its_payload(
    stack: EmbeddedStack,
    v1r3_database: str,
    v1r3_caller: Caller,
    status: str,
    turn: str,
    busy: bool,  # noqa: FBT001
) -> None:
    call = await v1r3_caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    store = await KernelStore.open(PoolOptions("v1r3", PostgresOptions(Secret(dsn_of(stack, v1r3_database)), 4)))
    card, report = v1r3_result_of(call, await store.load(v1r3_command_of(call)))
    await v1r3_caller.database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id, recursion_depth, "
        "traceparent, payload, status) values ('other', $1, $2, 'tool_result', 'other', 0, '', $3, $4)",
        PROJECT,
        AGENT,
        {"agent_turn_id": turn or call.agent_turn_id, "turn_epoch": call.turn_epoch},
        status,
    )
    for condition in (ALONE, IN_TURN):
        if busy:
            with pytest.raises(TurnBusy):
                await store.commit(card, report, None, condition)
    assert await store.commit(card, report, None, None if busy else IN_TURN)
    await store.aclose()
