"""Secrets and hostile texts in arguments, and where the data of a call is stored."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from pathlib import Path

import pytest
from nats.js.errors import NotFoundError
from prometheus_client import generate_latest

from openapi_tool.bus.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.bus.dead_letters import SUBJECT
from openapi_tool.local.caller import STREAM, PlacedCall
from tests.conftest import AGENT, PROJECT, reader_tool, search_tool
from tests.requirements import requirement
from tests.support import dead_letters
from tests.wire.world import World

SECRET = "tenant-value"


@requirement("secrets.output")
async def test_a_secret_that_the_model_repeats_is_masked_in_a_result(world: World) -> None:
    nothing = {"code": 422, "status": 42206, "message": "No search results available for query x"}
    world.stack.upstream.rules({"answer": "s-post-json", "statuses": [422], "body": json.dumps(nothing)})
    key = world.stack.upstream.keys["JINA_API_KEY"]
    outcome = await world.send(await world.place({"query": key}))
    assert outcome.content["result"].startswith("No results for '[redacted]'")
    assert key not in str(outcome.rows)


@requirement("secrets.output")
async def test_a_secret_that_the_model_repeats_is_masked_in_an_error(world: World) -> None:
    await world.caller.add_tool(PROJECT, reader_tool())
    outcome = await world.send(await world.place({"url": f"https://{SECRET}/"}, "jina_reader"))
    assert "'[redacted]' has no dot" in outcome.content["error"]["message"]
    assert SECRET not in str(outcome.rows)


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
    idle_world: World, name: str
) -> None:
    secrets = {"allowed_env": ["TENANT_TOKEN"], "env_parameters": ["tenantToken"]}
    await idle_world.caller.add_tool(PROJECT, search_tool(envs={name: "TENANT_TOKEN"}))
    async with idle_world.executor(secrets=secrets):
        outcome = await idle_world.send(await idle_world.place())
    assert json.loads(outcome.upstream_requests[-1]["body"])[name] == SECRET


@requirement("options.envs")
async def test_a_definition_may_name_variables_that_the_operator_sets(idle_world: World) -> None:
    settings = {"tools": {"jina": {"envs": {"tenant_token": "TENANT_TOKEN"}}}}
    await idle_world.caller.add_tool(PROJECT, search_tool(envs={"tenant_token": "JINA_API_KEY"}))
    async with idle_world.executor(**settings):
        outcome = await idle_world.send(await idle_world.place())
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
    of_agent, of_project = SQL
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
    await jetstream.publish(f"{SUBJECT}.another", json.dumps({"project_id": "another"}).encode())
    assert await jetstream.purge_stream(DEAD_LETTERS, subject=subject.replace("PROJECT", PROJECT))
    left = (await jetstream.stream_info(DEAD_LETTERS)).state.messages
    assert left == 1
