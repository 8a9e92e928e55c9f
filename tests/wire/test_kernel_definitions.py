"""Definitions as the kernel ships them for its own executor: open schemas, other names of the query and page."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest

from tests.conftest import PROJECT
from tests.requirements import requirement
from tests.wire.conftest import Outcome, World

SEARCH: dict[str, Any] = {
    "tool_name": "jina_search",
    "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
    "after_execution": "suspend",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "count": {"type": "integer", "default": 5}},
        "required": ["query"],
    },
    "options": {"jina": {"mode": "search", "base_url": "https://s.jina.ai", "path": "/search", "method": "GET"}},
}
READER: dict[str, Any] = {
    "tool_name": "jina_reader",
    "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.read",
    "after_execution": "suspend",
    "parameters": {
        "type": "object",
        "properties": {"url": {"type": "string"}, "respondWith": {"type": "string"}},
        "required": ["url"],
    },
    "options": {"jina": {"mode": "reader", "base_url": "https://r.jina.ai", "endpoint_template": "/{url}"}},
}
PAGE = "http://site.fixture.test:8099/article"


async def called(world: World, tool: dict[str, Any], arguments: dict[str, Any]) -> Outcome:
    world.stack.upstream.rules({"answer": "r-post-json" if tool is READER else "s-post-json"})
    await world.caller.add_tool(PROJECT, tool)
    return await world.send(await world.place(arguments, tool["tool_name"]))


def repaired(outcome: Outcome) -> list[str]:
    names: list[str] = outcome.rows.card["metadata"]["tool_output"].get("repaired", [])
    return names


@requirement("arguments.kernel")
@pytest.mark.parametrize(
    ("tool", "arguments", "sent", "named"),
    [
        (SEARCH, {"q": "hello"}, "hello", "q"),
        (SEARCH, {"Q": "hello"}, "hello", "Q"),
        (READER, {"target_url": PAGE}, PAGE, "target_url"),
        (READER, {"targetUrl": PAGE}, PAGE, "targetUrl"),
    ],
)
async def test_another_name_of_the_query_or_page_is_translated(
    world: World, tool: dict[str, Any], arguments: dict[str, Any], sent: str, named: str
) -> None:
    outcome = await called(world, tool, arguments)
    assert (outcome.content["status"], repaired(outcome)) == ("success", [named])
    [request] = outcome.upstream_requests
    assert sent in unquote(str(request))


@requirement("arguments.kernel")
async def test_the_declared_name_may_be_the_other_one(world: World) -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    outcome = await called(world, {**SEARCH, "parameters": parameters}, {"query": "hello"})
    assert (outcome.content["status"], repaired(outcome)) == ("success", ["query"])


@requirement("arguments.kernel")
@pytest.mark.parametrize("tool", [SEARCH, READER], ids=["search", "reader"])
async def test_an_unknown_argument_of_an_open_schema_is_dropped_and_never_sent(
    world: World, tool: dict[str, Any]
) -> None:
    main = {"query": "hello"} if tool is SEARCH else {"url": PAGE}
    outcome = await called(world, tool, {**main, "tone": "never-sent", "nested": {"a": ["never-sent"]}})
    assert (outcome.content["status"], repaired(outcome)) == ("success", ["nested", "tone"])
    [request] = outcome.upstream_requests
    assert "never-sent" not in str(request)
    assert "tone" not in str(request)


@requirement("arguments.kernel")
async def test_an_unknown_argument_is_named_if_the_query_is_missing(world: World) -> None:
    outcome = await called(world, SEARCH, {"quary": "hello"})
    assert outcome.content["error"]["code"] == "bad_request"
    assert "query" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []


@requirement("arguments.kernel")
async def test_a_parameter_that_only_an_operator_sets_is_refused_and_not_dropped(world: World) -> None:
    outcome = await called(world, READER, {"url": PAGE, "setCookies": "a=b"})
    assert outcome.content["error"]["code"] == "bad_request"
    assert "setCookies" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []


@requirement("arguments.kernel")
async def test_a_closed_schema_refuses_unknown_arguments_and_other_names(world: World) -> None:
    closed = {**SEARCH, "parameters": {**SEARCH["parameters"], "additionalProperties": False}}
    outcome = await called(world, closed, {"query": "hello", "tone": "formal"})
    assert "tone" in outcome.content["error"]["message"]
    outcome = await called(world, closed, {"q": "hello"})
    assert outcome.content["error"]["code"] == "bad_request"
    assert outcome.upstream_requests == []
