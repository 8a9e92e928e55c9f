"""Several questions or pages in one call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openapi_tool.local.caller import PlacedCall
from tests.conftest import PROJECT, reader_tool, search_tool
from tests.promises import requirement
from tests.wire.world import Outcome, World

ARTICLE, SHORT, GONE = (f"http://site.fixture.test:8099/{page}" for page in ("article", "short", "gone"))
RULES = (
    {"match": "gone", "statuses": [422] * 9, "answer": "r-post-json"},
    {"match": "slow", "hang": True},
    {"answer": "r-post-json"},
)


async def read_many(world: World, urls: Any, **more: Any) -> Outcome:
    return await _call(world, reader_tool(jina={"tool": "jina.read_many"}), {"urls": urls, **more})


async def _call(world: World, tool: dict[str, Any], arguments: dict[str, Any]) -> Outcome:
    await world.caller.add_tool(PROJECT, tool)
    call: PlacedCall = await world.place(arguments, tool["tool_name"], suffix="many")
    return await world.send(call)


def tool_output(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = outcome.answer.card["metadata"]["tool_output"]
    return found


@requirement("batch.partial")
async def test_one_page_that_fails_does_not_sink_its_siblings(world: World) -> None:
    world.stack.upstream.rules(*RULES)
    outcome = await read_many(world, [ARTICLE, GONE, SHORT])
    assert outcome.content["status"] == "success"
    text = outcome.content["result"]
    assert text.startswith("2 of 3 succeeded")
    assert f"## 1 of 3: {ARTICLE}\n[Web content below" in text
    assert f"## 2 of 3: {GONE}\nFailed (upstream_rejected): " in text
    state = tool_output(outcome)["state"]
    assert (state["succeeded"], state["failed"]) == (2, 1)
    assert [(entry["item"], entry["status"]) for entry in state["results"]] == [
        (ARTICLE, "success"),
        (GONE, "failed"),
        (SHORT, "success"),
    ]
    assert state["results"][1]["error"]["code"] == "upstream_rejected"
    assert tool_output(outcome)["usage"]["requests"] == 3
    assert len(outcome.doorbells) == 1


@requirement("batch.partial")
async def test_a_slow_page_times_out_alone(world: World) -> None:
    world.stack.upstream.rules(*RULES)
    outcome = await read_many(world, [ARTICLE, "https://slow.example/"], timeout=1)
    assert outcome.content["status"] == "success"
    assert "Failed (tool_timeout): " in outcome.content["result"]
    assert [entry["status"] for entry in tool_output(outcome)["state"]["results"]] == ["success", "timeout"]


@requirement("batch.once")
async def test_duplicates_are_asked_once_and_answered_each(world: World) -> None:
    world.stack.upstream.rules(*RULES)
    outcome = await read_many(world, [ARTICLE, SHORT, ARTICLE])
    assert len(outcome.upstream_requests) == 2
    assert outcome.content["result"].count(" of 2: ") == 2
    assert [entry["item"] for entry in tool_output(outcome)["state"]["results"]] == [ARTICLE, SHORT, ARTICLE]
    assert tool_output(outcome)["state"]["succeeded"] == 3


@requirement("batch.failed")
async def test_a_batch_of_which_nothing_succeeds_has_failed_and_names_each_item(world: World) -> None:
    world.stack.upstream.rules(*RULES)
    outcome = await read_many(world, [GONE, "ftp://no.example"])
    assert (outcome.content["status"], outcome.content["error"]["code"]) == ("failed", "upstream_rejected")
    message = outcome.content["error"]["message"]
    assert GONE in message
    assert "ftp://no.example: url: 'ftp:' cannot be read." in message
    assert [entry["item"] for entry in outcome.content["error"]["detail"]["results"]] == [GONE, "ftp://no.example"]


@requirement("batch.failed")
async def test_a_reason_that_all_items_share_is_said_once(world: World) -> None:
    world.stack.upstream.rules({"statuses": [401] * 9})
    outcome = await read_many(world, [ARTICLE, SHORT, GONE])
    assert outcome.content["error"]["code"] == "auth_failed"
    assert outcome.content["error"]["message"].count("key of this tool was refused") == 1


@requirement("batch.parallel")
async def test_a_search_for_many_asks_in_parallel(world: World) -> None:
    world.stack.upstream.rules({"answer": "s-post-json", "delay_s": 0.5})
    arguments = {"queries": ["one", "two", "three"], "count": 3}
    outcome = await _call(world, search_tool(jina={"tool": "jina.search_many"}), arguments)
    sent = outcome.upstream_requests
    assert sorted(json.loads(request["body"])["q"] for request in sent) == ["one", "three", "two"]
    assert all(json.loads(request["body"])["num"] == 3 for request in sent)
    assert max(request["at"] for request in sent) - min(request["at"] for request in sent) < 0.5
    assert "## 3 of 3: three\n" in outcome.content["result"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"urls": []}, "urls: must be a list of 1 to 10 texts"),
        ({"urls": [ARTICLE] * 11}, "urls: must be a list of 1 to 10 texts"),
        ({"urls": ARTICLE}, "urls: must be a list"),
        ({"urls": [ARTICLE, " ", 7]}, "urls[1]"),
        ({"urls": [ARTICLE, " ", 7]}, "urls[2]"),
        ({"urls": [ARTICLE], "url": SHORT}, "url: is not an argument of this tool, which takes urls"),
        ({"urls": [ARTICLE], "target_url": SHORT}, "target_url: is not an argument of this tool, which takes urls"),
        ({"url": ARTICLE}, "urls: must be a list"),
    ],
)
@requirement("batch.arguments")
async def test_a_batch_that_cannot_be_asked(world: World, arguments: dict[str, Any], names: str) -> None:
    outcome = await _call(world, reader_tool(jina={"tool": "jina.read_many"}), arguments)
    assert outcome.content["error"]["code"] == "bad_request"
    assert names in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []


@requirement("batch.arguments")
async def test_a_tool_of_one_page_takes_no_list(world: World) -> None:
    outcome = await _call(world, reader_tool(), {"urls": [ARTICLE]})
    assert outcome.content["error"]["code"] == "bad_request"
    assert "urls: is not an argument" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []
