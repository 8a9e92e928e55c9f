"""Budgets of an executor on a real NATS; `end_to_end/test_budgets.py` has several processes."""

from __future__ import annotations

import pytest
from nats.js.errors import NotFoundError

from openapi_tool.budgets import ledger
from openapi_tool.bus.storage import BUDGETS
from tests.requirements import requirement
from tests.wire.world import World

NO_JOURNAL = b"{}"
"""Journal of an executor that has reported everything."""


@requirement("budgets.calls")
async def test_uses_survive_a_restart_and_a_cached_response_costs_nothing(idle_world: World) -> None:
    world = idle_world
    for number in (1, 2):
        async with world.executor(budgets={"session_requests": 3}, cache={"ttl_s": 300}):
            await world.send(await world.place())
            outcome = await world.send(await world.place())
        output = outcome.rows.card["metadata"]["tool_output"]
        assert (output["cached"], output["budget"]) == (True, {"session": {"requests": 3, "requests_left": 3 - number}})
        bucket = await world.caller.client.jetstream().key_value(BUDGETS.bucket)
        values = [(await bucket.get(name)).value or b"" for name in await bucket.keys()]
        [account] = [value for value in values if value != NO_JOURNAL]
        record = ledger.decode(account)
        assert (record.used.requests, record.held(0.0)) == (number, ledger.NOTHING)
    await world.caller.client.jetstream().delete_key_value(BUDGETS.bucket)


@requirement("budgets.calls")
async def test_without_budgets_nothing_is_stored(world: World) -> None:
    outcome = await world.send(await world.place())
    assert "budget" not in outcome.rows.card["metadata"]["tool_output"]
    with pytest.raises(NotFoundError):
        await world.caller.client.jetstream().stream_info(f"KV_{BUDGETS.bucket}")
