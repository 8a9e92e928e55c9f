"""Limits that one call, one replica or one damaged record could make useless for all others."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass, field

import orjson
import pytest

from openapi_tool.jina.failures import key_failure
from openapi_tool.limits import ledger
from openapi_tool.limits.ledger import Rates
from openapi_tool.limits.limiter import Limiter
from openapi_tool.limits.permits import Need
from openapi_tool.options import LimitOptions
from openapi_tool.protocol.errors import RateLimited
from openapi_tool.tools.deadline import Deadline
from tests.requirements import requirement
from tests.unit.test_keys import Replicas, replicas
from tests.unit.test_limits import STEP_S, Pod, World

RECORD = "limit.A.search"


@dataclass
class Opening:
    """Replicas that always want to open more requests, each of which takes `request_s` seconds."""

    world: World
    request_s: float = 1.0
    open: dict[int, list[float]] = field(default_factory=dict)
    most: int = 0

    def run(self, seconds: float) -> list[int]:
        """Return how many requests each replica has opened."""
        opened = dict.fromkeys(map(id, self.world.pods), 0)
        end, chance = self.world.now + seconds, random.Random(3)  # noqa: S311
        while self.world.now < end:
            self.world.now += STEP_S
            for pod in chance.sample(self.world.pods, len(self.world.pods)):
                opened[id(pod)] += self.step(pod)
        return list(opened.values())

    def step(self, pod: Pod) -> int:
        allowance, ends = pod.allowance, self.open.setdefault(id(pod), [])
        ended = [end for end in ends if end <= self.world.now]
        allowance.running -= len(ended)
        ends[:] = [end for end in ends if end > self.world.now]
        if pod.waiting and self.world.now >= pod.due:
            self.world.change(pod)
            pod.due = self.world.now + 1
        begun = 0
        while begun < pod.waiting and allowance.take(self.world.now) is not None:
            ends.append(self.world.now + self.request_s)
            begun += 1
        self.most = max(self.most, sum(map(len, self.open.values())))
        return begun


@pytest.mark.parametrize("limit", [1, 2, 4, 10])
@requirement("limits.shared")
def test_a_replica_that_starts_later_gets_its_share_of_concurrent_requests(limit: int) -> None:
    world = World(Rates(concurrent=limit))
    world.start()
    world.pods[0].waiting = 12
    opening = Opening(world)
    [alone] = opening.run(20)
    for _ in range(3):
        world.start()
        world.pods[-1].waiting = 12
    opening.run(10)
    opened = opening.run(80)
    assert opening.most <= limit
    assert max(opened) <= 1.5 * min(opened)
    assert sum(opened) >= 0.5 * 4 * alone  # with one request at a time, a replica waits for its turn


@requirement("limits.shared")
async def test_a_request_of_millions_of_tokens_does_not_stop_all_later_ones() -> None:
    async with replicas(1, LimitOptions(search_tokens_per_minute=200_000)) as world:
        [limiter] = world.limiters
        for wait_s, tokens in ((0, 10_000), (10, 2_000_000), (70, 10_000), (10, 10_000), (10, 10_000)):
            world.now += wait_s
            (await world.permit(limiter)).done(tokens)


@pytest.mark.parametrize("torn", [{"replicas": {"x": ["a"]}}, {"requests": {"used": {"9": 1e308}, "paced_until": 0}}])
@requirement("limits.window")
async def test_a_damaged_record_stops_no_call(torn: dict[str, object]) -> None:
    async with replicas(2, LimitOptions(search_requests_per_minute=60)) as world:
        for limiter in world.limiters:
            (await world.permit(limiter)).done(1)
        revision, value = world.records[RECORD]
        damaged = orjson.dumps(orjson.loads(value) | torn)
        world.records[RECORD] = revision + 1, damaged
        for limiter in world.limiters:
            limiter.on_change(RECORD, revision + 1, damaged)
        world.now += 10
        for limiter in world.limiters:
            (await world.permit(limiter)).done(1)


@requirement("limits.window")
async def test_a_forged_change_with_a_huge_revision_holds_calls_back_for_seconds_only() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=60)) as world:
        [limiter] = world.limiters
        (await world.permit(limiter)).done(1)
        forged = orjson.dumps(orjson.loads(world.records[RECORD][1]) | {"paused_until": 9e11})
        limiter.on_change(RECORD, 10**18, forged)
        with pytest.raises(RateLimited, match=r"Call again in 1?[0-9]?[0-9] s"):
            await world.permit(limiter)
        world.now += 25  # longer than the interval of reports
        await asyncio.sleep(0.6)
        (await world.permit(limiter)).done(1)


@requirement("limits.window")
async def test_a_defect_of_the_limiter_is_logged_and_calls_go_through_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    real, broken = ledger.apply_report, [True]

    def broken_once(*given: object) -> object:
        if broken:
            broken.pop()
            raise TypeError("a defect")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "apply_report", broken_once)
    async with replicas(1, LimitOptions(search_requests_per_minute=60)) as world:
        (await world.permit(world.limiters[0])).done(1)
    assert "limits.broken" in [getattr(record, "action", "") for record in caplog.records]


@requirement("limits.window")
async def test_a_deleted_record_is_written_again_with_what_was_sent() -> None:
    async with replicas(2, LimitOptions(search_requests_per_minute=20)) as world:
        await exhaust(world)
        sent = world.sent["first value"]
        world.records.clear()
        world.now += 2
        await exhaust(world)
        world.records.clear()
        world.now += 2
        await exhaust(world)
        assert 10 <= sent <= world.sent["first value"] <= 20


async def exhaust(world: Replicas) -> None:
    """Send until no replica gets a permit within half a second."""
    for limiter in world.limiters:
        try:
            while True:
                (await world.permit(limiter, wait_s=0.5)).done(1)
        except RateLimited:
            pass


@requirement("limits.shared")
async def test_a_replica_that_starts_while_the_store_refuses_writes_does_not_take_the_whole_limit() -> None:
    async with replicas(2, LimitOptions(search_requests_per_minute=60)) as world:
        for limiter in world.limiters:
            (await world.permit(limiter)).done(1)
        world.full = True
        world.now += 70
        newest = world.start()
        await exhaust(world)
        assert newest.snapshot()[0]["sent"] <= 60 / 3


@requirement("limits.window")
async def test_a_request_that_waited_for_its_connection_counts_from_when_it_was_sent() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=10)) as world:
        [limiter] = world.limiters
        permits = [await world.permit(limiter) for _ in range(10)]
        world.now += 5
        for permit in permits:
            permit.connected()
            permit.done(1)
        world.now += 57  # 62 s since the permits, 57 s since the requests
        with pytest.raises(RateLimited):
            await world.permit(limiter, wait_s=1)
        world.now += 5
        (await world.permit(limiter)).done(1)


@requirement("limits.waiting")
async def test_slow_requests_of_one_project_do_not_end_the_wait_of_quick_ones() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=60)) as world:
        [limiter] = world.limiters
        slow = [await world.permit(limiter) for _ in range(9)]
        (await world.permit(limiter)).done(1)
        world.now += 50
        for permit in slow:
            permit.done(1)
        for _ in range(10):
            (await world.permit(limiter)).done(1)
        waiting = asyncio.create_task(world.permit(limiter, wait_s=20))
        await asyncio.sleep(0.6)  # two steps of the limiter
        assert not waiting.done()
        world.now += 2
        (await waiting).done(1)


@requirement("limits.waiting")
async def test_a_call_that_gets_no_permit_is_told_when_to_come_again() -> None:
    async with replicas(1, LimitOptions(search_concurrent=1)) as world:
        [limiter] = world.limiters
        held = await world.permit(limiter)
        with pytest.raises(RateLimited, match="nothing was sent") as refused:
            await world.permit(limiter, wait_s=1)
        assert refused.value.retry_after is not None
        held.done(1)


@requirement("limits.waiting", "fair.weights")
async def test_permits_of_a_key_go_to_projects_by_their_weights() -> None:
    world = Replicas(LimitOptions(search_requests_per_minute=60))
    limiter = Limiter("r", world.options, world, lambda: world.now, key_failure, {"heavy": 3.0})
    world.limiters.append(limiter)
    world.use({"A": "first value"})
    served: Counter[str] = Counter()

    async def call(project: str) -> None:
        need = Need("A", "search", (project, "a"), Deadline.after(30), world.secrets("A"))
        (await limiter.acquire(need)).done(1)
        served[project] += 1

    try:
        for _ in range(10):
            await call("first")
        calls = [asyncio.create_task(call(project)) for project in ("light", "heavy") for _ in range(40)]
        while sum(served.values()) < 10 + 24:
            await asyncio.sleep(0.01)
            world.now += 0.1
        assert served["heavy"] >= 2 * served["light"] > 0
        for one in calls:
            one.cancel()
        await asyncio.wait(calls)
    finally:
        await limiter.aclose()
