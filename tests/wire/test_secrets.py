"""What a model writes: secrets that it knows from elsewhere, and texts that want to be more than data."""

from __future__ import annotations

import json
import logging

import pytest

from tests.conftest import PROJECT, reader_tool, search_tool
from tests.promises import requirement
from tests.wire.world import World

SECRET = "tenant-value"


@requirement("secrets.output")
async def test_what_the_model_gave_back_is_masked_in_a_result(world: World) -> None:
    nothing = {"code": 422, "status": 42206, "message": "No search results available for query x"}
    world.stack.upstream.rules({"answer": "s-post-json", "statuses": [422], "body": json.dumps(nothing)})
    key = world.stack.upstream.keys["JINA_API_KEY"]
    outcome = await world.send(await world.place({"query": key}))
    assert outcome.content["result"].startswith("No results for '[redacted]'")
    assert key not in str(outcome.answer)


@requirement("secrets.output")
async def test_what_the_model_gave_back_is_masked_in_an_error(world: World) -> None:
    await world.caller.add_tool(PROJECT, reader_tool())
    outcome = await world.send(await world.place({"url": f"https://{SECRET}/"}, "jina_reader"))
    assert "'[redacted]' has no dot" in outcome.content["error"]["message"]
    assert SECRET not in str(outcome.answer)


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
@requirement("options.env_parameters")
async def test_a_definition_puts_a_key_only_where_a_key_belongs(world: World, name: str) -> None:
    """Pages and third parties saw the key as the locale of their reader, as a query or as a header of its request."""
    for tool in (search_tool, reader_tool):
        await world.caller.add_tool(PROJECT, {**tool(envs={name: "JINA_API_KEY"}), "tool_name": "a_tool"})
        outcome = await world.send(await world.place({"url": "https://a.example/"}, "a_tool"))
        error = outcome.content["error"]
        assert (error["code"], outcome.upstream_requests) == ("tool_misconfigured", [])
        assert f"options.envs.{name[:20]}" in error["message"]
        assert "secrets.env_parameters" in error["message"]
        assert len(error["message"]) < 1_000


@pytest.mark.parametrize("name", ["tenant_token", "Tenant-Token"])
@requirement("options.env_parameters")
async def test_what_the_operator_lists_may_take_a_secret_in_any_spelling(idle_world: World, name: str) -> None:
    secrets = {"allowed_env": ["TENANT_TOKEN"], "env_parameters": ["tenantToken"]}
    await idle_world.caller.add_tool(PROJECT, search_tool(envs={name: "TENANT_TOKEN"}))
    async with idle_world.executor(secrets=secrets):
        outcome = await idle_world.send(await idle_world.place())
    assert json.loads(outcome.upstream_requests[-1]["body"])[name] == SECRET


@requirement("options.env_parameters")
async def test_what_the_operator_sets_himself_a_definition_may_name_too(idle_world: World) -> None:
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
@requirement("input.data")
async def test_a_text_that_wants_to_be_more_is_data(
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
