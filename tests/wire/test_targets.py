"""Page addresses: repaired, refused before anything is billed, or let through where an operator says so."""

from __future__ import annotations

import json

import pytest

from tests.conftest import PROJECT, reader_tool
from tests.promises import requirement
from tests.wire.world import Outcome, World

ANY_PAGE = {"answer": "r-post-json"}


async def _read(world: World, url: str) -> Outcome:
    world.stack.upstream.rules(ANY_PAGE)
    await world.caller.add_tool(PROJECT, reader_tool())
    return await world.send(await world.place({"url": url}, "jina_reader", suffix="read"))


@pytest.mark.parametrize(
    "url",
    ["http://localhost/", "http://0x7f.1/", "http://[::ffff:10.0.0.1]/", "http://db.svc", "http://169.254.169.254/"],
)
@requirement("target.internal")
async def test_an_internal_target_is_refused_before_it_is_billed(world: World, url: str) -> None:
    outcome = await _read(world, url)
    assert outcome.content["error"]["code"] == "target_refused"
    assert outcome.upstream_requests == []


@pytest.mark.parametrize("url", ["<https://example.com/a>", "[a page](https://example.com/a)", "example.com/a"])
@requirement("target.repaired")
async def test_an_address_whose_intent_is_plain_is_repaired(world: World, url: str) -> None:
    [sent] = (await _read(world, url)).upstream_requests
    assert json.loads(sent["body"])["url"] == "https://example.com/a"


@requirement("target.internal")
async def test_an_operator_may_let_an_internal_host_through(idle_world: World) -> None:
    async with idle_world.executor(targets={"allow": ("wiki.corp",)}):
        allowed, refused = await _read(idle_world, "http://wiki.corp/x"), await _read(idle_world, "http://db.corp/x")
    assert allowed.content["status"] == "success"
    assert refused.content["error"]["code"] == "target_refused"
