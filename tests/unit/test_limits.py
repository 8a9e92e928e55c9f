"""Shared records of rate limits and of refused keys."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from openapi_tool.bus.storage import MAX_VALUE_BYTES
from openapi_tool.cli.limits import combined
from openapi_tool.jina.failures import key_failure, upstream_failure
from openapi_tool.limits import keys, ledger
from openapi_tool.limits import record as records
from openapi_tool.limits.allowance import LimitAllowance, LimitUpdate
from openapi_tool.limits.fair_queue import FairQueue, WaitingCall
from openapi_tool.limits.keys import RETRY_S, KeyRecord
from openapi_tool.limits.ledger import Demand, shares
from openapi_tool.limits.limiter import Limiter
from openapi_tool.limits.permits import KeyLimits, KeyPool, LimitOptions, Need, Permit
from openapi_tool.limits.record import MARGIN_S, REQUESTS, WINDOW_S, LimitRecord, LimitShare, Rates
from openapi_tool.protocol.errors import AuthFailed, BudgetExceeded, ToolError, Unavailable
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.secret_variables import Secrets
from tests.requirements import requirement

START = 1_000_000.0
STEP_S = 0.25


@dataclass
class Store:
    """Shared record; `revision` counts its changes."""

    value: bytes | None = None
    revision: int = 0


@dataclass
class Pod:
    """Replica with `waiting` calls, whose clock is ahead by `clock_error_s`.

    `planned` is a change that is not written yet, with the revision that it is based on, `unsure` one whose write had
    an unknown outcome. The next change is made at `due`.
    """

    allowance: LimitAllowance
    clock_error_s: float = 0.0
    waiting: int = 0
    planned: tuple[LimitUpdate, int] | None = None
    unsure: LimitUpdate | None = None
    due: float = 0.0


@dataclass
class World:
    """Replicas over one record, in virtual time; `sent` are the true times of all requests."""

    rates: Rates
    store: Store = field(default_factory=Store)
    pods: list[Pod] = field(default_factory=list)
    now: float = START
    sent: list[float] = field(default_factory=list)
    born: int = 0

    def start(self, clock_error_s: float = 0.0) -> None:
        self.born += 1
        self.pods.append(Pod(LimitAllowance(f"pod-{self.born}", self.rates), clock_error_s))

    def send(self, pod: Pod, maximum: int) -> int:
        done = 0
        while done < maximum and (use := pod.allowance.take(self.now + pod.clock_error_s)) is not None:
            pod.allowance.settle(use, None)
            self.sent.append(self.now)
            done += 1
        return done

    def plan(self, pod: Pod) -> None:
        """Read the record and compute its change."""
        if pod.unsure is not None and pod.allowance.is_written(pod.unsure, self.store.value):
            pod.allowance.confirm(pod.unsure, self.store.revision)
        pod.unsure = None
        planned = pod.allowance.plan(self.store.value, pod.waiting, self.now + pod.clock_error_s)
        pod.planned = planned, self.store.revision

    def write(self, pod: Pod, *, answered: bool = True) -> bool:
        """Write the planned change unless another replica was first; without an answer its outcome is unknown."""
        if pod.planned is None:
            return False
        planned, revision = pod.planned
        pod.planned = None
        if revision != self.store.revision:
            return False
        self.store.value, self.store.revision = records.encode(planned.record), revision + 1
        if answered:
            pod.allowance.confirm(planned, self.store.revision)
        else:
            pod.unsure = planned
        return answered

    def change(self, pod: Pod) -> None:
        self.plan(pod)
        self.write(pod)
        for other in self.pods:
            other.allowance.adopt(records.decode(self.store.value), self.store.revision, self.now)

    def do(self, act: str, pod: Pod, number: int) -> None:
        if act == "send":
            self.send(pod, number)
        elif act == "plan":
            self.plan(pod)
        elif act in ("write", "lose"):
            self.write(pod, answered=act == "write")
        elif act == "wait":
            pod.waiting = number
        elif act == "crash":
            self.pods.remove(pod)

    def max_in_a_window(self) -> int:
        most = first = 0
        for at, time in enumerate(self.sent):
            while self.sent[first] <= time - WINDOW_S:
                first += 1
            most = max(most, at - first + 1)
        return most


ACTS = ("send", "plan", "write", "lose", "crash", "start", "wait", "pass")
"""`lose` is a write of unknown outcome, `wait` sets the number of waiting calls, `pass` lets time pass."""


@given(
    limit=st.integers(1, 40),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 9), st.floats(0, 20)), max_size=150),
    errors=st.lists(st.floats(-MARGIN_S / 2, MARGIN_S / 2), min_size=4, max_size=4),
)
@requirement("limits.window")
def test_no_interleaving_sends_more_than_the_limit(
    limit: int, acts: list[tuple[str, int, float]], errors: list[float]
) -> None:
    """Conflicts, writes of unknown outcome, crashes, restarts, and clocks that differ by up to the margin."""
    world = World(Rates(limit))
    for clock_error_s in errors[:2]:
        world.start(clock_error_s)
    for act, which, seconds in acts:
        if act == "pass":
            world.now += seconds
        elif act == "start" and len(world.pods) < len(errors):
            world.start(errors[len(world.pods)])
        elif world.pods:
            world.do(act, world.pods[which % len(world.pods)], which)
    assert world.max_in_a_window() <= limit


def overload(world: World, seconds: float, seed: int = 1) -> list[int]:
    """Give every replica more calls than it may send; return how many each has sent."""
    chance, end = random.Random(seed), world.now + seconds  # noqa: S311
    done = {id(pod): 0 for pod in world.pods}
    while world.now < end:
        world.now += STEP_S
        for pod in chance.sample(world.pods, len(world.pods)):
            pod.waiting = 100
            if world.now >= pod.due and pod.allowance.forecast_free(world.now + pod.clock_error_s)(1) <= 0:
                world.change(pod)
                pod.due = world.now + chance.uniform(0.75, 1.25)
            done[id(pod)] = done.get(id(pod), 0) + world.send(pod, 100)
    return [done[id(pod)] for pod in world.pods]


@requirement("limits.shared", "limits.window")
def test_replicas_use_the_limit_in_equal_shares_whatever_their_clocks() -> None:
    world = World(Rates(600))
    for clock_error_s in (-0.2, -0.1, 0.1, 0.2):
        world.start(clock_error_s)
    sent = overload(world, 300)
    assert sum(sent) >= 0.95 * 5 * 600
    mean = sum(sent) / len(sent)
    assert all(0.8 * mean <= share <= 1.2 * mean for share in sent)
    assert world.max_in_a_window() <= 600


@requirement("limits.shared")
def test_the_others_get_the_share_of_a_killed_replica_and_new_ones_get_theirs() -> None:
    world = World(Rates(600))
    for _ in range(4):
        world.start()
    overload(world, 120)
    world.pods.pop()
    overload(world, 5)
    assert sum(overload(world, 20)) >= 0.9 * 200
    for _ in range(3):
        world.start()
    overload(world, 10)
    sent = overload(world, 60)
    assert max(sent) <= 1.2 * min(sent)
    assert world.max_in_a_window() <= 600


@requirement("limits.window")
def test_without_the_store_a_replica_uses_its_share_of_what_was_left() -> None:
    world = World(Rates(60))
    for _ in range(2):
        world.start()
    overload(world, 3)
    for pod in world.pods:
        pod.allowance.use_fallback()
    for _ in range(400):
        world.now += STEP_S
        for pod in world.pods:
            world.send(pod, 100)
    assert 50 <= world.max_in_a_window() <= 60


@requirement("limits.shared")
def test_a_replica_with_a_forged_count_of_permits_gets_its_share_again() -> None:
    world = World(Rates(requests=60))
    for _ in range(2):
        world.start()
    overload(world, 60)
    record = records.decode(world.store.value)
    record.replicas["pod-1"].served = 2**50
    world.store.value = records.encode(record)
    overload(world, 120)
    sent = overload(world, 120)
    assert max(sent) <= 1.3 * min(sent)


@requirement("limits.shared")
def test_a_limit_found_by_429s_is_halved_once_for_a_burst_and_grows_while_calls_wait() -> None:
    record = LimitRecord()
    ledger.lower_adaptive(record, START)
    record.adaptive.limit = 200  # type: ignore[union-attr]
    found = []
    for after_s in (1, 11, 12, 30):
        ledger.lower_adaptive(record, START + after_s)
        found.append(record.effective(Rates(), START + after_s).requests)
    assert found == [200, 100, 100, 50]
    assert record.effective(Rates(), START + 30 + records.ADAPTIVE_S).requests is None
    assert record.effective(Rates(7), START + 30).requests == 7
    world = World(Rates(), Store(records.encode(record)), now=START + 30)
    world.start()
    overload(world, 60)
    grown = records.decode(world.store.value).effective(Rates(), world.now).requests
    assert grown is not None
    assert 50 < grown < 100


@requirement("limits.shared", "hostile.neighbour")
def test_a_limit_found_by_one_429_doubles_while_calls_wait_until_the_next() -> None:
    def report(now: float) -> int | None:
        ledger.apply_report(record, "pod", ledger.LimitReport(refused=True), Rates(), now)
        return record.effective(Rates(), now).requests

    record = LimitRecord()
    ledger.lower_adaptive(record, START)
    assert [report(START + after_s) for after_s in (9, 10, 19, 20, 30, 40)] == [10, 20, 20, 40, 80, 160]
    ledger.lower_adaptive(record, START + 50)
    assert [report(START + after_s) for after_s in (59, 60, 70)] == [80, 84, 88]
    ledger.apply_report(record, "pod", ledger.LimitReport(), Rates(), START + 90)
    assert record.effective(Rates(), START + 90).requests == 88, "nothing was refused"


@pytest.mark.parametrize(
    ("rates", "cost", "extra"),
    [
        (Rates(tokens=600_000), 30_000, 2.0),
        (Rates(tokens=600_000), 1_000, -0.9),
        (Rates(tokens=600_000), 9_000_000, 59.0),  # nothing is sent for a minute, but no longer
        (Rates(requests=60, tokens=600_000), 10, 0.0),  # takes one of 60 requests, whatever its tokens
        (Rates(requests=6, tokens=600_000), 30_000, 0.0),  # a sixth of the requests, a twentieth of the tokens
        (Rates(requests=60), 30_000, 0.0),
        (Rates(tokens=100_000), 0, 0.0),  # it failed: it keeps its turn, or failing requests would always be first
    ],
)
@requirement("limits.waiting")
def test_a_request_costs_turns_by_the_resource_of_which_it_takes_most(rates: Rates, cost: int, extra: float) -> None:
    allowance = LimitAllowance("pod", rates)
    allowance.confirm(allowance.plan(None, 1, START), 1)
    use = allowance.take(START)
    assert use is not None
    assert allowance.requests_above_estimate(use, cost) == pytest.approx(extra)


@requirement("limits.window")
def test_requests_of_unknown_cost_are_estimated_at_a_usual_one() -> None:
    allowance = LimitAllowance("pod", Rates(tokens=600_000))
    allowance.confirm(allowance.plan(None, 100, START), 1)
    assert sum(allowance.take(START) is not None for _ in range(100)) <= 60
    assert LimitAllowance("pod", Rates(tokens=3_000)).tokens_per_request == 3_000, "at least one request is sent"


@requirement("limits.window")
def test_a_record_that_is_none_is_empty() -> None:
    for stored in (None, b"", b"null", b"[]", b'{"version": 1}', b'{"version": 2, "paused_until": 1e999}', b"\xff"):
        assert records.parse(stored) is None
        assert records.decode(stored) == LimitRecord()


@pytest.mark.parametrize(
    "torn",
    [
        {"replicas": {"x": ["a"]}},
        {"replicas": {"x": [1, 2, 3]}},
        {"replicas": {"x": ["soon", 0, 0, 0, 0, 0, 0, 0, 0]}},
        {"replicas": []},
        {"requests": {"used": {"4000000000": 1e308}, "paced_until": 0}},
        {"requests": {"used": {"soon": 1}, "paced_until": 0}},
        {"tokens": None},
        {"paused_until": -1},
        {"adaptive": {"limit": "many", "since": 0, "changed": 0, "until": 0}},
        {"adaptive": 1},
    ],
)
@requirement("limits.window")
def test_a_record_with_a_part_of_a_wrong_type_is_empty(torn: dict[str, object]) -> None:
    whole = orjson.loads(records.encode(LimitRecord()))
    assert records.parse(orjson.dumps(whole)) == LimitRecord()
    assert records.parse(orjson.dumps(whole | torn)) is None


@requirement("limits.window")
def test_a_record_keeps_a_thousand_replicas_and_every_block_that_counts() -> None:
    record = LimitRecord()
    for number in range(2 * records.MAX_REPLICAS):
        one = record.replicas[secrets.token_hex(5)] = LimitShare(
            START + number / 100, 9_999, served=99_999, serial=99_999
        )
        one.requests, one.until = number % 2, one.seen + records.BLOCK_S
    stored = records.encode(record)
    assert len(stored) < MAX_VALUE_BYTES
    assert records.decode(stored) == record
    record.drop_expired(START + 20)
    assert len(record.replicas) == records.MAX_REPLICAS
    assert sum(one.requests for one in record.replicas.values()) == records.MAX_REPLICAS


@requirement("limits.window")
def test_tokens_are_settled_by_what_a_request_cost() -> None:
    allowance, stored, sent = LimitAllowance("pod", Rates(tokens=100_000)), None, 0
    allowance.tokens_per_request = 10_000
    for second in range(40):
        allowance.confirm(allowance.plan(stored, 1, START + second), second + 1)
        stored = records.encode(allowance.record)
        if (use := allowance.take(START + second)) is not None:
            allowance.settle(use, 30_000)
            sent += 1
    assert allowance.record.counted(records.TOKENS, START + 40) == sent * 30_000
    assert sent == 3  # then fewer are left than the estimate, which the costs have raised


@requirement("limits.shared", "limits.window")
def test_replicas_share_a_limit_of_a_few_requests_worth_of_tokens() -> None:
    """Parts smaller than the tokens of one request would let no request through."""
    world = World(Rates(tokens=30_000))
    for _ in range(4):
        world.start()
        world.pods[-1].allowance.tokens_per_request = 10_000
    sent = overload(world, 1_200)
    assert sum(sent) >= 0.9 * 20 * 3
    assert max(sent) <= 1.5 * min(sent)
    assert world.max_in_a_window() <= 3


@requirement("limits.shared")
def test_concurrent_requests_that_a_replica_does_not_want_go_to_the_others() -> None:
    assert shares(10, {"a": Demand(1, 0), "b": Demand(20, 5), "c": Demand(20, 4)}) == {"a": 1, "b": 4, "c": 5}
    assert shares(2, {"a": Demand(9, 2), "b": Demand(9, 1), "c": Demand(9, 1)}) == {"a": 0, "b": 1, "c": 1}
    assert shares(9, {"a": Demand(2, 0)}) == {"a": 2}


def waiter(project: str, agent: str, latest: float) -> WaitingCall:
    no_future: Any = None
    return WaitingCall(Need("A", "search", (project, agent), Deadline.after(5), SecretStr("key")), latest, no_future)


def pop(queue: FairQueue) -> WaitingCall:
    """Remove the next call of any project."""
    name = queue.next_project(lambda _: True)
    assert name is not None
    return queue.pop(name)


@requirement("limits.waiting")
def test_permits_go_round_by_project_and_agent() -> None:
    queue = FairQueue()
    for flow in ("a", "x"), ("a", "x"), ("a", "x"), ("a", "y"), ("b", "z"), ("c", "z"):
        queue.add(waiter(*flow, START), START)
    order = ["/".join(pop(queue).need.flow) for _ in range(len(queue))]
    assert order == ["a/x", "b/z", "c/z", "a/y", "a/x", "a/x"]
    assert queue.by_project() == {}


@requirement("limits.waiting", "fair.weights")
def test_permits_go_to_projects_by_their_weights() -> None:
    queue = FairQueue({"b": 2, "c": 4})
    for name in "abc":
        for _ in range(100):
            queue.add(waiter(name, "x", START), START)
    served = Counter(pop(queue).need.flow[0] for _ in range(140))
    assert served == {"a": 20, "b": 40, "c": 80}
    queue.add(waiter("d", "x", START), START)
    assert "d" in [pop(queue).need.flow[0] for _ in range(7)], "a new project does not wait for those with a backlog"
    given_up = queue.certain_timeouts(lambda count: count, START - 7 * 10)  # one permit a second, 10 turns
    assert Counter(one.need.flow[0] for one, _ in given_up)["c"] < 20 - 5


@requirement("fair.weights")
def test_a_project_of_a_further_kernel_has_the_weight_of_its_id() -> None:
    queue = FairQueue({"b": 4})
    for name in ("a", "v1r3 b"):
        for _ in range(100):
            queue.add(waiter(name, "x", START), START)
    assert Counter(pop(queue).need.flow[0] for _ in range(50)) == {"a": 10, "v1r3 b": 40}


@requirement("limits.waiting", "fair.weights")
def test_a_project_with_one_waiting_call_at_a_time_gets_no_more_than_its_weight() -> None:
    queue = FairQueue({"b": 3})
    for _ in range(400):
        queue.add(waiter("b", "x", START), START)
    served: Counter[str] = Counter()
    for _ in range(100):
        if "a" not in queue.by_project():
            queue.add(waiter("a", "x", START), START)
        served[pop(queue).need.flow[0]] += 1
    assert 24 <= served["a"] <= 26


@requirement("limits.waiting", "hostile.neighbour")
def test_a_project_waits_for_as_many_calls_of_others_as_its_request_cost() -> None:
    queue = FairQueue({"b": 2})
    for name in "aab":
        queue.add(waiter(name, "x", START), START)
    assert pop(queue).need.flow[0] == "a"
    queue.charge("a", 3, START)
    order = []
    for _ in range(9):
        if "b" not in queue.by_project():
            queue.add(waiter("b", "x", START), START)
        order.append(pop(queue).need.flow[0])
    assert order == ["b"] * 8 + ["a"], "four turns of weight 1 are eight of weight 2"


@requirement("limits.waiting", "hostile.neighbour")
@pytest.mark.parametrize(("idle_s", "first"), [(59.0, "b"), (60.0, "a")])
def test_what_a_request_cost_counts_until_no_call_has_waited_for_a_minute(idle_s: float, first: str) -> None:
    queue = FairQueue()
    queue.add(waiter("a", "x", START), START)
    pop(queue)
    queue.charge("a", 5, START)
    for name in "ab":
        queue.add(waiter(name, "x", START), START + idle_s)
    assert pop(queue).need.flow[0] == first


@requirement("limits.waiting")
def test_neither_costs_while_nobody_waits_nor_cheap_requests_change_whose_turn_it_is() -> None:
    queue = FairQueue()
    queue.charge("a", 5, START)
    for name in "abb":
        queue.add(waiter(name, "x", START), START)
    queue.charge("b", -1, START)
    assert [pop(queue).need.flow[0] for _ in range(2)] == ["a", "b"]
    queue.charge("b", -5, START)
    queue.add(waiter("c", "x", START), START)
    assert pop(queue).need.flow[0] == "b"
    queue.add(waiter("b", "x", START), START)
    assert pop(queue).need.flow[0] == "c", "its refund is one request at most"


@requirement("limits.waiting", "hostile.neighbour")
def test_costs_of_many_projects_are_kept_for_the_largest_only() -> None:
    queue = FairQueue()
    queue.add(waiter("a", "x", START), START)
    for number in range(1, 5_000):
        queue.charge(f"p{number}", number, START)
    assert len(queue._tags) <= 1_000  # noqa: SLF001
    queue.add(waiter("p4999", "x", START), START)
    queue.add(waiter("b", "x", START), START)
    assert [pop(queue).need.flow[0] for _ in range(3)] == ["a", "b", "p4999"]


def certain_timeouts_by_definition(
    queue: FairQueue, wait_s: Callable[[float], float], now: float
) -> list[tuple[WaitingCall, float]]:
    """Compute the certain timeouts by their definition: for each call a loop over the other projects."""
    found, projects = [], queue._projects  # noqa: SLF001
    for name, project in projects.items():
        position, virtual_time = 1, queue._virtual_time  # noqa: SLF001
        for waiting in (one for one in queue.waiters() if one.need.flow[0] == name):
            needed, progress = float(position), project.start(virtual_time) + position / project.weight
            for other in projects.values():
                if other is not project:
                    backlog = now - other.waiting_since >= 2
                    calls = max(0.0, progress - other.start(virtual_time)) * other.weight
                    needed += min(calls, math.inf if backlog else other.length)
            if now + wait_s(needed) > waiting.latest:
                found.append((waiting, max(1.0, wait_s(needed))))
            else:
                position += 1
    return found


@given(
    calls=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.floats(0, 60), st.booleans()), max_size=40),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]), min_size=6, max_size=6),
    charges=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([-0.9, 0.5, 3.0, 20.0])), max_size=4),
)
@requirement("limits.waiting", "fair.weights")
def test_calls_that_get_no_permit_in_time_are_found(
    calls: list[tuple[int, int, float, bool]], weights: list[float], charges: list[tuple[int, float]]
) -> None:
    queue = FairQueue({f"p{number}": weight for number, weight in enumerate(weights)})
    for project, agent, latest, early in sorted(calls, key=lambda call: not call[3]):
        queue.add(waiter(f"p{project}", f"a{agent}", START + latest), START - 10 * early)
    for project, requests in charges:
        queue.charge(f"p{project}", requests, START)
    found = queue.certain_timeouts(lambda count: count / 2, START)
    expected = certain_timeouts_by_definition(queue, lambda count: count / 2, START)
    assert [one for one, _ in found] == [one for one, _ in expected]
    assert [seconds for _, seconds in found] == pytest.approx([seconds for _, seconds in expected])


class CountedWeight(float):
    """Weight that counts the divisions by it and of it."""

    divisions = 0

    def __truediv__(self, other: float) -> float:
        CountedWeight.divisions += 1
        return float(self) / float(other)

    def __rtruediv__(self, other: float) -> float:
        CountedWeight.divisions += 1
        return float(other) / float(self)


@requirement("limits.waiting")
def test_many_waiting_projects_cost_each_call_the_same() -> None:
    counts = []
    for projects in (20, 200):
        queue = FairQueue({f"p{number}": CountedWeight(1) for number in range(projects)})
        for number in range(projects):
            queue.add(waiter(f"p{number}", "a", START + 9), START)
        CountedWeight.divisions = 0
        queue.certain_timeouts(lambda count: count, START)
        counts.append(CountedWeight.divisions)
    assert counts[1] <= 15 * counts[0]


@requirement("limits.waiting")
def test_a_call_is_given_up_once_its_place_comes_too_late() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.add(waiter("a", "x", START + 5), START)
    queue.add(waiter("b", "x", START + 5), START)
    given_up = queue.certain_timeouts(float, START)  # one permit a second
    assert [one.need.flow[0] for one, _ in given_up] == ["a"] * 6  # b has one call, which takes one permit from a
    assert all(seconds >= 1 for _, seconds in given_up)
    assert queue.certain_timeouts(lambda _: 0.0, START) == []


@requirement("limits.window")
def test_what_another_replica_did_not_use_comes_back() -> None:
    world = World(Rates(30))
    world.start()
    world.start()
    one, two = world.pods
    one.waiting = 5
    world.change(one)
    assert records.decode(world.store.value).counted(REQUESTS, world.now) == 5
    one.waiting = 0
    world.now += 3
    world.change(one)
    two.waiting = 30
    world.now += 60
    world.change(two)
    assert world.send(two, 30) == 10  # a burst; the rest is paced


@requirement("cli.limits")
def test_waiting_calls_of_all_projects_are_counted_although_few_are_named() -> None:
    limit = {"variable": "A", "endpoint": "search", "waiting": 40, "waiting_by_project": {"p": 2, "q": 1}}
    [entry] = combined([{"instance": name, "upstream_limits": [limit]} for name in ("one", "two")])
    assert (entry["waiting"], entry["waiting_by_project"]) == (80, {"p": 4, "q": 2})


ENVIRONMENT = {"A": "first value", "B": "second value"}
POOL = {"P": KeyPool(("A", "B"))}
NUMBERS = count()
NO_LIMITS = LimitOptions()


@dataclass
class Replicas:
    """Limiters of several replicas with one clock (`now`) and one store in memory.

    The store is unavailable while `down`, and can only be read while `full`.
    """

    options: LimitOptions = NO_LIMITS
    now: float = 1_000_000.0
    down: bool = False
    full: bool = False
    records: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    limiters: list[Limiter] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    secrets: Secrets = field(init=False)

    def start(self) -> Limiter:
        limiter = Limiter(f"r{len(self.limiters)}", self.options, self, lambda: self.now, key_failure)
        self.limiters.append(limiter)
        self.use(ENVIRONMENT)
        return limiter

    def use(self, environment: dict[str, str]) -> None:
        """Give all replicas these values."""
        self.secrets = Secrets(environment, {"A", "B", "P"}, self.options.pool_of)
        for limiter in self.limiters:
            limiter.keys.set_secrets(self.secrets)

    async def read(self, name: str) -> tuple[int, bytes | None]:
        await asyncio.sleep(0)
        if self.down:
            raise Unavailable("the store is down")
        return self.records.get(name, (0, None))

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        await asyncio.sleep(0)
        if self.down or self.full:
            raise Unavailable("the store is down or full")
        if self.records.get(name, (0, b""))[0] != revision:
            return None
        self.records[name] = revision + 1, value
        for limiter in self.limiters:
            limiter.on_change(name, revision + 1, value)
        return revision + 1

    async def settled(self) -> None:
        for limiter in self.limiters:
            await limiter.keys.aclose()

    async def permit(self, limiter: Limiter, variable: str = "A", call: int | None = None, wait_s: float = 5) -> Permit:
        number = next(NUMBERS) if call is None else call
        key = self.secrets(variable)
        permit = await limiter.acquire(Need(variable, "search", ("p", "a"), Deadline.after(wait_s), key, call=number))
        self.sent[permit.key.get_secret_value()] += 1
        return permit

    async def done(self, limiter: Limiter, variable: str = "A") -> str:
        """Send a request that succeeds; return the key."""
        permit = await self.permit(limiter, variable)
        permit.done(1)
        await self.settled()
        return permit.key.get_secret_value()

    async def refused(self, limiter: Limiter, status: int, variable: str = "A", call: int | None = None) -> ToolError:
        """Send a request whose key is refused."""
        permit = await self.permit(limiter, variable, call)
        error = refusal(status)
        permit.failed(error)
        await self.settled()
        return error


def refusal(status: int) -> ToolError:
    return upstream_failure(status // 100, {"status": status}, None)


@asynccontextmanager
async def replicas(number: int = 2, options: LimitOptions = NO_LIMITS) -> AsyncIterator[Replicas]:
    world = Replicas(options)
    for _ in range(number):
        world.start()
    try:
        yield world
    finally:
        for limiter in world.limiters:
            await limiter.aclose()


@pytest.mark.parametrize(("status", "error"), [(40102, AuthFailed), (40201, BudgetExceeded), (40203, BudgetExceeded)])
@requirement("keys.blocked")
async def test_a_key_that_two_calls_find_refused_is_blocked_for_all_replicas(
    status: int, error: type[ToolError]
) -> None:
    async with replicas() as world:
        one, two = world.limiters
        await world.refused(one, status)
        await world.refused(two, status)
        for limiter in (one, two):
            with pytest.raises(error) as refused:
                await world.permit(limiter)
            assert refused.value.as_error() == refusal(status).as_error()
            assert refused.value.key_variable == "A"
            assert [(key["variable"], key["status"]) for key in limiter.keys.snapshot()] == [("A", status)]
        assert await world.done(one, "B") == ENVIRONMENT["B"]
        late = world.start()
        await late.keys.load()
        with pytest.raises(error):
            await world.permit(late)


@pytest.mark.parametrize("statuses", [[40202] * 3, [40103] * 3, [40104] * 3, [40102, 40201, 40203], [40102, 40202]])
@requirement("keys.blocked")
async def test_faults_of_a_call_and_single_refusals_never_block_a_key(statuses: list[int]) -> None:
    async with replicas() as world:
        for number, status in enumerate(statuses):
            await world.refused(world.limiters[number % 2], status)
        assert [await world.done(limiter) for limiter in world.limiters] == [ENVIRONMENT["A"]] * 2


@requirement("keys.blocked", "hostile.neighbour")
async def test_a_key_that_serves_other_calls_between_two_refusals_is_not_blocked() -> None:
    async with replicas() as world:
        one, two = world.limiters
        for _ in range(3):
            await world.refused(one, 40201)
            assert await world.done(two) == "first value"
        running = await world.permit(two)
        await world.refused(one, 40201)
        await world.refused(one, 40201)
        assert "A" in one.keys.blocked
        running.done(1)
        await world.settled()
        assert "A" in two.keys.blocked, "the request was sent before the refusals"


@requirement("keys.blocked", "keys.pools")
async def test_a_refused_request_may_be_sent_with_each_key_of_its_pool() -> None:
    options = LimitOptions(pools={"P": KeyPool(("A", "B", "C"))})
    world = Replicas(options)
    world.start()
    world.secrets = Secrets({**ENVIRONMENT, "C": "third value"}, {"A", "B", "C", "P"}, options.pool_of)
    [limiter] = world.limiters
    limiter.keys.set_secrets(world.secrets)
    try:
        need = Need("P", "search", ("p", "a"), Deadline.after(5), world.secrets("P"))
        for left in (2, 1, 0):
            permit = await limiter.acquire(need)
            error = refusal(40102)
            permit.failed(error)
            assert error.max_retries >= 2 if left else error.max_retries == 0
    finally:
        await limiter.aclose()


@requirement("keys.blocked")
async def test_refusals_of_the_items_of_one_call_count_once_and_expire() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        for _ in range(3):
            await world.refused(limiter, 40102, call=-1)
        await world.done(limiter)
        world.now += 3600
        await world.refused(limiter, 40102)
        await world.done(limiter)


@pytest.mark.parametrize("record_lost", [False, True])
@requirement("keys.tried_again")
async def test_one_call_of_all_replicas_tries_a_blocked_key_again(record_lost: bool) -> None:  # noqa: FBT001
    async with replicas() as world:
        one, two = world.limiters
        for limiter in (one, two):
            await world.refused(limiter, 40201)
        world.now += RETRY_S
        if record_lost:
            world.records.clear()
        trial = await world.permit(two)
        if not record_lost:
            with pytest.raises(BudgetExceeded):
                await world.permit(one)
            trial.failed(refusal(40201))
            await world.settled()
            with pytest.raises(BudgetExceeded):
                await world.permit(two)
            world.now += RETRY_S
            trial = await world.permit(one)
        trial.done(1)
        await world.settled()
        assert [await world.done(limiter) for limiter in (two, one)] == [ENVIRONMENT["A"]] * 2
        assert two.keys.snapshot() == []


@requirement("keys.tried_again")
async def test_a_new_value_is_not_blocked_by_refusals_of_the_old_one() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        late = await world.permit(limiter)
        for _ in range(2):
            await world.refused(limiter, 40102)
        world.use({"A": "new value"})
        assert await world.done(limiter) == "new value"
        late.failed(refusal(40102))
        await world.refused(limiter, 40102)
        assert await world.done(limiter) == "new value"
        world.use(ENVIRONMENT)
        await world.settled()
        with pytest.raises(AuthFailed):
            await world.permit(limiter)


@requirement("keys.blocked")
async def test_without_the_store_a_replica_uses_the_outcomes_of_its_own_calls() -> None:
    async with replicas() as world:
        one, two = world.limiters
        world.down = True
        for _ in range(2):
            await world.refused(one, 40102)
        with pytest.raises(AuthFailed):
            await world.permit(one)
        await world.done(two)
        world.now += RETRY_S
        assert await world.done(one) == ENVIRONMENT["A"]
        assert await world.done(one) == ENVIRONMENT["A"]


@requirement("keys.blocked")
async def test_calls_that_wait_for_a_key_fail_once_it_is_blocked() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=10)) as world:
        [limiter] = world.limiters
        permits = [await world.permit(limiter) for _ in range(10)]
        waiting = asyncio.create_task(world.permit(limiter, wait_s=100))
        await asyncio.sleep(0)
        for permit in permits[:2]:
            permit.failed(refusal(40102))
        with pytest.raises(AuthFailed):
            await waiting


@pytest.mark.parametrize("ending", ["refused for its own reasons", "cancelled", "cancelled while it waited"])
@requirement("keys.tried_again")
async def test_after_a_trial_that_does_not_depend_on_the_key_the_next_call_tries_it(ending: str) -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=10)) as world:
        [limiter] = world.limiters
        for _ in range(2):
            await world.refused(limiter, 40102)
        world.now += RETRY_S
        if ending == "cancelled while it waited":
            trial = asyncio.create_task(world.permit(limiter))
            while not limiter.snapshot()[0]["running"]:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
            trial.cancel()
            await asyncio.wait([trial])
        elif ending == "cancelled":
            (await world.permit(limiter)).cancelled()
        else:
            (await world.permit(limiter)).failed(refusal(42200))
        await world.settled()
        await world.done(limiter)
        assert limiter.keys.snapshot() == []


@requirement("keys.tried_again")
async def test_a_forged_record_blocks_a_key_for_minutes_only() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        for _ in range(2):
            await world.refused(limiter, 40102)
        [(name, (revision, value))] = [entry for entry in world.records.items() if entry[0].startswith("key.")]
        forged = orjson.dumps(orjson.loads(value) | {"retry_at": 1e12})
        world.records[name] = revision + 1, forged
        limiter.on_change(name, revision + 1, forged)
        with pytest.raises(AuthFailed):
            await world.permit(limiter)
        world.now += RETRY_S
        await world.done(limiter)
        assert limiter.keys.snapshot() == []


@requirement("keys.blocked")
async def test_a_call_that_waits_while_its_key_is_replaced_is_sent_with_the_new_one() -> None:
    async with replicas(1, LimitOptions(search_concurrent=1)) as world:
        [limiter] = world.limiters
        held = await world.permit(limiter)
        waiting = asyncio.create_task(world.permit(limiter))
        await asyncio.sleep(0)
        world.use({"A": "new value"})
        held.done(1)
        assert (await waiting).key.get_secret_value() == "new value"


@requirement("keys.pools")
async def test_the_keys_of_a_pool_share_the_load_by_their_limits() -> None:
    limits = {"A": KeyLimits(search_requests_per_minute=3_000), "B": KeyLimits(search_requests_per_minute=1_000)}
    async with replicas(1, LimitOptions(keys=limits, pools=POOL)) as world:
        [limiter] = world.limiters
        for number in range(100):  # a tool that names a key uses its pool
            await world.done(limiter, "P" if number % 2 else "B")
        # About three quarters, since the other key is used while one gets new permits.
        assert 68 <= world.sent[ENVIRONMENT["A"]] <= 76


@pytest.mark.parametrize("status", [40102, 40201, 42901])
@requirement("keys.pools")
async def test_a_refused_or_paused_key_is_passed_over_and_its_request_repeated(status: int) -> None:
    async with replicas(1, LimitOptions(pools=POOL)) as world:
        [limiter] = world.limiters
        for _ in range(4):
            permit = await world.permit(limiter, "P")
            error = refusal(status)
            if permit.key.get_secret_value() == ENVIRONMENT["A"]:
                permit.failed(error)
                assert (error.max_retries >= 1, error.retry_after) == (True, 0.0)
            else:
                permit.done(1)
            await world.settled()
        assert [await world.done(limiter, "P") for _ in range(4)] == [ENVIRONMENT["B"]] * 4
        for _ in range(2 if status // 100 != 429 else 0):
            assert (await world.refused(limiter, status, "P")).max_retries == 0
        if status // 100 != 429:
            with pytest.raises(ToolError) as refused:
                await world.permit(limiter, "P")
            assert refused.value.key_variable in ("A", "B")


@requirement("keys.pools")
async def test_a_call_that_waits_takes_the_first_free_key_of_its_pool() -> None:
    limits = {"A": KeyLimits(search_concurrent=1), "B": KeyLimits(search_concurrent=1)}
    async with replicas(1, LimitOptions(keys=limits, pools=POOL)) as world:
        [limiter] = world.limiters
        first, second = [await world.permit(limiter, "P") for _ in range(2)]
        assert first.key != second.key
        for ending in (second, first):
            waiting = asyncio.create_task(world.permit(limiter, "P", wait_s=100))
            await asyncio.sleep(0)
            ending.done(1)
            assert (await waiting).key == ending.key


@requirement("keys.pools")
async def test_a_pool_uses_the_keys_that_are_set() -> None:
    async with replicas(1, LimitOptions(pools=POOL)) as world:
        [limiter] = world.limiters
        world.use({"B": "the only one"})
        assert world.secrets.missing() == ["A"]
        assert {await world.done(limiter, variable) for variable in ("P", "P", "A", "B")} == {"the only one"}


MUTATIONS: list[Callable[[dict[str, object]], object]] = [
    lambda value: value.pop("refusals"),
    lambda value: value.update(version=3),
    lambda value: value.update(status=40202),
    lambda value: value.update(since=None),
    lambda value: value.update(retry_at="nan"),
    lambda value: value.update(refusals={"x": {"call": "1", "at": 1}}),
    lambda value: value.update(refusals=[1]),
]


@requirement("keys.blocked")
def test_a_record_of_a_key_that_is_none_is_empty() -> None:
    record = KeyRecord(refusals={40102: keys.Refusal("r/1", 5.0)})
    assert keys.decode(keys.encode(record), 9.0) == record
    for stored in (None, b"", b"null", b"[]", b"{}", b"\xff"):
        assert keys.decode(stored, 9.0) == KeyRecord()
    for mutate in MUTATIONS:
        value = orjson.loads(keys.encode(record))
        mutate(value)
        assert keys.decode(orjson.dumps(value), 9.0) == KeyRecord()
