"""A call leaves no reference cycle, whose collection would block the event loop while other calls wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.conftest import PROJECT, reader_tool
from tests.requirements import requirement
from tests.support import left_for_the_garbage_collector
from tests.wire.conftest import World

PAGE = "http://site.fixture.test:8099/article"
ATTEMPTS = 4
_CONNECTION = "openapi_tool.jina.upstream_connection.UpstreamConnection"
"""A closed TLS connection is a cycle: the event loop's transport and its protocol refer to each other."""

CALLS: Mapping[str, tuple[Mapping[str, Any] | None, Mapping[str, Any]]] = {
    "search": (None, {}),
    "page": (None, {"tool": "jina_reader", "arguments": {"url": PAGE}}),
    "batch": (None, {"tool": "jina_reader", "arguments": {"urls": [PAGE, f"{PAGE}?2"]}}),
    "unknown tool": (None, {"tool": "no_such_tool"}),
    "invalid arguments": (None, {"arguments": {"query": 7}}),
    "unknown cursor": (None, {"arguments": {"cursor": "0" * 32}}),
    "refused": ({"statuses": [422]}, {}),
    "retried": ({"statuses": [503] * ATTEMPTS, "retry_after": "0"}, {}),
    "broken connection": ({"drop": "half"}, {}),
    "no JSON": ({"body": "<html>"}, {}),
    "too large": ({"body_bytes": 2_000_000}, {}),
}
"""Rule of the double, and tool and arguments of the call."""


@pytest.mark.parametrize("kind", CALLS)
@requirement("loop.answers")
async def test_a_call_leaves_nothing_for_the_garbage_collector(world_without_executor: World, kind: str) -> None:
    world = world_without_executor
    rule, given = CALLS[kind]
    await world.caller.add_tool(PROJECT, reader_tool())

    async def call() -> None:
        if rule is not None:
            world.stack.upstream.rules(rule)
        await world.send(await world.place(**given))

    async with world.executor(egress={"max_response_bytes": 1_000_000}):
        left = await left_for_the_garbage_collector(call)
    del left[_CONNECTION]
    assert not {name: count for name, count in left.items() if name.startswith("openapi_tool.")}, left
