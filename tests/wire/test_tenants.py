"""Two projects that use the same ids: no look-up of a call finds rows of the other one.

Cards and definitions that only another project has are tested in test_refusals.py, keys of cache and session in
tests/unit (test_cache.py, test_tools.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from openapi_tool.kernel.store import KernelStore, PoolOptions
from openapi_tool.local.caller import PlacedCall
from tests.conftest import AGENT, PROJECT, search_tool
from tests.requirements import requirement
from tests.wire.test_refusals import assert_answered, assert_dead_lettered
from tests.wire.world import KNOWN, World

OTHER = "proj_other"
OTHER_ARGUMENTS = {"query": "example", "count": 2}


@pytest.fixture
async def tenants(idle_world: World) -> World:
    """Another project with an agent and a tool of the same names, but another worker and other options."""
    await idle_world.caller.add_project(OTHER)
    await idle_world.caller.add_agent(OTHER, AGENT, "worker_other")
    await idle_world.caller.add_tool(OTHER, search_tool(args={"fixed": {"query": "example"}}))
    await idle_world.caller.add_tool(PROJECT, search_tool())  # stored again, so that its row follows the other one
    return idle_world


async def placed(world: World, project: str) -> PlacedCall:
    return await world.caller.place(
        project, AGENT, "jina_search", KNOWN if project == PROJECT else OTHER_ARGUMENTS, publish=False
    )


async def give_ids(world: World, call: PlacedCall) -> None:
    """Give the other project's rows the ids of this call, with other numbers (epoch, depth)."""
    database, ids = world.caller.database, (OTHER, call.tool_call_id)
    metadata = {"tool_call_id": call.tool_call_id, "agent_turn_id": call.agent_turn_id}
    await database.execute(
        "update cards set tool_call_id = $2, metadata = metadata || $3 where tenant_id = $1", *ids, metadata
    )
    await database.execute(
        "update state.agent_inbox set correlation_id = $2, agent_turn_id = $3, turn_epoch = 7 where project_id = $1",
        *ids,
        call.agent_turn_id,
    )
    await database.execute(
        "update state.execution_edges set correlation_id = $2, recursion_depth = 5 where project_id = $1", *ids
    )


@pytest.mark.parametrize("order", [(PROJECT, OTHER), (OTHER, PROJECT)])
@pytest.mark.parametrize("missing", [(), ("CG-Agent-Id",), ("CG-Turn-Id", "CG-Turn-Epoch")])
@requirement("tenant.scoped")
async def test_a_call_reads_only_rows_of_its_project(
    tenants: World, order: tuple[str, str], missing: tuple[str, ...]
) -> None:
    world = tenants
    calls = {project: await placed(world, project) for project in order}
    call = calls[PROJECT]
    await give_ids(world, call)
    async with world.executor():
        outcome = await world.send(call, headers=dict.fromkeys(missing))
    assert [bell.subject for bell in outcome.doorbells] == [f"cg.v1r4.{PROJECT}.public.cmd.agent.worker_generic.wakeup"]
    row = outcome.rows.inbox_row
    assert (row["project_id"], row["turn_epoch"], row["context_headers"]["CG-Recursion-Depth"]) == (PROJECT, 1, "0")
    assert outcome.rows.card["metadata"]["trace_id"] == call.trace_id
    if "CG-Agent-Id" in missing:
        assert_answered(outcome, "bad_request", "CG-Agent-Id")
    else:
        assert [json.loads(request["body"])["q"] for request in outcome.upstream_requests] == [KNOWN["query"]]
    written = await world.caller.database.fetch(
        "select tenant_id from cards where metadata ->> 'type' = 'tool.result' union all "
        "select project_id from state.agent_inbox where message_type = 'tool_result' union all "
        "select project_id from state.execution_edges where primitive = 'report'"
    )
    assert [row[0] for row in written] == [PROJECT] * 3


MOVED = {
    "anchor": "update state.agent_inbox set project_id = $1",
    "turn": "update state.agent_inbox set project_id = $1, message_type = 'turn'",
    "edge": "update state.execution_edges set project_id = $1",
}


@pytest.mark.parametrize(
    ("rows", "reason"), [("anchor", "stale_turn"), ("turn", "stale_turn"), ("edge", "no_request_edge")]
)
@requirement("tenant.scoped")
async def test_a_turn_or_edge_of_another_project_accepts_no_report(tenants: World, rows: str, reason: str) -> None:
    call = await placed(tenants, PROJECT)
    await tenants.caller.database.execute(MOVED[rows], OTHER)
    async with tenants.executor():
        outcome = await tenants.send(call)
    assert_dead_lettered(outcome, reason, terminated=False)


@requirement("tenant.scoped")
async def test_a_card_of_another_project_provides_no_identity(tenants: World) -> None:
    """Without headers and body, the call card is found by the id of the call only."""
    call = await placed(tenants, PROJECT)
    await tenants.caller.database.execute("update cards set tenant_id = $1", OTHER)
    async with tenants.executor():
        outcome = await tenants.send(call, headers={"CG-Agent-Id": None}, data=b"[]")
    assert_dead_lettered(outcome, "no_identity", terminated=True)


@requirement("tenant.scoped")
async def test_an_agent_in_the_roster_of_another_project_gets_no_doorbell(tenants: World) -> None:
    call = await placed(tenants, PROJECT)
    await tenants.caller.database.execute("delete from resource.project_agents where project_id = $1", PROJECT)
    async with tenants.executor():
        outcome = await tenants.send(call)
    assert (outcome.content["error"]["code"], outcome.doorbells) == ("tool_misconfigured", [])
    assert outcome.upstream_requests == []


@pytest.mark.parametrize("author", ["tool.openapi", "worker.watchdog"])
@requirement("tenant.scoped")
async def test_a_result_of_the_same_call_id_in_another_project_is_ignored(tenants: World, author: str) -> None:
    call = await placed(tenants, PROJECT)
    await save_result(tenants, call.tool_call_id, author)
    async with tenants.executor():
        outcome = await tenants.send(call)
    assert (outcome.content["status"], outcome.rows.card["tenant_id"]) == ("success", PROJECT)
    assert len(outcome.upstream_requests) == 1
    assert len(outcome.doorbells) == 1


@requirement("tenant.scoped")
async def test_a_report_of_the_same_call_id_in_another_project_is_ignored(tenants: World) -> None:
    """Our result was saved but not reported; the other project's was reported."""
    call = await placed(tenants, PROJECT)
    async with tenants.executor():
        await tenants.send(call)
        moved = "update {} set project_id = $1 where correlation_id = $2 and {}"
        for table, which in (
            ("state.agent_inbox", "message_type = 'tool_result'"),
            ("state.execution_edges", "primitive = 'report'"),
        ):
            await tenants.caller.database.execute(moved.format(table, which), OTHER, call.tool_call_id)
        outcome = await tenants.send(call)
    assert outcome.rows.inbox_row["payload"]["tool_result_card_id"] == outcome.rows.card["card_id"]
    assert outcome.rows.edge["project_id"] == PROJECT
    assert (len(outcome.upstream_requests), len(outcome.doorbells)) == (1, 2)


@requirement("tenant.scoped")
async def test_a_result_in_another_project_does_not_hide_an_abandoned_command(tenants: World) -> None:
    await save_result(tenants, "call", "tool.openapi")
    store = await KernelStore.open(PoolOptions(tenants.dsn, 1, 5.0, prepared_statements=True))
    assert [await store.has_result(project, "call") for project in (PROJECT, OTHER)] == [False, True]
    await store.aclose()


@requirement("tenant.scoped")
async def test_a_cached_response_of_another_project_is_not_used(tenants: World) -> None:
    """Agent, tool, definition, session and query are the same."""
    arguments: dict[str, Any] = {**KNOWN, "session_id": "same"}
    await tenants.caller.add_tool(OTHER, search_tool())
    async with tenants.executor(cache={"ttl_s": 60}):
        outcomes = [
            await tenants.send(await tenants.caller.place(project, AGENT, "jina_search", arguments, publish=False))
            for project in (PROJECT, OTHER, PROJECT, OTHER)
        ]
    assert {outcome.content["status"] for outcome in outcomes} == {"success"}
    assert [len(outcome.upstream_requests) for outcome in outcomes] == [1, 2, 2, 2]


async def save_result(world: World, tool_call_id: str, author: str) -> None:
    """Save a result of the other project with this call id."""
    await world.caller.database.execute(
        "insert into cards (card_id, tenant_id, tool_call_id, content, metadata) values ('theirs', $1, $2, $3, $4)",
        OTHER,
        tool_call_id,
        {"__type__": "ToolResultContent", "status": "success", "result": "theirs", "error": None},
        {"type": "tool.result", "author_id": author, "function_name": "jina_search"},
    )
