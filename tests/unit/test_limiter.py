"""Limits under outliers: one call, one replica or one damaged record must not stop all others."""

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
from openapi_tool.limits.limiter import Limiter
from openapi_tool.limits.permits import Need, Permit
from openapi_tool.limits.record import ADAPTIVE_S, Rates, decode
from openapi_tool.options import LimitOptions
from openapi_tool.protocol.errors import RateLimited
from openapi_tool.tools.deadline import Deadline
from tests.requirements import requirement
from tests.unit.test_limits import STEP_S, Pod, Replicas, World, refusal, replicas

RECORD = "limit.A.search"


@dataclass
class ConcurrentLoad:
    """Replicas that always want to open more requests, each of which takes `request_s` seconds."""

    world: World
    request_s: float = 1.0
    step_s: float = STEP_S
    open: dict[int, list[float]] = field(default_factory=dict)
    most: int = 0

    def run(self, seconds: float) -> list[int]:
        """Run for `seconds`; return how many requests each replica has opened."""
        opened = dict.fromkeys(map(id, self.world.pods), 0)
        end, chance = self.world.now + seconds, random.Random(3)  # noqa: S311
        while self.world.now < end:
            self.world.now += self.step_s
            for pod in chance.sample(self.world.pods, len(self.world.pods)):
                opened[id(pod)] += self.step(pod)
        return list(opened.values())

    def step(self, pod: Pod) -> int:
        allowance, ends = pod.allowance, self.open.setdefault(id(pod), [])
        ended = [end for end in ends if end <= self.world.now]
        allowance.running -= len(ended)
        ends[:] = [end for end in ends if end > self.world.now]
        since_s = self.world.now - (pod.due - 1)
        if (pod.waiting and since_s >= 1) or allowance.concurrency_due(pod.waiting, since_s, self.world.now):
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
    load = ConcurrentLoad(world)
    [alone] = load.run(20)
    for _ in range(3):
        world.start()
        world.pods[-1].waiting = 12
    load.run(10)
    opened = load.run(80)
    assert load.most <= limit
    assert max(opened) <= 1.5 * min(opened)
    assert sum(opened) >= 0.5 * 4 * alone  # with one request at a time, a replica waits for its turn


@requirement("limits.shared")
def test_concurrent_requests_of_a_killed_replica_are_free_after_seconds() -> None:
    world = World(Rates(concurrent=4))
    world.start()
    world.pods[0].waiting = 12
    load = ConcurrentLoad(world, request_s=30)
    assert load.run(2) == [4]
    world.pods.clear()
    load.open.clear()
    world.start()
    world.pods[0].waiting = 12
    assert load.run(6) == [4]


@requirement("limits.shared")
def test_no_replica_takes_the_concurrent_requests_of_others_after_an_outage() -> None:
    world = World(Rates(concurrent=4))
    for _ in range(2):
        world.start()
        world.pods[-1].waiting = 2
    one, two = world.pods
    assert ConcurrentLoad(world, request_s=100).run(0.25) == [2, 2]
    one.waiting = two.waiting = 12
    world.now += 20  # no report gets through
    for _ in range(3):
        world.now += 1
        world.change(one)
        assert one.allowance.take(world.now) is None
    world.change(two)
    for _ in range(6):
        world.now += 1
        world.change(one)
        world.change(two)
        assert one.allowance.take(world.now) is None


@pytest.mark.parametrize("limit", [1, 2, 6])
@requirement("limits.shared")
def test_a_limit_of_fewer_concurrent_requests_than_replicas_is_used(limit: int) -> None:
    world = World(Rates(concurrent=limit))
    for _ in range(4):
        world.start()
        world.pods[-1].waiting = 12
    load = ConcurrentLoad(world, request_s=0.3, step_s=0.05)
    load.run(5)
    opened = load.run(60)
    assert load.most <= limit
    assert sum(opened) >= 0.85 * limit * 60 / 0.3
    assert max(opened) <= 1.4 * min(opened)


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


def forge(world: Replicas, part: dict[str, object]) -> None:
    """Replace parts of the stored record, and notify all replicas."""
    revision, value = world.records[RECORD]
    forged = orjson.dumps(orjson.loads(value) | part)
    world.records[RECORD] = revision + 1, forged
    for limiter in world.limiters:
        limiter.on_change(RECORD, revision + 1, forged)


IN_2096 = 4_000_000_000
GREEDY = [IN_2096, 1_000_000, IN_2096, 1_000_000, 0, 1_000_000, 0, 1, 0]  # the stored fields of a `Replica`


@pytest.mark.parametrize(
    "part",
    [
        {"requests": {"used": {}, "paced_until": 1e12}},
        {"requests": {"used": {str(2 * IN_2096): 1_000_000}, "paced_until": 0}},
        {"replicas": {"forged": GREEDY}},
        {"adaptive": {"limit": 10, "since": 1e12, "changed": 1e12, "until": 1e12}},
    ],
)
@requirement("limits.window")
async def test_a_forged_record_holds_calls_back_for_minutes_only(part: dict[str, object]) -> None:
    async with replicas(2, LimitOptions(search_requests_per_minute=60, search_concurrent=5)) as world:
        for limiter in world.limiters:
            (await world.permit(limiter)).done(1)
        forge(world, part)
        for _ in range(7):
            world.now += 21  # longer than the interval of reports
            await asyncio.sleep(0.3)
        for limiter in world.limiters * 4:
            (await world.permit(limiter)).done(1)


@requirement("limits.shared")
async def test_a_forged_limit_of_a_key_without_one_ends_after_an_hour() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        permit = await world.permit(limiter)
        permit.failed(refusal(42901))
        await asyncio.sleep(0.1)
        forge(world, {"adaptive": {"limit": 10, "since": 1e12, "changed": 1e12, "until": 1e12}})
        world.now += 21
        await asyncio.sleep(0.3)
        assert limiter.snapshot()[0]["found_by_429"]
        world.now += ADAPTIVE_S
        await asyncio.sleep(0.3)
        assert not limiter.snapshot() or not limiter.snapshot()[0]["found_by_429"]


@pytest.mark.parametrize("options", [LimitOptions(search_requests_per_minute=60), LimitOptions()])
@requirement("limits.shared")
async def test_a_replica_pauses_after_a_429_although_the_store_refuses_writes(options: LimitOptions) -> None:
    async with replicas(2, options) as world:
        one, two = world.limiters
        permits = [await world.permit(limiter) for limiter in world.limiters]
        world.full = True
        for permit in permits:
            error = refusal(42901)
            error.retry_after = 90
            permit.failed(error)
        await asyncio.sleep(1.3)  # longer than the interval between attempts to write
        for limiter in world.limiters:
            with pytest.raises(RateLimited):
                await world.permit(limiter)
        world.full = False
        world.now += 60
        await asyncio.sleep(1.3)
        assert decode(world.records[RECORD][1]).paused_until >= world.now + 29, "shared once the store is back"
        world.now += 31
        for limiter in (one, two):
            (await world.permit(limiter)).done(1)


@requirement("limits.shared")
async def test_a_429_during_a_write_of_the_record_is_not_lost() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=60)) as world:
        [limiter] = world.limiters
        permit = await world.permit(limiter)
        write = world.write
        writing, end_first, end_second = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow(name: str, value: bytes, revision: int) -> int | None:
            end = end_second if writing.is_set() else end_first
            writing.set()
            await end.wait()
            return await write(name, value, revision)

        world.write = slow  # type: ignore[method-assign]
        world.now += 21
        async with asyncio.timeout(10):
            await writing.wait()
        error = refusal(42901)
        error.retry_after = 90
        permit.failed(error)
        end_first.set()
        await asyncio.sleep(0.1)  # the first write is confirmed; that of the pause is under way
        paused_s = limiter.snapshot()[0]["paused_s"]
        end_second.set()
        assert paused_s > 80


@requirement("limits.window")
async def test_a_defect_of_the_limiter_is_logged_and_later_calls_get_permits(
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
async def test_a_call_without_a_permit_gets_retry_after() -> None:
    async with replicas(1, LimitOptions(search_concurrent=1)) as world:
        [limiter] = world.limiters
        held = await world.permit(limiter)
        with pytest.raises(RateLimited, match="Call again in") as refused:
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


@requirement("limits.shared", "hostile.neighbour")
async def test_slow_requests_of_one_project_leave_a_request_to_others() -> None:
    async with replicas(1, LimitOptions(search_concurrent=8)) as world:
        [limiter] = world.limiters

        def acquire(project: str) -> asyncio.Task[Permit]:
            need = Need("A", "search", (project, "a"), Deadline.after(30), world.secrets("A"))
            return asyncio.create_task(limiter.acquire(need))

        quiet = await acquire("quiet")
        quiet.done(1)
        slow = [acquire("slow") for _ in range(20)]
        await asyncio.sleep(0.5)
        granted = [task for task in slow if task.done()]
        assert len(granted) == 7
        quiet = await asyncio.wait_for(acquire("quiet"), 1)
        quiet.done(1)
        granted[0].result().done(1)
        await asyncio.sleep(0.5)
        assert sum(task.done() for task in slow) == 8, "one ended, one began"
        for task in slow:
            task.cancel()


@requirement("limits.shared")
async def test_one_project_alone_uses_all_concurrent_requests() -> None:
    async with replicas(1, LimitOptions(search_concurrent=8)) as world:
        [limiter] = world.limiters
        permits = [await world.permit(limiter) for _ in range(8)]
        assert limiter.snapshot()[0]["running"] == len(permits)
