"""Several replicas that share limits, in virtual time: never above a limit, whatever fails, and fair among projects."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import SecretStr

from openapi_tool.jina.failures import key_failure, upstream_failure
from openapi_tool.protocol.errors import RateLimited, Unavailable
from openapi_tool.protocol.projects import AgentKey
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.quotas.permits import PermitRequest
from openapi_tool.state.memory import MemoryRecords
from openapi_tool.state.nats_kv import MAX_VALUE_BYTES
from openapi_tool.state.port import OnChange, Stored
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.secret_variables import Secrets
from tests.races.conftest import run_virtually
from tests.requirements import requirement

START = 1_900_000_000.0
WINDOW_S = 60.0
LATENCY_S = 0.001


@dataclass
class Pod:
    """A replica, its connection to the store, and the tasks that end if it is killed."""

    world: World
    number: int
    limiter: Limiter = field(init=False)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    alive: bool = True
    open: int = 0
    running: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.limiter = Limiter(f"r{self.number}", self.world.options, self, self.world.clock, key_failure)
        self.running.set()
        self.limiter.keys.set_secrets(Secrets({"A": "value"}, {"A"}, self.world.options.pool_of))

    async def read(self, key: str) -> Stored:
        await self._reach()
        found = await self.world.store.read(key)
        await asyncio.sleep(LATENCY_S)
        await self.running.wait()
        return found

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        await self._reach()
        if len(value) > MAX_VALUE_BYTES:
            raise Unavailable("the record is too large")
        written = await self.world.store.write(key, value, revision)
        await asyncio.sleep(LATENCY_S)
        await self.running.wait()
        if self.world.random.random() < self.world.lost:
            raise Unavailable("the outcome of the write is not known")
        return written

    def watch(self, on_change: OnChange) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        return nullcontext()  # the port lets a store report no change

    async def _reach(self) -> None:
        if not self.alive:
            await asyncio.Event().wait()
        await asyncio.sleep(LATENCY_S)
        await self.running.wait()
        if self.world.down:
            raise Unavailable("the store is down")

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def kill(self) -> None:
        """End the replica without any further write; its requests run on at the upstream."""
        self.alive = False
        for limit in self.limiter._limits.values():  # noqa: SLF001 - a killed process runs nothing
            if limit._task is not None:  # noqa: SLF001
                limit._task.cancel()  # noqa: SLF001
        for task in list(self.tasks):
            task.cancel()


@dataclass
class World:
    """Replicas over one store, and what they send; `lost` is the share of writes whose outcome they do not learn.

    The upstream serves `per_minute` requests in any 60 s, and answers the others with 429; a request takes up to
    `jitter_s` to arrive there. It also refuses the request of number `lone_429`, once.
    """

    options: LimitOptions
    per_minute: int | None = None
    jitter_s: float = 0.0
    lone_429: int = 0
    lost: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311
    store: MemoryRecords = field(default_factory=MemoryRecords)
    pods: list[Pod] = field(default_factory=list)
    down: bool = False
    sent: list[float] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    refused_after: list[float] = field(default_factory=list)
    retry_after: list[float] = field(default_factory=list)
    answered_429: list[float] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    def __post_init__(self) -> None:
        random.seed(0)  # for the pauses after conflicts

    @staticmethod
    def clock() -> float:
        try:
            return START + asyncio.get_running_loop().time() % 1e6
        except RuntimeError:  # a scrape of metrics after the test
            return START

    def pod(self) -> Pod:
        self.pods.append(Pod(self, len(self.pods)))
        return self.pods[-1]

    async def call(self, pod: Pod, project: str, deadline_s: float, request_s: float) -> None:
        began = self.clock()
        wanted = PermitRequest(
            "A", "search", AgentKey(project, "agent"), Deadline.after(deadline_s), SecretStr("value")
        )
        try:
            permit = await pod.limiter.acquire(wanted)
        except RateLimited as refusal:
            self.refused[project] += 1
            self.refused_after.append(self.clock() - began)
            self.retry_after.append(refusal.retry_after or 0.0)
            return
        await pod.running.wait()
        await asyncio.sleep(self.random.uniform(0, self.jitter_s))
        if (retry_after := self.refuse()) is not None:
            await asyncio.sleep(0.1)
            error = upstream_failure(429, None, f"{math.ceil(retry_after)}")
            permit.failed(error)
            await self.call(pod, project, deadline_s - (self.clock() - began), request_s)
            return
        self.waits.setdefault(project, []).append(self.clock() - began)
        self.sent.append(self.clock())
        self.open += 1
        pod.open += 1
        self.most_open = max(self.most_open, self.open)
        asyncio.get_running_loop().call_later(request_s, self._answered)
        await asyncio.sleep(request_s)
        await pod.running.wait()
        pod.open -= 1
        permit.done(10)

    def refuse(self) -> float | None:
        """Return the Retry-After of a 429, None if the upstream serves the request that comes now."""
        if len(self.sent) + 1 == self.lone_429 and not self.answered_429:
            self.answered_429.append(self.clock())
            return 2.0
        if self.per_minute is None or len(self.sent) < self.per_minute:
            return None
        oldest = self.sent[-self.per_minute]
        if oldest <= self.clock() - WINDOW_S:
            return None
        self.answered_429.append(self.clock())
        return oldest + WINDOW_S - self.clock()

    def _answered(self) -> None:
        self.open -= 1

    def tell(self, key: str, stored: Stored) -> None:
        """Tell all replicas of a change."""
        for pod in self.pods:
            if pod.alive and pod.running.is_set() and not self.down:
                pod.limiter.on_change(key, stored)

    async def load(self, demands: Mapping[str, float], seconds: float, deadline_s: float = 30.0) -> None:
        """Place calls of each project at random times, by its demand a minute, on random replicas."""
        ends = self.clock() + seconds

        async def place(project: str, per_minute: float) -> None:
            while (until_next_s := self.random.expovariate(per_minute / WINDOW_S)) < ends - self.clock():
                await asyncio.sleep(until_next_s)
                pod = self.random.choice([pod for pod in self.pods if pod.alive])
                pod.start(self.call(pod, project, deadline_s, self.random.uniform(0.3, 1.0)))

        def tell_later(key: str, stored: Stored) -> None:
            asyncio.get_running_loop().call_later(LATENCY_S, self.tell, key, stored)

        async with self.store.watch(tell_later):
            await asyncio.gather(*(place(project, demand) for project, demand in demands.items()))
            await asyncio.sleep(ends - self.clock())
        for pod in self.pods:
            pod.kill()

    def most_in_a_window(self) -> int:
        most = first = 0
        for at, time in enumerate(self.sent):
            while self.sent[first] <= time - WINDOW_S:
                first += 1
            most = max(most, at - first + 1)
        return most

    def longest_gap_s(self) -> float:
        return max(second - first for first, second in zip(self.sent, self.sent[1:], strict=False))


def p95(waits: list[float]) -> float:
    return sorted(waits)[int(0.95 * (len(waits) - 1))]


@pytest.mark.parametrize(
    ("limit", "replicas"), [(300, 1), pytest.param(300, 3, marks=pytest.mark.thorough), (60, 1), (60, 3)]
)
@requirement("limits.window", "limits.shared", "limits.waiting", "hostile.neighbour")
def test_quiet_projects_hardly_wait_and_the_limit_is_used_without_a_stall(limit: int, replicas: int) -> None:
    """Of projects that ask for a third of their share, 95 % of the calls wait for less than three permits."""

    async def work() -> None:
        world, per_minute, seconds = World(LimitOptions(search_requests_per_minute=limit)), limit / 300, 180
        for _ in range(replicas):
            world.pod()
        quiet = dict.fromkeys(("one", "two", "three"), 20 * per_minute)
        await world.load({**quiet, "busy": 200 * per_minute, "busier": 400 * per_minute}, seconds)
        assert world.most_in_a_window() <= limit
        assert len(world.sent) >= 0.97 * limit * seconds / WINDOW_S
        assert world.longest_gap_s() < max(1.5, 180 / limit)
        assert max(p95(world.waits[name]) for name in quiet) <= max(0.8, 180 / limit)
        assert not any(world.refused[name] for name in quiet)

    run_virtually(work())


@pytest.mark.parametrize("seed", range(4))
@requirement("limits.window")
def test_whatever_fails_no_60_seconds_contain_more_than_the_limit(seed: int) -> None:
    """Replicas are killed and started, writes have unknown outcomes, and the store is down for 20 s."""

    async def work() -> None:
        world = World(LimitOptions(search_requests_per_minute=60), lost=0.05, random=random.Random(seed))  # noqa: S311
        for _ in range(3):
            world.pod()

        async def faults() -> None:
            await asyncio.sleep(20)
            world.pods[0].kill()
            world.pod()
            await asyncio.sleep(20)
            world.down = True
            await asyncio.sleep(20)
            world.down = False
            await asyncio.sleep(20)
            world.pods[1].kill()
            world.pod()

        failing = asyncio.create_task(faults())
        await world.load({"one": 60.0, "two": 120.0}, 130)
        await failing
        assert world.most_in_a_window() <= 60
        assert len(world.sent) >= 70, "replicas went on during the outage, and after it"

    run_virtually(work())


@requirement("limits.window", "limits.shared")
def test_no_more_requests_are_open_than_allowed_while_a_replica_is_killed() -> None:
    async def work() -> None:
        world = World(LimitOptions(search_concurrent=6))
        for _ in range(3):
            world.pod()

        async def kill() -> tuple[int, int]:
            await asyncio.sleep(20)
            pod, before = world.pods[0], len(world.sent)
            lost = pod.open
            pod.kill()
            return lost, before

        killing = asyncio.create_task(kill())
        await world.load({"one": 300.0, "two": 600.0}, 40)
        lost, before = await killing
        assert world.most_open <= 6
        assert before >= 0.9 * 6 * 20 / 0.65
        # The places of the killed one's open requests stay taken until these must have ended; the others are used.
        assert len(world.sent) - before >= 0.85 * (6 - lost) * 20 / 0.65

    run_virtually(work())


@requirement("limits.shared")
def test_replicas_whose_calls_wait_since_the_same_millisecond_leave_the_turn_to_nobody_forever() -> None:
    async def work() -> None:
        world = World(LimitOptions(search_concurrent=1))
        pods = [world.pod() for _ in range(3)]
        async with world.store.watch(world.tell):
            for number in range(6):
                # Each later than the whole millisecond by another fraction of it.
                pods[number % 3].start(world.call(pods[number % 3], "one", 60.0, 0.5))
                await asyncio.sleep(0.0001)
            await asyncio.sleep(6 * (0.5 + 0.3))
        assert len(world.sent) == 6, world.sent

    run_virtually(work())


@pytest.mark.parametrize("replicas", [1, 3])
@requirement("limits.waiting")
def test_no_call_waits_for_more_than_half_of_its_time_whatever_waited_at_other_replicas(replicas: int) -> None:
    """All calls come before any replica knows of those of the others."""

    async def work() -> None:
        world = World(LimitOptions(search_requests_per_minute=6))
        pods = [world.pod() for _ in range(replicas)]
        async with world.store.watch(world.tell):
            for number in range(18):
                pods[number % replicas].start(world.call(pods[number % replicas], "one", 27.0, 0.5))
            await asyncio.sleep(27)
        waits = [*world.waits["one"], *world.refused_after]
        assert len(waits) == 18
        assert max(waits) <= 27 / 2 + 0.1

    run_virtually(work())


@pytest.mark.parametrize(
    ("limit", "seed"), [(20, 1), (20, 6), (20, 7), pytest.param(100, 0, marks=pytest.mark.thorough)]
)
@requirement("limits.learned")
def test_the_limit_of_a_key_is_learned_with_few_429s_and_used(limit: int, seed: int) -> None:
    """Two replicas demand three times the limit, which no setting names, for ten minutes."""

    async def work() -> None:
        world = World(LimitOptions(), per_minute=limit, jitter_s=0.3, random=random.Random(seed))  # noqa: S311
        for _ in range(2):
            world.pod()
        began = world.clock()
        await world.load({f"project {number}": 3 * limit / 10 for number in range(10)}, 10 * WINDOW_S, deadline_s=20)
        later = sum(at > began + WINDOW_S for at in world.sent)
        refused_later = sum(at > began + WINDOW_S for at in world.answered_429)
        assert refused_later <= 0.025 * (later + refused_later)
        assert later >= 0.95 * limit * 9

    run_virtually(work())


@pytest.mark.parametrize("per_second", [2, 20])
@requirement("limits.learned")
def test_one_429_holds_calls_back_for_seconds_only(per_second: int) -> None:
    async def work() -> None:
        world = World(LimitOptions(), lone_429=10)
        for _ in range(2):
            world.pod()
        await world.load({"one": 30 * per_second, "two": 30 * per_second}, 40)
        assert len(world.answered_429) == 1
        assert not world.refused
        assert max(max(waits) for waits in world.waits.values()) <= 10
        late = sum(at > world.answered_429[0] + 10 for at in world.sent)
        assert late >= 0.8 * per_second * (40 - 10 - 10 / per_second)

    run_virtually(work())


@requirement("limits.window", "limits.shared")
def test_no_more_requests_are_open_than_allowed_while_a_replica_is_stopped() -> None:
    async def work() -> None:
        world = World(LimitOptions(search_concurrent=6))
        pods = [world.pod() for _ in range(3)]

        async def stop() -> None:
            await asyncio.sleep(20)
            pods[0].running.clear()
            await asyncio.sleep(8)
            pods[0].running.set()

        stopping = asyncio.create_task(stop())
        await world.load({"one": 300.0, "two": 600.0}, 60)
        await stopping
        assert world.most_open <= 6
        assert len(world.sent) >= 0.9 * 6 * 60 / 0.65

    run_virtually(work())


@pytest.mark.thorough
@requirement("limits.window", "limits.shared")
def test_an_outage_of_the_store_causes_hardly_any_429() -> None:
    async def work() -> None:
        options = LimitOptions(search_requests_per_minute=300)
        world = World(options, per_minute=300, jitter_s=0.1)
        for _ in range(3):
            world.pod()

        async def fail() -> None:
            await asyncio.sleep(70)
            world.down = True
            await asyncio.sleep(20)
            world.down = False

        failing = asyncio.create_task(fail())
        await world.load({"one": 200.0, "two": 250.0}, 150)
        await failing
        assert world.most_in_a_window() <= 300
        assert len(world.answered_429) <= 0.005 * len(world.sent)
        assert len(world.sent) >= 0.85 * 300 * 150 / WINDOW_S

    run_virtually(work())


@requirement("limits.shared")
def test_after_an_outage_any_number_of_requests_is_counted_while_calls_go_on() -> None:
    """All at once would make a record that the store refuses, and the outage would not end."""

    async def work() -> None:
        world = World(LimitOptions(search_requests_per_minute=100_000, search_concurrent=50_000))
        pods = [world.pod() for _ in range(2)]

        async def calls(number: int) -> None:
            await asyncio.gather(*(world.call(pod, "one", 30, 1) for pod in pods * number))

        await calls(1)
        world.down = True
        await calls(8_000)
        assert len(world.sent) > 10_000
        world.down = False
        for _ in range(10):
            await asyncio.sleep(1)
            await calls(20)
        assert not any(limit["offline"] for pod in pods for limit in pod.limiter.snapshot())
        assert max(limit["used"] for pod in pods for limit in pod.limiter.snapshot()) == len(world.sent)
        for pod in pods:
            await pod.limiter.aclose()

    run_virtually(work())


@requirement("limits.waiting")
def test_an_overload_is_refused_at_once_with_the_time_that_a_call_would_wait() -> None:
    """Three times the limit is demanded; a call has 60 s."""

    async def work() -> None:
        world = World(LimitOptions(search_requests_per_minute=120))
        for _ in range(3):
            world.pod()
        await world.load({"one": 120.0, "two": 240.0}, 120, deadline_s=60)
        waits = sorted(wait for found in world.waits.values() for wait in found)
        assert waits[len(waits) // 2] <= 60 / 3
        assert waits[-1] <= 60 / 2 + 0.1
        assert len(world.sent) >= 0.97 * 120 * 2
        at_once = sum(seconds < 0.1 for seconds in world.refused_after)
        assert at_once >= 0.97 * len(world.refused_after)
        assert all(60 / 3 <= seconds <= 60 / 3 + 5 for seconds in world.retry_after[-150:])

    run_virtually(work())
