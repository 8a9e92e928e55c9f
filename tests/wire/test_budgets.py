"""Budgets over three executors, with a real NATS and the double's count of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from nats.js.errors import NotFoundError
from typer.testing import CliRunner

from openapi_tool.budgets import ledger
from openapi_tool.bus.budget_store import BUCKET
from openapi_tool.cli import app
from tests.conftest import PROJECT
from tests.requirements import requirement
from tests.wire.world import World

LIMIT = 100


@asynccontextmanager
async def executors(world: World, number: int, **budgets: Any) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for _ in range(number):
            await stack.enter_async_context(world.executor(budgets=budgets, cache={"ttl_s": 0}))
        yield
    with suppress(NotFoundError):
        await world.caller.client.jetstream().delete_key_value(BUCKET)


async def upstream(world: World) -> list[dict[str, Any]]:
    return await asyncio.to_thread(world.stack.upstream.requests)


@requirement("budgets.exact", "budgets.calls")
async def test_three_executors_send_exactly_the_budget(idle_world: World) -> None:
    world = idle_world
    async with executors(world, 3, project_day_requests=LIMIT):
        placed = [await world.place() for _ in range(2 * LIMIT)]
        await asyncio.gather(*map(world.caller.publish, placed))
        await world.settled(30)
        answers = [await world.caller.read_answer(call) for call in placed]
        requests = await upstream(world)
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["budgets", "--project", PROJECT, "--json"],
            env={"NATS_SERVERS": world.stack.nats.url, "PG_DSN": world.dsn},
        )  # fmt: skip
    errors = [answer.card["content"]["error"] for answer in answers]
    refused = [error for error in errors if error]
    assert {error["code"] for error in refused} == {"budget_exceeded"}
    assert (len(requests), len(refused)) == (LIMIT, LIMIT)
    assert min(error["detail"]["used"] for error in refused) >= LIMIT - 2
    left = [answer.card["metadata"]["tool_output"]["budget"]["project_day"]["requests_left"] for answer in answers]
    assert min(left) == 0
    [account] = json.loads(result.stdout)["budgets"]
    assert (account["scope"], account["requests_left"]) == ("project_day", 0)


@requirement("budgets.calls")
async def test_uses_are_kept_over_restarts_and_a_cached_answer_costs_nothing(idle_world: World) -> None:
    world = idle_world
    for number in (1, 2):
        async with world.executor(budgets={"session_requests": 3}, cache={"ttl_s": 300}):
            await world.send(await world.place())
            outcome = await world.send(await world.place())
        about = outcome.answer.card["metadata"]["tool_output"]
        assert (about["cached"], about["budget"]) == (True, {"session": {"requests": 3, "requests_left": 3 - number}})
        bucket = await world.caller.client.jetstream().key_value(BUCKET)
        [name] = await bucket.keys()
        record = ledger.decode((await bucket.get(name)).value)
        assert (record.used.requests, record.held(0.0)) == (number, ledger.NOTHING)
    await world.caller.client.jetstream().delete_key_value(BUCKET)


@requirement("budgets.calls")
async def test_without_budgets_nothing_is_stored(world: World) -> None:
    outcome = await world.send(await world.place())
    assert "budget" not in outcome.answer.card["metadata"]["tool_output"]
    with pytest.raises(NotFoundError):
        await world.caller.client.jetstream().stream_info(f"KV_{BUCKET}")
