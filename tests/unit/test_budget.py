from __future__ import annotations

import asyncio

from openapi_tool.jina.budget import ByteBudget
from tests.promises import requirement


async def _soon() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@requirement("memory.budget")
async def test_who_finds_no_room_waits_until_another_gives_some_back() -> None:
    budget = ByteBudget(100)
    with budget.room() as first, budget.room() as second:
        await first.take(70)
        waiting = asyncio.create_task(second.take(60))
        await _soon()
        assert not waiting.done()
        first.keep(40)
        await waiting
        assert budget.free_bytes == 0
    assert budget.free_bytes == 100


@requirement("memory.budget")
async def test_nobody_overtakes_who_waits_for_much() -> None:
    budget, order = ByteBudget(100), []

    async def hold(name: str, size: int) -> None:
        with budget.room() as room:
            await room.take(size)
            order.append(name)

    with budget.room() as room:
        await room.take(60)
        large = asyncio.create_task(hold("large", 90))
        await _soon()
        small = asyncio.create_task(hold("small", 10))
        await _soon()
        assert order == []
    await asyncio.gather(large, small)
    assert order == ["large", "small"]
    assert budget.free_bytes == 100


@requirement("memory.budget")
async def test_who_gives_up_waiting_holds_nothing_and_blocks_nobody() -> None:
    budget = ByteBudget(100)
    with budget.room() as first, budget.room() as second, budget.room() as third:
        await first.take(60)
        given_up = asyncio.create_task(second.take(90))
        waiting = asyncio.create_task(third.take(40))
        await _soon()
        given_up.cancel()
        await asyncio.wait([given_up])
        await waiting
        late = asyncio.create_task(second.take(60))
        await _soon()
        first.keep(0)  # gives `late` its room
        late.cancel()  # before it could see that
        await asyncio.wait([late])
    assert budget.free_bytes == 100
