"""Accounts of budgets in virtual time: never more than the budget, nothing lost, and periods of a time zone."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openapi_tool.budgets import ledger
from openapi_tool.budgets.ledger import LEASE_S, NOTHING, Amount, Limit, Periods
from openapi_tool.budgets.replica import Allowance, Planned
from openapi_tool.cli.limits import combined_budgets
from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.options import BudgetLimits, BudgetOptions, time_zone
from tests.requirements import requirement

START = 1_000_000.0
ONE = Amount(1)


@dataclass
class Pod:
    """Replica with requests that wait (`asked`) and that run (`running`), and the total in its journal (`noted`)."""

    allowance: Allowance
    asked: int = 0
    running: int = 0
    planned: tuple[Planned, int] | None = None
    noted: Amount = NOTHING


@dataclass
class World:
    """Replicas over one record, in virtual time; `journals` are those of the dead, `lost` is in no journal."""

    limit: int
    pods: list[Pod] = field(default_factory=list)
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
        self.pods.append(Pod(Allowance(f"pod-{self.born}", Limit(self.limit))))

    def plan(self, pod: Pod) -> None:
        """Read the record and compute its change."""
        record = ledger.decode(self.value)
        pod.allowance.adopt(record, self.revision)
        if (own := record.shares.get(pod.allowance.name)) is not None:
            assert pod.allowance.spent == pod.allowance.total.minus(own.total)
        needs, journals = (ONE,) * pod.asked, self.journals_of_dead(pod)
        pod.planned = pod.allowance.plan(self.value, needs, self.now, journals=journals), self.revision

    def journals_of_dead(self, pod: Pod) -> dict[str, Amount]:
        """Return the journals of replicas that count as dead: killed ones, and those that did not report in time."""
        journals = {each.allowance.name: each.noted for each in self.pods} | self.journals
        record, name = ledger.decode(self.value), pod.allowance.name
        return {dead: journals[dead] for dead in ledger.dead_replicas(record, name, self.now)}

    def write(self, pod: Pod, *, answered: bool = True) -> None:
        """Write the planned change unless another replica was first; without an answer its outcome is unknown."""
        if pod.planned is None:
            return
        planned, revision = pod.planned
        pod.planned = None
        if revision != self.revision:
            return
        self.value, self.revision = ledger.encode(planned.record, {}), revision + 1
        if not answered:
            return
        pod.allowance.confirm(planned, self.revision)
        pod.running += sum(planned.grant.granted)
        pod.asked = 0

    def change(self, pod: Pod) -> None:
        self.plan(pod)
        self.write(pod)
        for other in self.pods:
            other.allowance.adopt(ledger.decode(self.value), self.revision)

    def ask(self, pod: Pod, number: int) -> None:
        """Let requests wait for the next change."""
        pod.asked = number
        for _ in range(number):
            pod.allowance.record_demand(ONE, self.now)

    def do(self, act: str, pod: Pod) -> None:
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
            pod.allowance = Allowance(pod.allowance.name, pod.allowance.limit)
        elif act == "crash":
            self.crash(pod)

    def crash(self, pod: Pod) -> None:
        """End a replica; a journal counts only for one that held something by its last report."""
        record, name = ledger.decode(self.value), pod.allowance.name
        pod.allowance.adopt(record, self.revision)
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
@example(limit=9, acts=[*SENT * 2, *[("wait", 9)] * 4, ("forget", 0), *SENT * 4])
@requirement("budgets.exact", "budgets.reservations")
def test_no_interleaving_exceeds_a_budget_or_loses_a_use(limit: int, acts: list[tuple[str, int]]) -> None:
    """Conflicts, writes of unknown outcome, cancellations, replicas that are killed or stalled for longer than a lease.

    A killed replica loses only what is in no journal.
    """
    world = World(limit)
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
    left = limit - ledger.decode(world.value).used.requests
    world.ask(last, 1)
    world.change(last)
    assert last.running == (left > 0)
    assert ledger.decode(world.value).used.requests == world.sent - world.lost


@requirement("budgets.exact")
def test_an_unused_block_goes_back_while_another_replica_waits() -> None:
    world = World(100)
    for _ in range(3):
        world.start()
    first, second, third = world.pods
    for pod in (first, second):
        world.ask(pod, 1)
        world.change(pod)
    assert first.allowance.idle == second.allowance.idle == Amount(4)
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
    allowance = Allowance("pod", Limit(None, 100))
    planned = allowance.plan(None, (Amount(0, 30),) * 4, START)
    assert planned.grant.granted == (True, True, True, False)
    allowance.confirm(planned, 1)
    for _ in range(3):
        allowance.settle(Amount(0, 30), Amount(1, 40), START)
    planned = allowance.plan(ledger.encode(planned.record, {}), (Amount(0, 1),), START)
    assert planned.record.used == Amount(3, 120)
    assert planned.grant.granted == (False,)
    assert planned.grant.warns


@requirement("budgets.reservations")
@pytest.mark.parametrize(("replicas", "elsewhere", "part"), [(1, 0, 100), (2, 10, 45), (3, 40, 20)])
def test_without_the_store_a_replica_uses_its_part_of_what_was_left(replicas: int, elsewhere: int, part: int) -> None:
    world = World(100)
    for _ in range(replicas):
        world.start()
    for pod in world.pods[1:]:
        world.ask(pod, elsewhere // (replicas - 1))
        world.change(pod)
    record = ledger.decode(world.value)
    for share in record.shares.values():
        share.idle = NOTHING
    pod = world.pods[0]
    pod.allowance.adopt(record, 9)
    pod.allowance.go_offline(world.now)
    while pod.allowance.take(ONE, world.now + 999):
        pod.running += 1
    assert pod.running == part


@requirement("budgets.exact")
@pytest.mark.parametrize("stored", [b"", b"null", b"[]", b"{}", b"\xff", b'{"version": 1}', b'{"version": 2}'])
def test_a_record_of_something_else_is_an_unused_account(stored: bytes) -> None:
    assert ledger.decode(stored) == ledger.Record()


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
