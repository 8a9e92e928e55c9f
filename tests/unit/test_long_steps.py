"""Long steps of the event loop do not add up in one iteration."""

from __future__ import annotations

import asyncio

import pytest

from openapi_tool.concurrency.long_steps import LONG_BYTES, without_other_long_steps
from tests.requirements import requirement
from tests.waiting import WAIT_S

LONG, SHORT = 10_000_000, 1_000


async def iterations_of_steps(sizes: list[int], *, long: int = LONG_BYTES, cancelled: int | None = None) -> list[int]:
    """Return the iteration of the event loop in which each step ran."""
    loop, now, found = asyncio.get_running_loop(), 0, []

    def tick() -> None:
        nonlocal now
        now += 1
        loop.call_soon(tick)

    async def step(size: int) -> None:
        await without_other_long_steps(size, long)
        found.append(now)

    loop.call_soon(tick)
    tasks = [asyncio.create_task(step(size)) for size in sizes]
    if cancelled is not None:
        await asyncio.sleep(0)
        tasks[cancelled].cancel()
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait(tasks)
    return found


@requirement("loop.answers")
async def test_long_steps_run_in_iterations_of_their_own() -> None:
    steps = await iterations_of_steps([LONG] * 5)
    assert len(set(steps)) == 5


@requirement("loop.answers")
async def test_short_steps_wait_for_nothing() -> None:
    assert len(set(await iterations_of_steps([LONG, SHORT, SHORT]))) == 1


@requirement("loop.answers")
async def test_a_caller_says_above_which_size_its_step_is_long() -> None:
    assert len(set(await iterations_of_steps([SHORT] * 5, long=SHORT - 1))) == 5


@requirement("loop.answers")
@pytest.mark.parametrize("cancelled", [1, 2])
async def test_a_cancelled_step_does_not_keep_the_others_waiting(cancelled: int) -> None:
    steps = await iterations_of_steps([LONG] * 4, cancelled=cancelled)
    assert len(set(steps)) == len(steps) == 3
