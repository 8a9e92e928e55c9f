"""The statements of protocol v1r3 on a real PostgreSQL with its tables."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from openapi_tool.kernel.queries import call_rows
from openapi_tool.kernel.store import KernelStore, PoolOptions
from openapi_tool.kernel.v1r3 import LOAD
from openapi_tool.local.caller import Caller, PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.cards import Card, artifact_card, result_card
from openapi_tool.protocol.command import Command, Report
from openapi_tool.protocol.errors import NeedsOperator
from openapi_tool.protocol.identity import identify, new_root
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.v1r3 import V1r3
from tests.conftest import AGENT, PROJECT, search_tool
from tests.kernel.test_store import TEXT
from tests.requirements import requirement
from tests.support import delivery, dsn_of

ACTOR = "tool.openapi.jina"
V1R3 = V1r3(ACTOR)


@pytest.fixture
def options(stack: EmbeddedStack, v1r3_database: str) -> PoolOptions:
    return PoolOptions(dsn_of(stack, v1r3_database), 4, 5.0, prepared_statements=True, version="v1r3")


@pytest.fixture
async def store(options: PoolOptions) -> AsyncIterator[KernelStore]:
    store = await KernelStore.open(options)
    yield store
    await store.aclose()


@pytest.fixture
async def call(v1r3_caller: Caller) -> PlacedCall:
    await v1r3_caller.add_tool(PROJECT, search_tool())
    return await v1r3_caller.place(PROJECT, AGENT, "jina_search", {"query": "x"}, publish=False)


def command_of(call: PlacedCall) -> Command:
    return V1R3.decode(delivery(call.headers, call.body, subject=call.subject))


def result_of(call: PlacedCall, records: CallRecords) -> tuple[Card, Report]:
    identity = identify(command_of(call).identity, records.card)
    card = result_card(
        actor_id=ACTOR,
        function_name="jina_search",
        identity=identity,
        call_card=records.card,
        status="success",
        after_execution="suspend",
        result="hello",
        error=None,
        tool_output=None,
    )
    return card, V1R3.report(V1R3.accept(identity, records), new_root(), "a=b", card.card_id, card.content)


async def edges(caller: Caller) -> list[dict[str, Any]]:
    rows = await caller.database.fetch("select * from state.execution_edges order by primitive")
    return [dict(row) for row in rows]


@requirement("v1r3.report")
async def test_one_read_brings_everything_that_is_known_of_a_call(call: PlacedCall, store: KernelStore) -> None:
    records = await store.load(command_of(call))
    assert records.card is not None
    assert records.card.content["arguments"] == {"query": "x"}
    assert records.tool is not None
    assert records.worker_target == "worker_generic"
    assert records.request_edge is not None
    assert records.request_edge.recursion_depth == 0
    assert (records.waiting_turn, records.earlier, records.reported_inbox_id) == (None, None, None)


@requirement("v1r3.report", "answer.atomic")
async def test_a_commit_writes_card_row_and_edge_in_the_columns_of_the_version(
    call: PlacedCall, store: KernelStore, v1r3_caller: Caller
) -> None:
    card, report = result_of(call, records := await store.load(command_of(call)))
    artifact = artifact_card(ACTOR, identify(command_of(call).identity, records.card), records.card, TEXT, 60)
    assert await store.commit(card, report, artifact)
    answer = await v1r3_caller.read_result(call)
    row = answer.inbox_row
    assert row["traceparent"] == report.context_headers["traceparent"]
    assert (row["tracestate"], row["trace_id"], row["recursion_depth"]) == ("a=b", report.trace_id, 0)
    assert (row["source_agent_id"], row["source_step_id"], row["parent_step_id"]) == (ACTOR, None, call.step_id)
    assert row["payload"] == report.payload
    assert (answer.edge["source_agent_id"], answer.edge["target_agent_turn_id"]) == (ACTOR, None)
    assert answer.edge["parent_step_id"] == call.step_id
    assert await store.has_result(PROJECT, call.tool_call_id)
    assert await store.artifact(PROJECT, AGENT, artifact.card_id, 0, 10) is not None
    assert not await store.commit(replace(card, card_id="other"), replace(report, inbox_id="other"))


@requirement("v1r3.report")
async def test_a_missing_request_edge_is_created_and_an_existing_one_is_unchanged(
    call: PlacedCall, store: KernelStore, v1r3_caller: Caller
) -> None:
    existing = await edges(v1r3_caller)
    records = await store.load(command_of(call))
    assert await store.commit(*result_of(call, records))
    report, request = await edges(v1r3_caller)
    assert [request] == existing
    for table in ("cards", "state.agent_inbox", "state.execution_edges"):
        condition = "metadata ->> 'type' = 'tool.result'" if table == "cards" else "true"
        await v1r3_caller.database.execute(f"delete from {table} where {condition}")  # noqa: S608 - texts of this file
    records = await store.load(command_of(call))
    assert records.request_edge is None
    assert await store.commit(*result_of(call, records))
    report, request = await edges(v1r3_caller)
    assert (report["primitive"], report["edge_phase"]) == ("report", "response")
    assert (request["primitive"], request["edge_phase"], request["recursion_depth"]) == ("tool_call", "request", 0)
    assert (request["source_agent_id"], request["source_step_id"]) == (AGENT, call.step_id)
    assert (request["trace_id"], request["channel_id"]) == (report["trace_id"], "public")


@requirement("v1r3.doorbell", "answer.earlier")
async def test_the_doorbell_of_an_earlier_report_is_built_from_its_row(call: PlacedCall, store: KernelStore) -> None:
    card, report = result_of(call, await store.load(command_of(call)))
    assert await store.commit(card, report)
    earlier = (await store.load(command_of(call))).earlier
    assert earlier is not None
    assert (earlier.author_id, earlier.report_status) == (ACTOR, "pending")
    assert (earlier.is_deleted, earlier.is_of_this_call) == (False, True)
    assert V1R3.wakeup(PROJECT, "worker_generic", earlier.report_headers or {}) == report.wakeup


@requirement("answer.earlier")
async def test_a_card_without_its_report_is_reported(call: PlacedCall, store: KernelStore, v1r3_caller: Caller) -> None:
    card, report = result_of(call, await store.load(command_of(call)))
    assert await store.commit(card, report)
    await v1r3_caller.database.execute("delete from state.agent_inbox")
    assert (await store.load(command_of(call))).earlier is not None
    assert await store.report(card.card_id, report)
    assert not await store.report(card.card_id, report)
    assert not await store.report("missing", replace(report, inbox_id="other"))


@requirement("tenant.scoped")
async def test_nothing_of_another_project_is_read(call: PlacedCall, store: KernelStore) -> None:
    card, report = result_of(call, await store.load(command_of(call)))
    assert await store.commit(card, report)
    command = command_of(call)
    foreign = await store.load(replace(command, identity=replace(command.identity, project_id="other")))
    assert foreign == CallRecords(None, None, None, None, None, None)


@requirement("performance")
async def test_a_load_uses_indexes_only(call: PlacedCall, v1r3_caller: Caller) -> None:
    for table in ("cards", "state.agent_inbox", "state.execution_edges"):
        await v1r3_caller.database.execute(f"analyze {table}")
    await v1r3_caller.database.execute("set enable_seqscan = off")
    await v1r3_caller.database.execute(f"prepare load(text, text, text, text, text, text, text, text) as {LOAD}")
    plan = await v1r3_caller.database.fetch(
        "explain execute load($1, $2, $3, 'a', 't', 'c', 'n', 'n')".replace("$1", f"'{PROJECT}'")
        .replace("$2", f"'{call.card_id}'")
        .replace("$3", f"'{call.tool_call_id}'")
    )
    assert not [row[0] for row in plan if "Seq Scan" in row[0]]


@requirement("dialects.recognised")
async def test_a_database_of_the_other_version_is_named(
    stack: EmbeddedStack, options: PoolOptions, database: str
) -> None:
    with pytest.raises(NeedsOperator, match=r"a database of protocol v1r3, but v1r4 is configured.*protocol\.version"):
        await KernelStore.open(replace(options, version="v1r4"))
    with pytest.raises(NeedsOperator, match="a database of protocol v1r4, but v1r3 is configured"):
        await KernelStore.open(replace(options, dsn=dsn_of(stack, database)))


@requirement("postgres.failures")
async def test_a_missing_column_is_not_mistaken_for_the_other_version(
    options: PoolOptions, v1r3_caller: Caller
) -> None:
    await v1r3_caller.database.execute("alter table state.execution_edges rename column metadata to meta")
    with pytest.raises(NeedsOperator, match='column "metadata" of relation "execution_edges"'):
        await KernelStore.open(options)


async def test_the_timeline_reads_the_inbox_of_the_version(
    call: PlacedCall, store: KernelStore, options: PoolOptions
) -> None:
    assert await store.commit(*result_of(call, await store.load(command_of(call))))
    rows = await call_rows(options.dsn, "v1r3", PROJECT, call.tool_call_id)
    assert [row["status"] for row in rows.inbox] == ["pending"]
    assert {row["edge_phase"] for row in rows.edges} == {"request", "response"}
    assert {row["type"] for row in rows.cards} == {"tool.call", "tool.result"}
