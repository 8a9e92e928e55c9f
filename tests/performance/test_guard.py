"""The cost of a call, held to the cost of its unavoidable work in the same run; never to a time."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.calls import Ask
from benchmarks.harness import Stand
from benchmarks.load import Load
from benchmarks.pods import simulate
from benchmarks.rounds import Found, Rounds
from benchmarks.run import bench
from benchmarks.scenarios import CPU, DEFAULT_RUNS, PROFILES
from tests.requirements import requirement

pytestmark = pytest.mark.alone

MOST = 2.7
"""Times the floor; docs/performance.md has the multiple as it is. Where it falls, lower this, too."""


async def measured() -> Found:
    [found], _ = await bench(PROFILES["quick"], DEFAULT_RUNS["quick"], extras=False)
    return found


@requirement("performance")
async def test_a_call_costs_no_more_than_it_did() -> None:
    found = await measured()
    executor, ratio = found.medians("executor"), found.ratios()["cpu_ms"]
    assert executor["nats_sent"] <= 4
    assert executor["requests"] == 1
    if ratio > MOST:  # somebody else's work may be in it, which two more runs would show
        ratio = statistics.median([ratio, *[(await measured()).ratios()["cpu_ms"] for _ in range(2)]])
    assert ratio <= MOST, found.rounds


@requirement("performance")
async def test_a_call_takes_few_statements() -> None:
    async with Stand() as stand, Load.connect(stand.nats.url) as load:
        database = await stand.database()
        statements = await Rounds(stand, load, database).statements(Ask())
        await database.close()
    assert 2 <= statements <= 3


@requirement("performance", "run.replicas")
async def test_many_pods_share_the_calls_and_send_few_messages() -> None:
    told = await simulate(count=8, calls=160, per_second=200, call_s=0.5, idle_s=0.1)
    assert (told["delivered"], told["pods_that_worked"]) == (160, 8)
    assert told["per_call"]["sent"] <= 3


async def test_an_executor_without_a_part_can_be_measured() -> None:
    [found], _ = await bench([replace(CPU, calls=20, warm=10)], 1, extras=False, without="aiohttp")
    assert found.medians("executor")["requests"] == 1
