"""Answers that are kept: for their owner, for a while, and never where the call says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import PROJECT, reader_tool, search_tool
from tests.promises import requirement
from tests.wire.world import KNOWN, Outcome, World

KEPT = {"cache": {"ttl_s": 60}}


async def _again(world: World, **changes: Any) -> Outcome:
    return await world.send(await world.place(**changes))


@requirement("cache.kept")
async def test_the_same_question_again_is_answered_from_memory(idle_world: World) -> None:
    world = idle_world
    async with world.executor(**KEPT):
        first, second = await _again(world), await _again(world)
    assert len(second.upstream_requests) == 1
    assert second.content["result"] == first.content["result"]
    about = [outcome.answer.card["metadata"]["tool_output"] for outcome in (first, second)]
    assert [(entry["cached"], entry["usage"]["requests"]) for entry in about] == [(False, 1), (True, 0)]


@requirement("cache.scoped")
async def test_another_agent_or_session_is_another_owner(idle_world: World) -> None:
    world = idle_world
    await world.caller.add_agent(PROJECT, "agent_other")
    async with world.executor(**KEPT):
        await _again(world)
        await _again(world, agent="agent_other")
        outcome = await _again(world, arguments={**KNOWN, "session_id": "another"})
    assert len(outcome.upstream_requests) == 3


@pytest.mark.parametrize("options", [{"params": {"doNotTrack": True}}, {"params": {"noCache": True}}])
@requirement("cache.kept")
async def test_no_cache_and_do_not_track_keep_nothing(idle_world: World, options: dict[str, Any]) -> None:
    world = idle_world
    world.stack.upstream.rules({"answer": "s-post-json"})
    await world.caller.add_tool(PROJECT, search_tool(jina={"mode": "search", **options}))
    async with world.executor(**KEPT):
        await _again(world)
        outcome = await _again(world)
    assert outcome.content["status"] == "success"
    assert len(outcome.upstream_requests) == 2


@requirement("cache.kept")
async def test_a_model_may_ask_for_a_fresh_page(idle_world: World) -> None:
    world = idle_world
    world.stack.upstream.rules({"answer": "r-post-json"})
    await world.caller.add_tool(PROJECT, reader_tool())
    page = {"url": "http://site.fixture.test:8099/article"}
    async with world.executor(**KEPT):
        sent = [
            await world.send(await world.place(arguments, "jina_reader", suffix="read"))
            for arguments in (page, {**page, "no_cache": True}, page)
        ]
    assert [len(outcome.upstream_requests) for outcome in sent] == [1, 2, 2]
