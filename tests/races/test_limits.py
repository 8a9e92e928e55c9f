"""Several replicas that share limits, in virtual time: never above a limit, whatever fails, and fair among projects."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import SecretStr

from openapi_tool.jina.failures import key_failure
from openapi_tool.protocol.errors import RateLimited, Unavailable
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.quotas.permits import LimitOptions, Need
from openapi_tool.state.memory import MemoryRecords
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

    def __post_init__(self) -> None:
        self.limiter = Limiter(f"r{self.number}", self.world.options, self, self.world.clock, key_failure)
        self.limiter.keys.set_secrets(Secrets({"A": "value"}, {"A"}, self.world.options.pool_of))

    async def read(self, key: str) -> Stored:
        await self._reach()
        found = await self.world.store.read(key)
        await asyncio.sleep(LATENCY_S)
        return found

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        await self._reach()
        written = await self.world.store.write(key, value, revision)
        await asyncio.sleep(LATENCY_S)
        if self.world.random.random() < self.world.lost:
            raise Unavailable("the outcome of the write is not known")
        return written

    def watch(self, on_change: OnChange) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def _reach(self) -> None:
        if not self.alive:
            await asyncio.Event().wait()
        await asyncio.sleep(LATENCY_S)
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
    """Replicas over one store, and what they send; `lost` is the share of writes whose outcome they do not learn."""

    options: LimitOptions
    lost: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311
    store: MemoryRecords = field(default_factory=MemoryRecords)
    pods: list[Pod] = field(default_factory=list)
    down: bool = False
    sent: list[float] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    refused_after: list[float] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

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
        need = Need("A", "search", (project, "agent"), Deadline.after(deadline_s), SecretStr("value"))
        try:
            permit = await pod.limiter.acquire(need)
        except RateLimited:
            self.refused[project] += 1
            self.refused_after.append(self.clock() - began)
            return
        self.waits.setdefault(project, []).append(self.clock() - began)
        self.sent.append(self.clock())
        self.open += 1
        pod.open += 1
        self.most_open = max(self.most_open, self.open)
        asyncio.get_running_loop().call_later(request_s, self._answered)
        await asyncio.sleep(request_s)
        pod.open -= 1
        permit.done(10)

    def _answered(self) -> None:
        self.open -= 1

    def tell(self, key: str, stored: Stored) -> None:
        """Tell all replicas of a change."""
        for pod in self.pods:
            if pod.alive and not self.down:
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


@pytest.mark.parametrize(("limit", "replicas"), [(300, 1), (300, 3), (60, 1), (60, 3)])
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
def test_a_call_waits_for_a_set_share_of_its_time_whatever_waited_at_other_replicas(replicas: int) -> None:
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
        assert max(waits) <= 27 / 3 + 0.1

    run_virtually(work())
