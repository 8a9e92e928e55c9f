"""The rate limiter and budgets of one process."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openapi_tool.budgets import ledger as accounts
from openapi_tool.budgets.ledger import LEASE_S, NOTHING, AccountLimit, Amount, Periods
from openapi_tool.budgets.replica import AccountAllowance, AccountUpdate
from openapi_tool.cli.limits import combined_budgets
from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.jina.failures import key_failure
from openapi_tool.limits import ledger
from openapi_tool.limits.limiter import Limiter
from openapi_tool.limits.permits import LimitOptions, Need, Permit
from openapi_tool.limits.record import ADAPTIVE_S, Rates, decode
from openapi_tool.options.budgets import BudgetLimits, BudgetOptions, time_zone
from openapi_tool.protocol.errors import RateLimited
from openapi_tool.tools.deadlines import Deadline
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
        if (pod.waiting and since_s >= 1) or allowance.is_due(pod.waiting, since_s, self.world.now):
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
GREEDY = [IN_2096, 1_000_000, IN_2096, 1_000_000, 0, 1_000_000, 0, 1, 0]  # the stored fields of a `LimitShare`


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


START = 1_000_000.0
ONE = Amount(1, 0)


@dataclass
class AccountPod:
    """Replica with requests that wait (`asked`) and that run (`running`), and the total in its journal (`noted`)."""

    allowance: AccountAllowance
    asked: int = 0
    running: int = 0
    planned: tuple[AccountUpdate, int] | None = None
    noted: Amount = NOTHING


@dataclass
class AccountWorld:
    """Replicas over one record, in virtual time; `journals` of killed ones, `lost` counts their uses in no journal."""

    limit: int
    pods: list[AccountPod] = field(default_factory=list)
    value: bytes | None = None
    revision: int = 0
    now: float = START
    sent: int = 0
    lost: int = 0
    is_stalled: bool = False
    born: int = 0
    journals: dict[str, Amount] = field(default_factory=dict)

    def start(self) -> None:
        self.born += 1
        self.pods.append(AccountPod(AccountAllowance(f"pod-{self.born}", AccountLimit(self.limit))))

    def plan(self, pod: AccountPod) -> None:
        """Read the record and compute its change."""
        record = accounts.decode(self.value)
        pod.allowance.adopt(record)
        if (own := record.shares.get(pod.allowance.name)) is not None:
            assert pod.allowance.spent == pod.allowance.total.minus(own.total)
        needs, journals = (ONE,) * pod.asked, self.journals_of_dead(pod)
        pod.planned = pod.allowance.plan(self.value, needs, self.now, journals), self.revision

    def journals_of_dead(self, pod: AccountPod) -> dict[str, Amount]:
        """Return the journals of replicas that count as dead: killed ones, and those that did not report in time."""
        journals = {each.allowance.name: each.noted for each in self.pods} | self.journals
        record, name = accounts.decode(self.value), pod.allowance.name
        return {dead: journals[dead] for dead in accounts.dead_replicas(record, name, self.now)}

    def write(self, pod: AccountPod, *, answered: bool = True) -> None:
        """Write the planned change unless another replica was first; without an answer its outcome is unknown."""
        if pod.planned is None:
            return
        planned, revision = pod.planned
        pod.planned = None
        if revision != self.revision:
            return
        self.value, self.revision = accounts.encode(planned.record, {}), revision + 1
        if not answered:
            return
        pod.allowance.confirm(planned)
        pod.running += sum(planned.grant.granted)
        pod.asked = 0

    def change(self, pod: AccountPod) -> None:
        self.plan(pod)
        self.write(pod)
        for other in self.pods:
            other.allowance.adopt(accounts.decode(self.value))

    def ask(self, pod: AccountPod, number: int) -> None:
        """Let requests wait for the next change."""
        pod.asked = number
        for _ in range(number):
            pod.allowance.record_demand(ONE, self.now)

    def do(self, act: str, pod: AccountPod) -> None:
        if act == "take":
            pod.running += pod.allowance.take(ONE, self.now)
        elif act == "ask" and pod.planned is None:
            self.ask(pod, 3)
        elif act in ("send", "send only", "cancel") and pod.running:
            pod.running -= 1
            self.sent += act != "cancel"
            pod.allowance.settle(ONE, NOTHING if act == "cancel" else ONE, self.now)
            pod.noted = pod.allowance.total if act == "send" else pod.noted
        elif act == "plan":
            self.plan(pod)
        elif act in ("write", "lose"):
            self.write(pod, answered=act == "write")
        elif act == "change" and pod.planned is None:
            self.ask(pod, 3)
            self.change(pod)
        elif act == "forget" and pod.allowance.is_quiet and not pod.planned:
            pod.allowance = AccountAllowance(pod.allowance.name, pod.allowance.limit)
        elif act == "crash":
            self.crash(pod)

    def crash(self, pod: AccountPod) -> None:
        """End a replica; a journal counts only for one that held something by its last report."""
        record, name = accounts.decode(self.value), pod.allowance.name
        pod.allowance.adopt(record)
        noted = pod.noted if name in record.shares and record.shares[name].holds else NOTHING
        self.lost += min(pod.allowance.spent, pod.allowance.total.minus(noted)).requests
        self.journals[name] = pod.noted
        self.pods.remove(pod)

    def wait(self, seconds: float) -> None:
        """Let time pass; the replicas report what is due, as they do each second."""
        self.now += seconds
        for pod in self.pods:
            if pod.allowance.is_due(self.now) or pod.asked:
                self.change(pod)

    @property
    def taken(self) -> int:
        return self.sent + sum(pod.running for pod in self.pods)


ACTS = (
    *("take", "ask", "change", "change", "send", "send", "send only", "cancel"),  # `send` writes the journal, too
    *("plan", "write", "lose", "crash", "start", "wait", "stall", "forget"),
)

SENT = [("change", 0), *[("send", 0)] * 3]


@given(
    limit=st.integers(0, 60),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 9)), max_size=150),
)
@example(limit=9, acts=[("change", 0), ("send", 0), ("send only", 0), ("crash", 0)])
@example(limit=4, acts=[("change", 0), ("change", 1), ("send", 1), ("crash", 1)])
@example(limit=9, acts=[*SENT * 2, *[("wait", 9)] * 4, ("forget", 0), *SENT * 4])
@requirement("budgets.exact", "budgets.reservations")
def test_no_interleaving_exceeds_a_budget_or_loses_a_use(limit: int, acts: list[tuple[str, int]]) -> None:
    """Conflicts, writes of unknown outcome, cancellations, replicas that are killed or stalled for longer than a lease.

    A killed replica loses only what is in no journal.
    """
    world = AccountWorld(limit)
    world.start()
    world.start()
    for act, which in acts:
        if act == "wait":
            world.wait(which)
        elif act == "stall":
            world.now += LEASE_S + which
            world.is_stalled = True  # its running requests are sent although they are free for others
        elif act == "start" and len(world.pods) < 4:
            world.start()
        elif world.pods:
            world.do(act, world.pods[which % len(world.pods)])
        assert world.is_stalled or world.taken - world.lost <= limit
    for pod in world.pods:
        while pod.running:
            world.do("send", pod)
        world.change(pod)
    world.now += LEASE_S
    world.start()
    last = world.pods[-1]
    left = limit - (world.sent - world.lost)  # the record lacks uses that are in the journal of a killed replica
    world.ask(last, 1)
    world.change(last)
    assert last.running == (left > 0)
    assert accounts.decode(world.value).used.requests == world.sent - world.lost


@requirement("budgets.exact")
def test_an_unused_block_goes_back_while_another_replica_waits() -> None:
    world = AccountWorld(100)
    for _ in range(3):
        world.start()
    first, second, third = world.pods
    for pod in (first, second):
        world.ask(pod, 1)
        world.change(pod)
    assert first.allowance.idle == second.allowance.idle == Amount(4, 0)
    world.ask(third, 98)
    world.change(third)
    assert (world.taken, third.allowance.idle) == (92, NOTHING)
    for pod in (first, second):
        assert pod.allowance.should_return_block(world.now)
        world.change(pod)
    world.ask(third, 8)
    world.change(third)
    assert (world.taken, third.allowance.idle) == (100, NOTHING)


@requirement("budgets.exact")
def test_tokens_are_exceeded_by_what_running_requests_cost_beyond_their_estimates() -> None:
    allowance = AccountAllowance("pod", AccountLimit(None, 100))
    planned = allowance.plan(None, (Amount(0, 30),) * 4, START, {})
    assert planned.grant.granted == (True, True, True, False)
    allowance.confirm(planned)
    for _ in range(3):
        allowance.settle(Amount(0, 30), Amount(1, 40), START)
    planned = allowance.plan(accounts.encode(planned.record, {}), (Amount(0, 1),), START, {})
    assert planned.record.used == Amount(3, 120)
    assert planned.grant.granted == (False,)
    assert planned.grant.warns


@requirement("budgets.reservations")
@pytest.mark.parametrize(("replicas", "elsewhere", "part"), [(1, 0, 100), (2, 10, 45), (3, 40, 20)])
def test_without_the_store_a_replica_uses_its_part_of_what_was_left(replicas: int, elsewhere: int, part: int) -> None:
    world = AccountWorld(100)
    for _ in range(replicas):
        world.start()
    for pod in world.pods[1:]:
        world.ask(pod, elsewhere // (replicas - 1))
        world.change(pod)
    record = accounts.decode(world.value)
    for share in record.shares.values():
        share.idle = NOTHING
    pod = world.pods[0]
    pod.allowance.adopt(record)
    pod.allowance.go_offline(world.now)
    while pod.allowance.take(ONE, world.now + 999):
        pod.running += 1
    assert pod.running == part


@requirement("budgets.exact")
@pytest.mark.parametrize("stored", [b"", b"null", b"[]", b"{}", b"\xff", b'{"version": 1}', b'{"version": 2}'])
def test_a_record_of_something_else_is_an_unused_account(stored: bytes) -> None:
    assert accounts.decode(stored) == accounts.unused()


@requirement("budgets.calls")
@pytest.mark.parametrize(
    ("zone", "at", "day", "renews", "month", "renews_month"),
    [
        ("UTC", "2030-01-31T23:59:59+00:00", "2030-01-31", "2030-02-01T00:00:00+00:00", "2030-01", "2030-02-01"),
        ("UTC", "2030-12-31T12:00:00+00:00", "2030-12-31", "2031-01-01T00:00:00+00:00", "2030-12", "2031-01-01"),
        ("Europe/Berlin", "2030-03-30T23:30:00+00:00", "2030-03-31", "2030-04-01T00:00:00+02:00", "2030-03", "2030-04"),
        ("Asia/Tokyo", "2030-02-28T15:00:00+00:00", "2030-03-01", "2030-03-02T00:00:00+09:00", "2030-03", "2030-04"),
    ],
)
def test_days_and_months_are_those_of_the_time_zone(
    zone: str, at: str, day: str, renews: str, month: str, renews_month: str
) -> None:
    periods, now = Periods(time_zone(zone)), datetime.fromisoformat(at).timestamp()
    periods.day(now - 100_000)
    found = periods.day(now)
    assert (found.name, found.renews) == (day, renews)
    assert periods.day(found.end - 1) is found
    assert periods.day(found.end).start == found.end
    assert periods.month(now).name == month
    assert periods.month(now).renews.startswith(renews_month)


@requirement("budgets.calls")
def test_a_project_may_have_budgets_of_its_own() -> None:
    options = BudgetOptions(
        project_day_requests=10, session_tokens=5, projects={"p": BudgetLimits(project_day_requests=0)}
    )
    assert options.for_project("p").of("project_day") == (0, None)
    assert options.for_project("p").of("session") == (None, 5)
    assert options.for_project("q").of("project_day") == (10, None)
    with pytest.raises(ValueError, match="time zone that this system knows"):
        BudgetOptions(time_zone="Europe/Nowhere")


@requirement("budgets.calls")
@pytest.mark.parametrize(
    ("operation", "parameters", "least"),
    [
        ("search", {}, 10_000),
        ("search", {"num": 10}, 10_000),
        ("search", {"num": 12}, 20_000),
        ("search", {"num": 12, "type": "images"}, 100_000),
        ("search", {"provider": "bing"}, 30_000),
        ("reader", {"maxTokens": 500}, 1),
        ("reader", {"withGeneratedAlt": True}, 765),
        ("reader", {"instruction": "x", "withGeneratedAlt": True}, 12_000),
    ],
)
def test_an_estimate_is_at_least_what_the_upstream_charges(
    operation: str, parameters: dict[str, Any], least: int
) -> None:
    assert ENDPOINTS[operation].min_tokens(parameters) == least


@requirement("budgets.calls")
def test_accounts_of_all_replicas_are_shown_once() -> None:
    one = {"project": "p", "scope": "project_day", "who": "", "tool": "", "period": "2030-01-01"}
    replicas = [{"budgets": [{**one, "share": 0.2}]}, {"budgets": [{**one, "share": 0.3}]}, {}]
    assert combined_budgets(replicas) == [{**one, "share": 0.3}]
    assert combined_budgets(replicas, "q") == []


@pytest.mark.parametrize("tokens", [30_000, 90_000, 300_000])
@requirement("limits.waiting", "limits.shared", "hostile.neighbour")
async def test_large_requests_of_one_project_leave_tokens_to_another(tokens: int) -> None:
    async with replicas(1, LimitOptions(reader_tokens_per_minute=100_000)) as world:
        [limiter] = world.limiters
        served: Counter[str] = Counter()

        async def call(project: str, cost: int) -> None:
            need = Need("A", "reader", (project, "a"), Deadline.after(28), world.secrets("A"))
            with suppress(RateLimited):
                permit = await limiter.acquire(need)
                await asyncio.sleep(0)
                permit.done(cost)
                served[project] += cost

        large = small = asyncio.create_task(call("large", tokens))
        for step in range(600):  # of half a second
            if large.done():
                large = asyncio.create_task(call("large", tokens))
            if step % 6 == 0 and small.done():
                small = asyncio.create_task(call("small", 10))
            world.now += 0.5
            for one in limiter._limiters.values():  # noqa: SLF001
                one.wake()
            await asyncio.sleep(0.001)
        large.cancel()
        small.cancel()
        await asyncio.wait([large, small])
    small_calls, large_calls = served["small"] // 10, served["large"] // tokens
    assert small_calls >= max(8, 1.5 * large_calls), (small_calls, large_calls)
    assert large_calls >= 3


@requirement("limits.shared", "hostile.neighbour")
async def test_one_429_without_a_limit_costs_a_key_with_little_load_seconds_only() -> None:
    async with replicas(2) as world:
        refused: list[int] = []

        async def call(step: int) -> None:
            try:
                permit = await world.permit(world.limiters[step % 2])
            except RateLimited:
                refused.append(step)
                return
            if step == 10:
                permit.failed(refusal(42900))
            else:
                permit.done(1)

        calls = []
        for step in range(240):  # of half a second
            calls.append(asyncio.create_task(call(step)))
            await asyncio.sleep(0.005)
            world.now += 0.5
            for limiter in world.limiters:
                for one in limiter._limiters.values():  # noqa: SLF001
                    one.wake()
        for waiting in calls:
            waiting.cancel()
        await asyncio.wait(calls)
    assert len(refused) <= 80
    assert len(calls) - len(refused) >= 150
