"""What really leaves: the requests that the double received, byte for byte."""

from __future__ import annotations

import json
from typing import Any

from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.cards import TOOL_RESULT
from tests.conftest import AGENT, PROJECT, StartExecutor, reader_tool, search_tool
from tests.promises import requirement

SEARCH_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["query"],
    "properties": {"query": {"type": "string"}, "count": {"type": "integer", "maximum": 20}},
}


@requirement(
    "options.order", "options.defaults", "options.fixed", "options.envs", "options.identity", "upstream.request"
)
async def test_two_unequal_definitions_give_exactly_the_requests_that_they_imply(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(
        PROJECT,
        {
            **search_tool(
                args={
                    "defaults": {"session_id": "{agent_turn_id}", "count": 2, "hl": "de"},
                    "fixed": {"project_id": "{project_id}", "site": ["jina.ai", "{project_id}.example"]},
                },
                envs={"api_key": "SEARCH_API_KEY"},
                jina={
                    "mode": "search",
                    "base_url": "https://s.jina.ai",
                    "path": "/search",
                    "method": "GET",
                    "auth_env": "JINA_API_KEY",
                    "params": {"nfpr": True},
                },
            ),
            "parameters": SEARCH_SCHEMA,
        },
    )
    await caller.add_tool(
        PROJECT,
        reader_tool(
            args={
                "defaults": {"session_id": "s"},
                "fixed": {"target_selector": "#{agent_id}", "agent_id": "{agent_id}"},
            },
            envs={"tenant_token": "TENANT_TOKEN"},
            jina={
                "mode": "reader",
                "endpoint_template": "https://r.jina.ai/{url}",
                "method": "GET",
                "headers": {"X-Retain-Images": "none"},
            },
        ),
    )
    start_executor()

    search = await caller.place(PROJECT, AGENT, "jina_search", {"query": "a b+c&d"})
    await caller.answer(search, 10)
    read = await caller.place(
        PROJECT, AGENT, "jina_reader", {"url": "https://a.example/?x=%20#f", "tenant_token": "forged"}, suffix="read"
    )
    await caller.answer(read, 10)

    first, second = stack.upstream.requests()
    assert (first["method"], first["host"], first["key"]) == ("GET", "s.jina.ai", "SEARCH_API_KEY")
    assert sorted(first["target"].partition("?")[2].split("&")) == sorted(
        ["nfpr=true", "num=2", "hl=de", "q=a%20b%2Bc%26d", "site=jina.ai", f"site={PROJECT}.example"]
    )
    assert first["target"].startswith("/search?")
    assert headers_of(first) == {"accept": "application/json", "x-respond-with": "no-content"}
    assert first["body"] == ""

    assert (second["method"], second["host"], second["target"]) == ("POST", "r.jina.ai", "/")
    assert second["key"] == "JINA_API_KEY"
    assert headers_of(second) == {"accept": "application/json", "content-type": "application/json"}
    assert json.loads(second["body"]) == {
        "url": "https://a.example/?x=%20#f",
        "targetSelector": f"#{AGENT}",
        "retainImages": "none",
        "tenant_token": "tenant-value",
        "timeout": 11,  # two stages of it and 3 s are what the worker's 30 s leave, less 3 s for the commit
    }


def headers_of(received: dict[str, Any]) -> dict[str, str]:
    """The headers that say something; how long and from whom is not the tool's."""
    usual = {"host", "content-length", "accept-encoding", "user-agent", "connection"}
    return {name.lower(): value for name, value in received["headers"].items() if name.lower() not in usual}


@requirement("secrets.output")
async def test_a_key_that_the_upstream_echoes_reaches_no_row_and_no_log(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, reader_tool())
    executor = start_executor({"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"})
    rule = {"match": "example", "answer": "r-post-json", "echo_headers": True}
    for statuses, status, where in (
        ([], "success", "result"),
        ([400] * 2, "failed", "error"),
        ([422] * 2, "failed", "error"),
    ):
        stack.upstream.rules({**rule, "statuses": statuses})
        call = await caller.place(PROJECT, AGENT, "jina_reader", {"url": "https://a.example/"}, suffix="read")
        content = (await caller.answer(call, 10)).card["content"]
        assert content["status"] == status, content
        assert "[redacted]" in json.dumps(content[where]), "the upstream did echo it"
    everything = await _rows(caller) + executor.log_text()
    assert stack.upstream.keys["JINA_API_KEY"] not in everything


@requirement("secrets.output")
async def test_a_secret_of_the_body_reaches_no_row_and_no_log(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, reader_tool(envs={"tenant_token": "TENANT_TOKEN"}))
    executor = start_executor({"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"})
    call = await caller.place(PROJECT, AGENT, "jina_reader", {"url": "https://a.example/"}, suffix="read")
    await caller.answer(call, 10)
    assert json.loads(stack.upstream.requests()[0]["body"])["tenant_token"] == "tenant-value"
    assert "tenant-value" not in await _rows(caller) + executor.log_text()


async def _rows(caller: Caller) -> str:
    """All result cards and inbox rows as text."""
    rows = await caller.database.fetch(
        "select c::text from cards as c where metadata ->> 'type' = $1 "
        "union all select i::text from state.agent_inbox as i",
        TOOL_RESULT,
    )
    assert rows
    return "\n".join(row[0] for row in rows)


@requirement("local.double")
async def test_the_double_answers_what_it_does_not_know_with_an_error(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    start_executor()
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "nobody recorded this"})
    answer = await caller.answer(call, 10)
    assert answer.card["content"]["status"] == "failed"
    assert answer.card["content"]["error"]["http_status"] == 501
    assert [entry["status"] for entry in stack.upstream.requests()] == [501]


@requirement("local.double")
async def test_the_double_refuses_a_key_that_it_does_not_know(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    start_executor({"JINA_API_KEY": "not-the-right-one"})
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3})
    answer = await caller.answer(call, 10)
    assert answer.card["content"]["error"]["code"] == "auth_failed"
    assert stack.upstream.requests()[0]["key"] is None
