"""Secrets stay secret, and tenants apart.

Cards and definitions that only another project has are tested in test_refusals.py, keys of cache and session in
tests/unit (test_cache.py, test_tools.py).
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NotFoundError
from prometheus_client import generate_latest

from openapi_tool.kernel.jetstream.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.kernel.jetstream.dead_letters import SUBJECT_PREFIX
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.local.caller import STREAM
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.tools.secret_variables import Secret
from tests.conftest import AGENT, PROJECT, reader_tool, search_tool
from tests.requirements import requirement
from tests.support import dead_letters
from tests.wire.conftest import RECORDED_ARGUMENTS, World
from tests.wire.test_refusals import assert_answered, assert_dead_lettered

SECRET = "tenant-value"


@requirement("secrets.guesses")
async def test_a_guess_of_a_secret_is_quoted_unchanged_in_a_result(world: World) -> None:
    """A mask would confirm it, for this call's own key as for any other."""
    nothing = {"code": 422, "status": 42206, "message": "No search results available for query x"}
    world.stack.upstream.rules({"answer": "s-post-json", "statuses": [422], "body": json.dumps(nothing)})
    key = world.stack.upstream.keys["JINA_API_KEY"]
    outcome = await world.send(await world.place({"query": key}))
    assert outcome.content["result"].startswith(f"No results for {key!r}")


@requirement("secrets.guesses")
async def test_a_guess_of_a_secret_is_quoted_unchanged_in_an_error(world: World) -> None:
    await world.caller.add_tool(PROJECT, reader_tool())
    outcome = await world.send(await world.place({"url": f"https://{SECRET}/"}, "jina_reader"))
    assert f"'{SECRET}' has no dot" in outcome.content["error"]["message"]


NO_PLACE_FOR_A_KEY = [
    *(
        "locale",
        "location",
        "site",
        "url",
        "q",
        "query",
        "engine",
        "proxy",
        "cookie",
        "userAgent ",
        "Api-Key",
        " api_key",
    ),
    *("customHeader.X-Leak", "url.x", "q.x", "viewport.x", "api_key.x", "a" * 100_000),
]


@pytest.mark.parametrize("name", NO_PLACE_FOR_A_KEY, ids=lambda name: name[:20])
@requirement("options.envs")
async def test_a_definition_may_use_a_key_only_as_key(world: World, name: str) -> None:
    """Otherwise pages and third parties would see the key as locale, query or request header."""
    for tool in (search_tool, reader_tool):
        await world.caller.add_tool(PROJECT, {**tool(envs={name: "JINA_API_KEY"}), "tool_name": "a_tool"})
        outcome = await world.send(await world.place({"url": "https://a.example/"}, "a_tool"))
        error = outcome.content["error"]
        assert (error["code"], outcome.upstream_requests) == ("tool_misconfigured", [])
        assert f"options.envs.{name[:20]}" in error["message"]
        assert "secrets.env_parameters" in error["message"]
        assert len(error["message"]) < 1_000


@pytest.mark.parametrize("name", ["tenant_token", "Tenant-Token"])
@requirement("options.envs")
async def test_parameters_that_the_operator_lists_may_take_a_secret_in_any_spelling(
    world_without_executor: World, name: str
) -> None:
    secrets = {"allowed_env": ["TENANT_TOKEN"], "env_parameters": ["tenantToken"]}
    await world_without_executor.caller.add_tool(PROJECT, search_tool(envs={name: "TENANT_TOKEN"}))
    async with world_without_executor.executor(secrets=secrets):
        outcome = await world_without_executor.send(await world_without_executor.place())
    assert json.loads(outcome.upstream_requests[-1]["body"])[name] == SECRET


@requirement("options.envs")
async def test_a_definition_may_name_variables_that_the_operator_sets(world_without_executor: World) -> None:
    settings = {"tools": {"jina": {"envs": {"tenant_token": "TENANT_TOKEN"}}}}
    await world_without_executor.caller.add_tool(PROJECT, search_tool(envs={"tenant_token": "JINA_API_KEY"}))
    async with world_without_executor.executor(**settings):
        outcome = await world_without_executor.send(await world_without_executor.place())
    assert json.loads(outcome.upstream_requests[-1]["body"])["tenant_token"] == SECRET


HOSTILE = (
    "%s %(x)d %n {project_id} {0.__class__} {{x}} ${x} $(touch x) `id` '; drop table cards; -- \\x27 \r\nX-Evil: 1"
    "\r\n\r\nGET / HTTP/1.1"
)


@pytest.mark.parametrize("method", ["GET", "POST"])
@requirement("arguments.any")
async def test_templates_in_arguments_of_the_model_are_plain_text(
    world: World, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    await world.caller.add_tool(PROJECT, search_tool(jina={"mode": "search", "method": method}))
    world.stack.upstream.rules({"answer": "s-post-json"})
    with caplog.at_level(logging.DEBUG, "openapi_tool"):
        plain = await world.send(await world.place({"query": "plain", "target_selector": "plain"}))
        hostile = await world.send(await world.place({"query": HOSTILE, "target_selector": HOSTILE}))
    first, second = (outcome.upstream_requests[-1] for outcome in (plain, hostile))
    assert hostile.content["status"] == plain.content["status"] == "success"
    assert json.loads(second["body"])["q"] == json.loads(second["body"])["targetSelector"] == HOSTILE
    usual = {"content-type", "content-length", "x-target-selector", "x-respond-with"}
    assert {name.lower() for name in second["headers"]} ^ {name.lower() for name in first["headers"]} <= usual
    assert "Traceback" not in caplog.text
    assert await world.caller.database.fetchval("select count(*) from cards") >= 4


# SECURITY.md, "Personal data": where the data of a call is stored, and how it is deleted.


WORD = "zq7personal"
OTHER_AGENT = "agent_other"
SECURITY = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
SQL = [block.split(";")[:-1] for block in re.findall(r"```sql\n(.*?)```", SECURITY, re.DOTALL)]
PURGED = re.findall(rf"nats stream purge {DEAD_LETTERS} --subject (\S+) --force", SECURITY)


async def _rows(world: World, table: str) -> str:
    """Return all rows of a table as text; for `cards` only those that the executor wrote."""
    own = "where metadata ->> 'author_id' = 'tool.openapi'" if table == "cards" else ""
    rows = await world.caller.database.fetch(f"select to_jsonb(t)::text from {table} as t {own}")  # noqa: S608 - our own names
    return "\n".join(row[0] for row in rows)


async def _streams(world: World) -> str:
    """Return all messages of all streams and buckets except the kernel's commands and the dead letters."""
    jetstream, found = world.caller.client.jetstream(), ""
    for stream in await jetstream.streams_info():
        if stream.config.name not in (STREAM, DEAD_LETTERS):
            for number in range(max(1, stream.state.first_seq), stream.state.last_seq + 1):
                with suppress(NotFoundError):  # a bucket keeps only the last value of a key
                    message = await jetstream.get_msg(str(stream.config.name), number)
                    found += f"{message.subject} {message.headers} {message.data!r}"
    return found


async def _calls_with(world: World, word: str) -> None:
    """Make calls with every kind of outcome, with `word` in everything that callers and pages can choose."""
    await world.caller.add_tool(PROJECT, search_tool(args={"fixed": {"session_id": word}}))
    await world.caller.add_tool(PROJECT, reader_tool())
    page = {"title": word, "url": f"https://{word}.example/", "content": word * 5_000, "warning": word}
    world.stack.upstream.rules(
        {
            "answer": "r-post-json",
            "statuses": [503, 200, 422],
            "body": json.dumps({"code": 200, "data": page, "readableMessage": word}),
        }
    )
    for tool, arguments in [
        *(("jina_reader", {"url": f"https://a.example/{word}"}),) * 3,
        ("jina_search", {"query": word, "count": 3}),
        ("jina_search", {"query": word, word: word, "count": word}),
        ("jina_reader", {"url": f"http://{word}"}),
        ("jina_none", {"query": word}),
    ]:
        await world.send(await world.place(arguments, tool))
    lost = await world.place({"query": word})
    await world.send(
        lost, headers={**dict.fromkeys(lost.headers), "X-Words": word}, data=json.dumps({"words": word}).encode()
    )


@requirement("data.places")
async def test_arguments_and_results_are_only_in_cards_and_dead_letters(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="openapi_tool")
    await _calls_with(world, WORD)
    cards = await _rows(world, "cards")
    assert all(f'"status": "{status}"' in cards for status in ("success", "failed"))
    assert all(f'"type": "{kind}"' in cards for kind in ("tool.result", "tool.artifact"))
    assert WORD in cards
    assert WORD in "".join(str(letter["headers"]) for letter in await dead_letters(world.caller))
    assert len(caplog.records) > 8
    assert WORD not in caplog.text + json.dumps([record.__dict__ for record in caplog.records], default=str)
    assert WORD not in generate_latest().decode()
    assert WORD not in "".join(f"{bell.subject} {bell.headers} {bell.data!r}" for bell in world.doorbells)
    assert WORD not in await _rows(world, "state.agent_inbox") + await _rows(world, "state.execution_edges")
    assert WORD not in await _streams(world)


@requirement("data.places")
async def test_requests_to_the_upstream_contain_no_caller_ids(world: World) -> None:
    call = await world.place()
    outcome = await world.send(call)
    assert len(outcome.upstream_requests) == 1
    sent = json.dumps(outcome.upstream_requests)
    for name in ("project_id", "channel_id", "agent_id", "agent_turn_id", "tool_call_id", "step_id", "trace_id"):
        assert getattr(call, name) not in sent, name


async def _long_page(world: World, agent: str) -> PlacedCall:
    """Make a call of the agent whose result is truncated, so that it has two cards."""
    call = await world.place({"url": "https://a.example/"}, "jina_reader", agent=agent)
    await world.send(call)
    return call


async def _kinds(world: World) -> list[tuple[str, str]]:
    """Return type and calling agent of each card that the executor wrote."""
    rows = await world.caller.database.fetch(
        "select own.metadata ->> 'type', call.metadata ->> 'author_id' from cards as own join cards as call "
        "on call.tool_call_id = own.metadata ->> 'tool_call_id' and call.metadata ->> 'type' = 'tool.call' "
        "where own.metadata ->> 'author_id' = 'tool.openapi' order by 1, 2"
    )
    return [(row[0], row[1]) for row in rows]


async def _run(world: World, statements: list[str]) -> None:
    for statement in statements:
        await world.caller.database.execute(
            statement.replace(":'project'", f"'{PROJECT}'").replace(":'agent'", f"'{AGENT}'")
        )


@requirement("data.places")
async def test_the_documented_sql_deletes_exactly_the_documented_rows(world: World) -> None:
    of_agent, of_project = SQL  # `of_project` deletes first the results, then the expired artifacts
    await world.caller.add_agent(PROJECT, OTHER_AGENT)
    await world.caller.add_tool(PROJECT, reader_tool())
    world.stack.upstream.rules(
        {
            "answer": "r-post-json",
            "body": json.dumps({"code": 200, "data": {"title": "t", "content": "word " * 20_000}}),
        }
    )
    for agent in (AGENT, OTHER_AGENT):
        await _long_page(world, agent)
    kinds = [(kind, agent) for kind in ("tool.artifact", "tool.result") for agent in sorted((AGENT, OTHER_AGENT))]
    assert await _kinds(world) == kinds
    await _run(world, of_agent)
    assert await _kinds(world) == [entry for entry in kinds if entry[1] == OTHER_AGENT]
    await _run(world, of_project[1:])
    assert len(await _kinds(world)) == 2, "nothing has expired yet"
    await world.caller.database.execute(
        "update cards set expires_at = now() - interval '1 s' where expires_at is not null"
    )
    await _run(world, of_project[1:])
    assert await _kinds(world) == [("tool.result", OTHER_AGENT)]
    await _run(world, of_project[:1])
    assert await _kinds(world) == []
    assert await world.caller.database.fetchval("select count(*) from cards") == 2, "cards of calls are the kernel's"


@requirement("data.places")
async def test_the_documented_subject_purges_the_dead_letters_of_one_project(world: World) -> None:
    (subject,) = PURGED
    jetstream = world.caller.client.jetstream()
    call = await world.place()
    await world.send(call, headers=dict.fromkeys(call.headers), data=b"[]")
    await jetstream.publish(f"{SUBJECT_PREFIX}.another", json.dumps({"project_id": "another"}).encode())
    assert await jetstream.purge_stream(DEAD_LETTERS, subject=subject.replace("PROJECT", PROJECT))
    left = (await jetstream.stream_info(DEAD_LETTERS)).state.messages
    assert left == 1


OTHER = "proj_other"
OTHER_ARGUMENTS = {"query": "example", "count": 2}


@pytest.fixture
async def tenants(world_without_executor: World) -> World:
    """Another project with an agent and a tool of the same names, but another worker and other options."""
    await world_without_executor.caller.add_project(OTHER)
    await world_without_executor.caller.add_agent(OTHER, AGENT, "worker_other")
    await world_without_executor.caller.add_tool(OTHER, search_tool(args={"fixed": {"query": "example"}}))
    # Stored again, so that its row follows that of the other project.
    await world_without_executor.caller.add_tool(PROJECT, search_tool())
    return world_without_executor


async def placed(world: World, project: str) -> PlacedCall:
    return await world.caller.place(
        project, AGENT, "jina_search", RECORDED_ARGUMENTS if project == PROJECT else OTHER_ARGUMENTS, publish=False
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
        assert [json.loads(request["body"])["q"] for request in outcome.upstream_requests] == [
            RECORDED_ARGUMENTS["query"]
        ]
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
    store = await KernelStore.open(PoolOptions("v1r4", PostgresOptions(Secret(tenants.dsn), 1)))
    assert [await store.has_result(project, "call") for project in (PROJECT, OTHER)] == [False, True]
    await store.aclose()


@requirement("tenant.scoped")
async def test_a_cached_response_of_another_project_is_not_used(tenants: World) -> None:
    """Agent, tool, definition, session and query are the same."""
    arguments: dict[str, Any] = {**RECORDED_ARGUMENTS, "session_id": "same"}
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
