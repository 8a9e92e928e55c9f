"""Results that are too long: cut, kept, gone on with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from openapi_tool.local.caller import PlacedCall
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.result import FRAME_CLOSE, FRAME_OPEN
from tests.conftest import PROJECT, reader_tool, search_tool
from tests.promises import requirement
from tests.wire.world import Outcome, World

LIMIT = 2_000
LONG = {"answer": "r-post-json", "body_bytes": 7_000}
URL = {"url": "https://long.example/"}
BATCH = {"mode": "reader", "tool": "jina.read_many"}


@pytest.fixture
async def world(idle_world: World) -> AsyncIterator[World]:
    """Everything, with an executor that shows little at once."""
    async with idle_world.executor(tools={"max_result_chars": LIMIT}):
        yield idle_world


async def read(world: World, arguments: Mapping[str, Any], agent: str | None = None, **options: Any) -> Outcome:
    await world.caller.add_tool(PROJECT, reader_tool(**options))
    more = {"agent": agent} if agent else {}
    call: PlacedCall = await world.place(dict(arguments), "jina_reader", suffix="read", **more)
    return await world.send(call)


def about(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = outcome.answer.card["metadata"]["tool_output"]
    return found


async def artifacts(world: World) -> list[dict[str, Any]]:
    rows = await world.caller.database.fetch(
        "select *, expires_at - now() as left from cards where metadata ->> 'type' = 'tool.artifact'"
    )
    return [dict(row) for row in rows]


def text_of(content: str) -> str:
    """A part without its frame and its note."""
    body = content.partition(f"{FRAME_OPEN}\n")[2].partition(f"\n{FRAME_CLOSE}")[0]
    return re.sub(r"\s", "", body)


@requirement("size.artifact", "size.continued")
async def test_a_long_page_is_read_part_by_part_from_one_request(world: World) -> None:
    world.stack.upstream.rules(LONG)
    outcome = await read(world, URL)
    (artifact,) = await artifacts(world)
    whole = artifact["content"]["text"]
    reference = {"card_id": artifact["card_id"], "chars": len(whole), "sha256": _sha256(whole)}
    assert about(outcome)["artifact_ref"] == reference
    assert about(outcome)["usage"]["requests"] == 1
    parts = []
    for _ in range(20):
        content, found = outcome.content["result"], about(outcome)
        assert len(content) <= LIMIT
        assert content.count(FRAME_OPEN) == content.count(FRAME_CLOSE) == 1
        assert found["artifact_ref"] == reference
        assert found["truncated"] == (found["next_cursor"] is not None)
        parts.append(text_of(content))
        if not found["truncated"]:
            break
        assert f'call this tool again, with only cursor "{found["next_cursor"]}".]' in content
        outcome = await read(world, {"cursor": found["next_cursor"]})
        assert outcome.content["status"] == "success"
        assert about(outcome)["usage"] == {"tokens": 0, "requests": 0}
    assert len(parts) > 3
    assert "".join(parts) == text_of(whole)
    assert len(outcome.upstream_requests) == 1
    assert len(await artifacts(world)) == 1


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@requirement("size.artifact")
async def test_the_whole_text_is_a_card_of_the_callers_that_expires(world: World) -> None:
    world.stack.upstream.rules(LONG)
    outcome = await read(world, URL)
    (artifact,) = await artifacts(world)
    call, result = outcome.answer.card["metadata"], artifact["metadata"]
    for name in ("project_id", "author_id", "agent_turn_id", "tool_call_id", "step_id", "trace_id"):
        assert result[name] == call[name]
    assert result["agent_id"] == agent_of(outcome)
    assert (artifact["tenant_id"], artifact["tool_call_id"]) == (PROJECT, None)
    assert artifact["content"].keys() == {"__type__", "text"}
    assert artifact["content"]["__type__"] == "TextContent"
    assert artifact["ttl_seconds"] == 604_800
    assert 604_700 < artifact["left"].total_seconds() <= 604_800


def agent_of(outcome: Outcome) -> str:
    agent: str = outcome.answer.inbox_row["agent_id"]
    return agent


@requirement("size.artifact")
@pytest.mark.parametrize("jina", [{"params": {"doNotTrack": True}}, {"headers": {"DNT": "1"}}])
async def test_nothing_is_kept_of_a_page_that_may_not_be_tracked(world: World, jina: dict[str, Any]) -> None:
    world.stack.upstream.rules(LONG)
    outcome = await read(world, URL, jina={"mode": "reader", **jina})
    assert "are not kept; ask for less" in outcome.content["result"]
    assert len(outcome.content["result"]) <= LIMIT
    assert (about(outcome)["truncated"], about(outcome)["next_cursor"]) == (True, None)
    assert about(outcome)["artifact_ref"] is None
    assert await artifacts(world) == []


@requirement("size.cursor")
@pytest.mark.parametrize("stranger", ["agent", "project", "expired", "deleted", "forged"])
async def test_a_cursor_of_somebody_else_or_of_nothing_is_unknown(world: World, stranger: str) -> None:
    world.stack.upstream.rules(LONG)
    cursor = about(await read(world, URL))["next_cursor"]
    change = {
        "project": "update cards set tenant_id = 'proj_other' where metadata ->> 'type' = 'tool.artifact'",
        "expired": "update cards set expires_at = now() where metadata ->> 'type' = 'tool.artifact'",
        "deleted": "update cards set deleted_at = now() where metadata ->> 'type' = 'tool.artifact'",
    }.get(stranger)
    if change:
        await world.caller.database.execute(change)
    if stranger == "forged":
        cursor = ("B" if cursor[0] == "A" else "A") + cursor[1:]
    if stranger == "agent":
        await world.caller.add_agent(PROJECT, "agent_other")
    outcome = await read(world, {"cursor": cursor}, "agent_other" if stranger == "agent" else None)
    assert outcome.content["error"]["code"] == "not_found"
    assert "ask for the page itself again" in outcome.content["error"]["message"]
    assert len(outcome.upstream_requests) == 1


@requirement("size.cursor")
async def test_the_same_cursor_in_another_project_is_unknown(world: World) -> None:
    world.stack.upstream.rules(LONG)
    outcome = await read(world, URL)
    agent, cursor = agent_of(outcome), about(outcome)["next_cursor"]
    await world.caller.furnish("proj_other", agent, [reader_tool()])
    call = await world.caller.place("proj_other", agent, "jina_reader", {"cursor": cursor}, publish=False)
    other = await world.send(call)
    assert other.content["error"]["code"] == "not_found"
    assert len(other.upstream_requests) == 1


@requirement("size.cursor")
async def test_a_cursor_leads_on_in_another_session_of_its_agent(world: World) -> None:
    world.stack.upstream.rules(LONG)
    session = {"defaults": {"session_id": "{agent_turn_id}"}}  # every turn has a session of its own
    outcome = await read(world, URL, args=session)
    rest = await read(world, {"cursor": about(outcome)["next_cursor"]}, args=session)
    assert rest.answer.inbox_row["agent_turn_id"] != outcome.answer.inbox_row["agent_turn_id"]
    assert rest.content["status"] == "success"
    assert len(rest.upstream_requests) == 1


@requirement("size.results")
async def test_search_results_are_left_out_whole(world: World) -> None:
    await world.caller.add_tool(PROJECT, search_tool())
    results = [{"title": f"Title {n}", "url": f"https://{n}.example/", "description": "words " * 50} for n in range(9)]
    world.stack.upstream.rules({"answer": "s-num-0", "body": json.dumps({"code": 200, "data": results})})
    outcome = await world.send(await world.place({"query": "many results"}))
    content, found = outcome.content["result"], about(outcome)
    assert len(content) <= LIMIT
    (artifact,) = await artifacts(world)
    left = re.search(r"The last (\d+) results are left out: ([\d,]+) of ([\d,]+) characters", content)
    assert left
    whole = artifact["content"]["text"]
    shown = len(found["state"]["results"]) - int(left[1])
    body = content.partition(f"{FRAME_OPEN}\n")[2].partition(f"\n{FRAME_CLOSE}")[0]
    assert whole.partition(f"{FRAME_OPEN}\n")[2].startswith(f"{body}\n\n{shown + 1}. ")
    assert "call a page reading tool that takes one" in content
    rest = await read(world, {"cursor": found["next_cursor"]})
    assert f"]\n{FRAME_OPEN}\n{shown + 1}. " in rest.content["result"]
    assert rest.content["result"].startswith("[Continued: characters ")


@requirement("size.artifact")
async def test_a_batch_that_is_too_long_is_kept_in_one_text(world: World) -> None:
    world.stack.upstream.rules({"match": "gone", "statuses": [422] * 9, "answer": "r-post-json"}, LONG)
    outcome = await read(world, {"urls": ["https://gone.example/", "https://long.example/"]}, jina=BATCH)
    content = outcome.content["result"]
    assert content.startswith("1 of 2 succeeded")
    assert content.count(FRAME_OPEN) == content.count(FRAME_CLOSE) == 1
    assert len(content) <= LIMIT
    rest = await read(world, {"cursor": about(outcome)["next_cursor"]})
    assert rest.content["status"] == "success"


@requirement("size.continued")
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"cursor": "x", **URL}, "url: cannot be given together with cursor"),
        ({"cursor": "x", "target_url": "https://a.example/"}, "target_url: cannot be given together with cursor"),
        ({"cursor": 7}, "cursor: must be the text that an earlier result named"),
        ({}, "url or cursor: one of them is required"),
    ],
)
async def test_a_call_names_either_a_page_or_a_cursor(world: World, arguments: dict[str, Any], names: str) -> None:
    outcome = await read(world, arguments)
    assert outcome.content["error"]["code"] == "bad_request"
    assert names in outcome.content["error"]["message"]


@requirement("size.continued")
async def test_a_cursor_that_is_null_is_none(world: World) -> None:
    world.stack.upstream.rules({"answer": "r-post-json"})
    outcome = await read(world, {**URL, "cursor": None})
    assert outcome.content["status"] == "success"


@requirement("size.continued")
@pytest.mark.parametrize(
    ("parameters", "offered"),
    [
        (CATALOGUE["jina.read"].schema(), True),
        ({"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}, False),
        ({"type": "object", "properties": {"url": {"type": "string"}}, "additionalProperties": False}, False),
        ({}, True),
    ],
)
async def test_a_cursor_is_only_offered_where_it_will_be_taken(
    world: World, parameters: dict[str, Any], *, offered: bool
) -> None:
    world.stack.upstream.rules(LONG)
    await world.caller.add_tool(PROJECT, {**reader_tool(), "parameters": parameters})
    outcome = await world.send(await world.place(URL, "jina_reader", suffix="read"))
    assert ("call this tool again, with only cursor" in outcome.content["result"]) == offered


@requirement("size.artifact", "secrets.output")
async def test_what_is_kept_holds_no_key(world: World) -> None:
    world.stack.upstream.rules({**LONG, "echo_headers": True})
    key = world.stack.upstream.keys["JINA_API_KEY"]
    outcome = await read(world, {"urls": [URL["url"], f"https://a.example/{key}"]}, jina=BATCH)
    (artifact,) = await artifacts(world)
    for text in (artifact["content"]["text"], json.dumps(outcome.answer.card, default=str)):
        assert key not in text
        assert "[redacted]" in text


@requirement("size.artifact")
async def test_an_object_result_names_the_artifact_too(world: World) -> None:
    world.stack.upstream.rules(LONG)
    result = (await read(world, URL, result_format="object")).content["result"]
    assert result["truncated"] is True
    assert result["next_cursor"] in result["content"]
    assert result["artifact_ref"].keys() == {"card_id", "chars", "sha256"}
