"""Races of budgets and usage.

`run` runs a test on the loops of asyncio and uvloop in real time, `run_virtually` on a loop in virtual time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr

from openapi_tool.jina.backend import JinaBackend, JinaBackendOptions
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.memory_estimates import max_call_memory
from openapi_tool.jina.options import CacheOptions, EgressOptions, RetryOptions
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.options.budgets import BudgetLimits, BudgetOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.errors import BudgetExceeded, RateLimited, ToolError, Unavailable, UpstreamUnavailable
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.quotas import budgets as budgets_module
from openapi_tool.quotas.account import Account
from openapi_tool.quotas.account_record import AccountRecord, parse
from openapi_tool.quotas.budgets import Budgets, Spender
from openapi_tool.quotas.permits import Permit, PermitRequest, Unlimited
from openapi_tool.state.nats_kv import MAX_VALUE_BYTES
from openapi_tool.state.port import OnChange, Stored
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.output import ToolOutput
from tests.answering import call_within
from tests.races.conftest import Run, Scene, iterate_loop, run_virtually
from tests.requirements import requirement
from tests.support import SentByMock, definition

START = 1_900_000_000.0
LIMIT = 100
CALLER = Spender("proj", "agent", "session", "tool")


@dataclass
class Pod:
    """A replica and its store. Each await of the store counts as a step; at step `killed_at` the replica stops."""

    world: World
    number: int
    killed_at: int = 0
    steps: int = 0
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.budgets = Budgets(
            f"pod-{self.number}", self.world.options, self, self.world.clock, lambda: self.world.max_wait_share
        )

    async def step(self) -> None:
        self.steps += 1
        if self.steps == self.killed_at:
            self.killed.set()
        if self.killed.is_set():
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    async def request(self) -> None:
        await self.step()
        if self.world.down:
            raise Unavailable("NATS: no answer")

    async def read(self, key: str) -> Stored:
        await self.request()
        revision, value = self.world.records.get(key, (0, None))
        await self.step()
        return Stored(value, revision)

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        await self.request()
        if len(value) > MAX_VALUE_BYTES:
            raise Unavailable("the record is too large")
        written = self.world.write(key, value, revision)
        await self.step()
        return written

    def watch(self, on_change: OnChange) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        return nullcontext()  # the port lets a store report no change

    async def call(self, who: Spender = CALLER, tokens: int = 0, *, commits: bool = False) -> bool:
        """Send one request if the budgets allow it, and return whether they do; `commits` also commits its result."""
        accounts = self.budgets.accounts_of(who)
        assert accounts is not None
        try:
            reservation = await accounts.reserve(1, Deadline.after(30))
        except BudgetExceeded as refusal:
            self.world.refusals.append((self.world.taken, refusal))
            return False
        self.world.taken += 1
        await self.step()
        self.world.sent += 1
        await asyncio.sleep(0)
        reservation.charge(tokens)
        if commits:
            await accounts.wait_until_written()
            self.world.committed += 1
        return True

    def stop(self) -> None:
        """End the background tasks without a report, as a killed process does."""
        for task in (self.budgets._task, *(account._task for account in self.budgets._accounts.values())):  # noqa: SLF001
            if task is not None:
                task.cancel()


@dataclass
class World:
    """Records in memory, whose changes reach every replica, and counts of the requests."""

    options: BudgetOptions = field(default_factory=lambda: BudgetOptions(project_day_requests=LIMIT))
    records: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    down: bool = False
    taken: int = 0
    sent: int = 0
    committed: int = 0
    refusals: list[tuple[int, BudgetExceeded]] = field(default_factory=list)
    skipped_s: float = 0.0
    max_wait_share: float = 1 / 3

    def clock(self) -> float:
        # A real loop's time may be the machine's uptime: stay within 12 days of START.
        return START + self.skipped_s + asyncio.get_running_loop().time() % 1e6

    def pod(self, killed_at: int = 0) -> Pod:
        self.pods.append(Pod(self, len(self.pods), killed_at))
        return self.pods[-1]

    def write(self, name: str, value: bytes, revision: int) -> int | None:
        if self.records.get(name, (0, b""))[0] != revision:
            return None
        self.records[name] = revision + 1, value
        for pod in self.pods:
            asyncio.get_running_loop().call_soon(pod.budgets.on_change, name, Stored(value, revision + 1))
        return revision + 1

    async def close(self) -> list[AccountRecord]:
        await asyncio.gather(*(pod.budgets.aclose() for pod in self.pods if not pod.killed.is_set()))
        return [record for _, value in self.records.values() if (record := parse(value)) is not None]


@pytest.mark.parametrize("running", [1, 7, 70])
@requirement("budgets.exact")
def test_replicas_send_exactly_the_budget_and_refuse_only_the_rest(run: Run, running: int) -> None:
    """200 calls on three replicas, `running` at a time on each."""

    async def work() -> None:
        world = World()
        pods = [world.pod() for _ in range(3)]
        slots = [asyncio.Semaphore(running) for _ in pods]

        async def call(number: int) -> bool:
            async with slots[number % 3]:
                return await pods[number % 3].call()

        done = await asyncio.gather(*map(call, range(2 * LIMIT)))
        [record] = await world.close()
        assert world.sent == done.count(True) == record.used.requests == LIMIT
        assert min(taken for taken, _ in world.refusals) >= LIMIT - 2  # refused only if at most 2 % are left
        assert record.open == {}

    run(work())


@requirement("budgets.exact")
def test_a_call_that_is_cancelled_at_any_await_leaves_nothing_reserved(run: Run) -> None:
    async def work() -> None:
        for number in range(25):
            world = World()
            pod = world.pod()
            call = asyncio.create_task(pod.call())
            await iterate_loop(number)
            call.cancel()
            await asyncio.wait([call])
            await iterate_loop(20)
            account = next(iter(pod.budgets._accounts.values()), None)  # noqa: SLF001
            if account is not None and not world.taken:
                assert [await pod.call() for _ in range(LIMIT + 1)] == [True] * LIMIT + [False]
            for record in await world.close():
                assert world.taken == 1 or record.open == {}

    run(work())


@pytest.mark.parametrize("killed_at", range(1, 24))
@requirement("budgets.reservations", "budgets.exact")
def test_what_a_killed_replica_has_sent_stays_charged(killed_at: int) -> None:
    """Reservations that nobody settles are charged as used once no call can run any more."""

    async def work() -> None:
        world = World()
        first = world.pod(killed_at)
        calls = [asyncio.create_task(first.call(commits=True)) for _ in range(3)]
        await asyncio.sleep(1)
        calls += [asyncio.create_task(first.call(commits=True)) for _ in range(3)]
        await asyncio.wait([asyncio.create_task(first.killed.wait())], timeout=30)
        sent, committed = world.sent, world.committed
        for call in calls:
            call.cancel()
        first.stop()
        await asyncio.sleep(100)
        second = world.pod()
        done = [await second.call() for _ in range(LIMIT + 1)]
        assert committed <= sent
        assert LIMIT - len(calls) <= done.count(True) <= LIMIT - sent
        await second.budgets.aclose()
        [record] = [record for _, value in world.records.values() if (record := parse(value)) is not None]
        assert record.used.requests + record.lost.requests == LIMIT
        assert record.used.requests >= done.count(True) + committed
        assert record.lost.requests >= sent - record.used.requests + done.count(True)

    run_virtually(work())


@pytest.mark.parametrize("share", [1 / 3, 1.0])
@pytest.mark.parametrize("options", [BudgetOptions(session_requests=3), BudgetOptions(project_day_requests=3)])
@requirement("budgets.reservations", "budgets.exact")
def test_a_call_waits_for_reservations_of_a_killed_replica_for_a_part_of_its_time(
    options: BudgetOptions, share: float
) -> None:
    async def work() -> None:
        world = World(options, max_wait_share=share)
        first, second = world.pod(), world.pod()
        assert await first.call()
        accounts: Any = first.budgets.accounts_of(CALLER)
        for _ in range(2):
            await accounts.reserve(1, Deadline.after(30))
        first.killed.set()
        first.stop()
        began = world.clock()
        assert not await second.call()
        [(_, refusal)] = world.refusals
        assert round(world.clock() - began) == round(30 * share)
        owner, left_s = (
            "of this session" if options.session_requests else "of this project for today",
            refusal.retry_after,
        )
        assert left_s is not None
        assert 90 - 30 * share <= left_s <= 91 - 30 * share
        assert refusal.message == (
            f"The budget {owner} is held by requests that have not ended, so nothing was sent: 1 of 3 requests "
            f"are used, 2 are reserved for them, and this call needs 1. Call again in {left_s:.0f} s: what has "
            "not ended by then counts as used."
        )
        assert refusal.retryable
        assert refusal.detail == {
            "budget": "session_requests" if options.session_requests else "project_day_requests",
            "limit": 3,
            "used": 1,
            "reserved": 2,
            "needed": 1,
            "retry_after_s": left_s,
        }
        await asyncio.sleep(left_s)
        began = world.clock()
        assert not await second.call()
        assert world.clock() - began < 1
        assert "3 of 3 requests are used or reserved" in world.refusals[-1][1].message
        for record in await world.close():
            assert (record.used.requests, record.lost.requests, record.open) == (1, 2, {})
        assert world.sent == 1

    run_virtually(work())


@pytest.mark.parametrize("running_s", [1, 9])
@requirement("budgets.exact")
def test_a_call_gets_what_a_request_of_another_replica_frees_while_it_waits(running_s: int) -> None:
    async def work() -> None:
        world = World(BudgetOptions(session_requests=1))
        first, second = world.pod(), world.pod()
        accounts: Any = first.budgets.accounts_of(CALLER)
        reservation = await accounts.reserve(1, Deadline.after(30))
        call = asyncio.create_task(second.call())
        await asyncio.sleep(running_s)
        reservation.release()
        assert await call
        await world.close()

    run_virtually(work())


async def _search(tools: JinaBackend, query: str = "x") -> ToolOutput:
    given = {"query": query}
    arguments = Arguments(given, frozenset(given), {}, SecretStr("a-key-of-the-test"), "session")
    call = call_within(tools.call_memory("proj"))
    return await tools.run(definition({"mode": "search"}), arguments, Deadline.after(30), call)


class _NoPermitAtFirst(Unlimited):
    def __init__(self) -> None:
        self.refused = 0

    async def acquire(self, wanted: PermitRequest) -> Permit:
        if not self.refused:
            self.refused += 1
            raise RateLimited("no permit in time")
        return await super().acquire(wanted)


@requirement("budgets.exact")
def test_a_request_that_gets_no_permit_takes_nothing_of_the_budget() -> None:
    async def work() -> None:
        world = World(BudgetOptions(session_requests=1))
        client = JinaClient(SentByMock(lambda _: httpx.Response(200, json={"code": 200, "data": []})), 100_000)
        options = JinaBackendOptions(RetryOptions(0), CacheOptions(), ToolOptions(), UrlPolicy(), EgressOptions())
        tools = JinaBackend(client, options, permits=_NoPermitAtFirst(), budgets=world.pod().budgets)
        with pytest.raises(RateLimited):
            await _search(tools)
        assert (await _search(tools)).usage.requests == 1
        with pytest.raises(BudgetExceeded):
            await _search(tools, "another question")
        await world.close()

    run_virtually(work())


@pytest.mark.parametrize("waits", [False, True], ids=["is refused", "waits and is cancelled"])
@requirement("budgets.exact")
def test_a_request_that_gets_no_connection_takes_nothing_of_budget_and_limit(waits: bool) -> None:  # noqa: FBT001
    async def connect(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1 if waits else 0)
        raise httpx.ConnectError("no connection")

    async def work() -> None:
        world = World(BudgetOptions(session_requests=1))
        permits = _RecordedPermits()
        options = JinaBackendOptions(RetryOptions(1), CacheOptions(), ToolOptions(), UrlPolicy(), EgressOptions())
        client = JinaClient(httpx.MockTransport(connect), 100_000)  # tells of no connection
        tools = JinaBackend(client, options, permits=permits, budgets=world.pod().budgets)
        searching = asyncio.create_task(_search(tools))
        if waits:
            await asyncio.sleep(0.5)
            searching.cancel()
            await asyncio.wait([searching])
        else:
            with pytest.raises(UpstreamUnavailable) as failed:
                await searching
            assert failed.value.requests == 0
        assert permits.ends == ["unsent"] * (1 if waits else 2)
        [record] = await world.close()
        assert (record.used.requests, record.lost.requests, record.open) == (0, 0, {})

    run_virtually(work())


class _Recorded(Permit):
    __slots__ = ("ends",)

    def __init__(self, wanted: PermitRequest, ends: list[str]) -> None:
        super().__init__(wanted.variable, wanted.key)
        self.ends = ends

    def done(self, tokens: int) -> None:
        self.ends.append(f"done for {tokens}")

    def failed(self, error: ToolError) -> int:
        self.ends.append(f"failed with {error.http_status}")
        return 0

    def cancelled(self) -> None:
        self.ends.append("cancelled")

    def unsent(self) -> None:
        self.ends.append("unsent")


@dataclass
class _RecordedPermits:
    ends: list[str] = field(default_factory=list)

    async def acquire(self, wanted: PermitRequest) -> Permit:
        return _Recorded(wanted, self.ends)


@requirement("limits.window")
def test_each_attempt_ends_its_permit_once_also_if_it_is_cancelled() -> None:
    """A busy upstream, then a success, and a call that is cancelled before its response."""
    statuses = [503, 200]

    async def serve(_: httpx.Request) -> httpx.Response:
        if not statuses:
            await asyncio.Event().wait()
        return httpx.Response(statuses.pop(0), json={"code": 200, "data": [], "meta": {"usage": {"tokens": 10}}})

    async def work() -> None:
        permits = _RecordedPermits()
        options = JinaBackendOptions(RetryOptions(1), CacheOptions(0), ToolOptions(), UrlPolicy(), EgressOptions())
        tools = JinaBackend(JinaClient(SentByMock(serve), 100_000), options, permits=permits)
        await _search(tools)
        hanging = asyncio.create_task(_search(tools))
        await iterate_loop(20)
        hanging.cancel()
        await asyncio.wait([hanging])
        assert permits.ends == ["failed with 503", "done for 10", "cancelled"]

    run_virtually(work())


@requirement("budgets.reservations")
def test_without_the_store_the_last_known_state_applies_and_uses_are_reported_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def work() -> None:
        world = World()
        pods = [world.pod() for _ in range(3)]
        for pod in pods:
            assert await pod.call()
        await asyncio.sleep(10)
        world.down = True
        await asyncio.gather(*(pod.call() for pod in pods * LIMIT))
        assert 0.8 * LIMIT < world.sent <= LIMIT  # each replica rounds its part of the rest down
        assert all(pod.budgets.outage() == "NATS: no answer" for pod in pods)
        world.down = False
        await asyncio.sleep(10)
        assert not any(pod.budgets.outage() for pod in pods)
        before = world.sent
        done = [await pod.call() for pod in pods * LIMIT]
        [record] = await world.close()
        assert before + done.count(True) == world.sent == record.used.requests == LIMIT

    run_virtually(work())
    actions = [getattr(line, "action", "") for line in caplog.records]
    assert (actions.count("budgets.not_shared"), actions.count("budgets.shared")) == (3, 3)


@requirement("budgets.calls")
def test_a_daily_budget_renews_and_each_refusal_contains_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        world = World(BudgetOptions(agent_day_requests=5, time_zone="Europe/Berlin"))
        pods = [world.pod(), world.pod()]
        assert [await pods[number % 2].call() for number in range(7)] == [True] * 5 + [False] * 2
        (_, refusal), _ = world.refusals
        assert refusal.message == (
            "The budget of this agent for today does not cover this call, so nothing was sent: 5 of 5 requests are "
            "used or reserved, and it needs 1. It renews at 2030-03-18T00:00:00+01:00. Do not call again before that; "
            "continue with what you have."
        )
        assert refusal.detail == {
            "budget": "agent_day_requests",
            "limit": 5,
            "used": 5,
            "needed": 1,
            "renews_at": "2030-03-18T00:00:00+01:00",
        }
        world.skipped_s = 86_400
        await asyncio.sleep(30)
        assert await pods[0].call()
        assert len(pods[0].budgets._accounts) == 1  # noqa: SLF001 - the account of the day before is dropped
        await world.close()

    run_virtually(work())
    actions = [getattr(line, "action", "") for line in caplog.records]
    assert (actions.count("budget.low"), actions.count("budget.exceeded")) == (1, 2)
    (low,) = (line.getMessage() for line in caplog.records if getattr(line, "action", "") == "budget.low")
    assert low == "80 % of the budget agent_day_requests of project proj are used"


@requirement("budgets.calls")
def test_the_budget_of_a_definition_applies_to_its_own_calls_only(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        world = World(BudgetOptions(session_requests=4))
        pod = world.pod()
        lower = Spender("proj", "agent", "session", "expensive", BudgetLimits(session_requests=2))
        assert [await pod.call(lower) for _ in range(3)] == [True, True, False]
        assert [await pod.call() for _ in range(3)] == [True, True, False]
        assert await pod.call(Spender("v1r3 proj", "agent", "session", "tool"))
        await world.close()

    run_virtually(work())
    messages = {line.getMessage() for line in caplog.records}
    assert "80 % of the budget session_requests for the tool expensive of project proj are used" in messages
    assert "the budget session_requests for the tool expensive of project proj is used up" in messages


INVALID_RECORDS = (
    *(b"hello", b"[]", b'{"version": 9}', b'{"version":2,"used":[1e30,0]}', b'{"version":1,"used":[0,0],"shares":{}}'),
    *(b'{"version":2,"used":[9007199254740993,0]}', b'{"version":2,"used":[-1000,-1000]}'),
    *(b'{"version":2,"used":[true,0]}', b"{}", b'{"version":2}', b'{"used":[0,0]}', b'{"version":2,"used":[0]}'),
    *(b'{"version":2,"used":[0,0],"open":{"a":{}}}', b'{"version":2,"used":[0,0],"lost":[1]}'),
    *(b'{"version":2,"used":[9,0],"open":{"a":[%s,1900000300]}}' % forged for forged in (b"-1000,0", b"0,-1000")),
)


@requirement("budgets.exact")
def test_an_unreadable_record_is_replaced_by_the_last_known_one(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        world = World(BudgetOptions(session_requests=len(INVALID_RECORDS) + 1))
        pod = world.pod()
        assert await pod.call()
        await asyncio.sleep(30)
        (name,) = (name for name, (_, value) in world.records.items() if b"used" in value)
        for odd in INVALID_RECORDS:
            revision = world.records[name][0] + 1
            world.records[name] = revision, odd
            pod.budgets.on_change(name, Stored(odd, revision))
            assert await pod.call(), odd
            await asyncio.sleep(30)
        assert not await pod.call()
        (record,) = await world.close()
        assert record.used.requests == len(INVALID_RECORDS) + 1

    run_virtually(work())
    assert [line.levelname for line in caplog.records if getattr(line, "action", "") == "budget.unreadable"] == [
        "WARNING"
    ]


@requirement("budgets.exact")
def test_a_damaged_record_that_no_replica_remembers_begins_anew_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        world = World(BudgetOptions(session_requests=2))
        assert await world.pod().call()
        await asyncio.sleep(30)
        (name,) = (name for name, (_, value) in world.records.items() if b"used" in value)
        world.records[name] = world.records[name][0] + 1, b'{"version":3}'
        later = world.pod()
        assert [await later.call() for _ in range(3)] == [True, True, False]
        (record,) = await world.close()
        assert record.used.requests == 2

    run_virtually(work())
    (line,) = (line for line in caplog.records if getattr(line, "action", "") == "budget.unreadable")
    assert line.levelname == "ERROR"
    assert line.getMessage().endswith("this replica remembers none of its uses, so its count begins anew at zero")


@requirement("budgets.exact")
def test_limits_that_change_during_a_call_leave_nothing_reserved() -> None:
    async def work() -> None:
        world = World(BudgetOptions())
        budgets = world.pod().budgets
        requests = BudgetLimits(agent_day_requests=100)
        both = BudgetLimits(agent_day_requests=100, agent_day_tokens=50_000)

        async def call(before: BudgetLimits, after: BudgetLimits) -> None:
            accounts = budgets.accounts_of(CALLER._replace(tool_limits=before))
            assert accounts is not None
            reservation = await accounts.reserve(10_000, Deadline.after(5))
            budgets.accounts_of(CALLER._replace(tool_limits=after))
            reservation.charge(10_000)

        for before, after in ((requests, both), (both, requests), (requests, both)):
            await call(before, after)
        await call(both, both)
        await call(both, both)
        with pytest.raises(BudgetExceeded):
            await call(both, both)
        [record] = await world.close()
        assert record.open == {}

    run_virtually(work())


@pytest.mark.parametrize("ahead_s", [3_600.0, -3_600.0])
@requirement("budgets.reservations", "budgets.exact")
def test_a_request_is_charged_once_although_the_clock_of_a_replica_is_wrong(ahead_s: float) -> None:
    async def work() -> None:
        world = World()
        first, second = world.pod(), world.pod()
        second.budgets.clock = lambda: world.clock() + ahead_s
        charge: Any = first.budgets.accounts_of(CALLER)
        reservation = await charge.reserve(1, Deadline.after(30))
        for _ in range(5):
            assert await second.call()
            assert await first.call()
            await asyncio.sleep(1)
        reservation.charge(5)
        await asyncio.sleep(1)
        [record] = await world.close()
        assert record.used.requests + record.lost.requests == 11
        assert record.open == {}

    run_virtually(work())


@requirement("budgets.reservations", "budgets.exact")
def test_after_an_outage_any_number_of_uses_is_reported_while_calls_go_on() -> None:
    """All at once would make a record that the store refuses, and the outage would not end."""

    async def work() -> None:
        world = World(BudgetOptions(project_day_requests=1_000_000))
        pods = [world.pod() for _ in range(2)]
        assert [await pod.call() for pod in pods] == [True, True]
        world.down = True
        await asyncio.gather(*(pod.call() for pod in pods * 10_000))
        assert world.sent == 20_002
        world.down = False
        for _ in range(10):
            await asyncio.sleep(1)
            await asyncio.gather(*(pod.call() for pod in pods * 50))
        assert not any(pod.budgets.outage() for pod in pods)
        [record] = await world.close()
        assert (record.used.requests, record.lost.requests, record.open) == (world.sent, 0, {})

    run_virtually(work())


@requirement("budgets.calls")
def test_an_estimate_is_the_mean_of_the_tool_and_a_nearly_used_budget_is_reported() -> None:
    async def work() -> None:
        world = World(BudgetOptions(project_month_tokens=1_000, session_requests=50))
        pod = world.pod()
        accounts: Any = pod.budgets.accounts_of(CALLER)
        assert accounts.note == ""
        for tokens in (400, 500):
            reservation = await accounts.reserve(1, Deadline.after(1))
            reservation.charge(tokens)
            accounts.learn_cost(tokens)
        assert accounts.left() == {
            "session": {"requests": 50, "requests_left": 48},
            "project_month": {"tokens": 1_000, "tokens_left": 100, "renews_at": "2030-04-01T00:00:00+00:00"},
        }
        assert accounts.note == (
            "\n\n[The budget of this project for this month is nearly used up: 100 of 1,000 tokens are left; it renews "
            "at 2030-04-01T00:00:00+00:00.]"
        )
        with pytest.raises(BudgetExceeded, match="900 of 1,000 tokens are used or reserved, and it needs 420"):
            await accounts.reserve(1, Deadline.after(1))
        other: Any = pod.budgets.accounts_of(Spender("proj", "agent", "session", "cheap"))
        (await other.reserve(1, Deadline.after(1))).release()
        assert accounts.left()["session"]["requests_left"] == 48
        await world.close()

    run_virtually(work())


@requirement("budgets.calls")
def test_a_scrape_reads_a_bounded_number_of_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be 20,000 accounts; the most used one is among those that are read."""
    read = 0
    fraction = Account.used_fraction

    def counted(account: Account) -> float:
        nonlocal read
        read += 1
        found: float = fraction.__get__(account)
        return found

    async def work() -> None:
        nonlocal read
        world = World(BudgetOptions(session_requests=10))
        pod = world.pod()
        sessions = [CALLER._replace(session=str(number)) for number in range(600)]
        for session in [*sessions, *[sessions[7]] * 9]:
            await pod.call(session)
        monkeypatch.setattr(Account, "used_fraction", property(counted))
        read = 0
        assert pod.budgets.largest_used_fraction("session") == 1.0
        assert read <= 200
        shown = pod.budgets.snapshot()
        assert (len(shown), shown[0]["requests_left"]) == (100, 0)
        assert read <= 500
        await world.close()

    run_virtually(work())


@requirement("hostile.neighbour")
def test_sessions_that_are_refused_from_the_start_leave_no_record() -> None:
    """A caller may choose any number of sessions at no cost, and all projects share the store."""

    async def work() -> None:
        world = World(BudgetOptions(session_requests=0))
        pod = world.pod()
        for number in range(50):
            assert not await pod.call(Spender("proj", "agent", f"session {number}", "tool"))
        assert all(account.is_quiet for account in pod.budgets._accounts.values())  # noqa: SLF001
        assert await world.close() == []

    run_virtually(work())


@requirement("hostile.neighbour")
def test_an_account_that_is_dropped_before_its_call_reserves_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "_MAX_ACCOUNTS", 0)

    async def work() -> None:
        world = World()
        pod = world.pod()
        accounts: Any = pod.budgets.accounts_of(CALLER)
        await asyncio.sleep(3)
        assert not pod.budgets._accounts  # noqa: SLF001
        (await accounts.reserve(1, Deadline.after(1))).charge(0)
        [record] = await world.close()
        assert record.used.requests == 1

    run_virtually(work())


@requirement("budgets.exact", "hostile.neighbour")
def test_calls_of_an_account_that_is_dropped_between_them_count_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "_MAX_ACCOUNTS", 0)

    async def work() -> None:
        world = World()
        pod = world.pod()
        earlier: Any = pod.budgets.accounts_of(CALLER)
        await asyncio.sleep(3)
        assert not pod.budgets._accounts  # noqa: SLF001
        later: Any = pod.budgets.accounts_of(CALLER)
        reservations = [await charge.reserve(1, Deadline.after(10)) for charge in (earlier, later, earlier, later)]
        for reservation in reservations:
            reservation.charge(0)
        [record] = await world.close()
        assert (record.used.requests, record.lost.requests, record.open) == (4, 0, {})

    run_virtually(work())


HANG = 3_600.0
TOKENS = 7
LARGE_CHARS = 70_000


@dataclass(frozen=True)
class Answer:
    """Outcome of an upstream request, and its delay in milliseconds."""

    kind: str
    after_ms: float = 0


@dataclass(frozen=True)
class Call:
    """Call that reads these pages; it begins after `begins_ms`, and its time is limited."""

    begins_ms: int
    pages: tuple[int, ...]
    limit_ms: int | None = None
    batch: bool = False
    fresh: bool = False


class Upstream:
    """Upstream that gives these answers in the order of requests, and counts requests and tokens."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers, self.seen, self.tokens = list(answers), 0, 0

    async def handle(self, _: httpx.Request) -> httpx.Response:
        answer = self.answers[self.seen % len(self.answers)]
        self.seen += 1
        await asyncio.sleep(HANG if answer.kind == "hang" else answer.after_ms / 1000)
        match answer.kind:
            case "busy":
                return httpx.Response(503)
            case "refused":
                return httpx.Response(422, content=b"{}")
            case "dropped":
                raise httpx.ReadError("dropped")
            case "defect":
                raise LookupError("a defect")
        content = "x" * (LARGE_CHARS if answer.kind == "large" else 4)
        page = {"url": "https://a.example/", "content": content, "usage": {"tokens": TOKENS}}
        return httpx.Response(200, content=json.dumps({"code": 200, "data": page, "meta": {}}).encode())


def record(call: Call) -> tuple[DefinitionRecord, dict[str, Any]]:
    """Return definition and arguments of a call."""
    jina: dict[str, Any] = {"mode": "reader", "timeout_s": (call.limit_ms or 20_000) / 1000}
    urls = [f"https://a.example/{page}" for page in call.pages]
    if call.batch:
        jina["tool"] = "jina.read_many"
    if call.fresh:
        jina["params"] = {"noCache": True}
    return DefinitionRecord("jina_search", None, {}, {"jina": jina}), {"urls": urls} if call.batch else {"url": urls[0]}


async def play(calls: Sequence[Call], answers: Sequence[Answer], cache_ttl_s: float) -> None:
    """Run calls of one agent through pipeline and tools; assert that usage and memory are exact."""
    upstream = Upstream(answers)
    options = JinaBackendOptions(
        RetryOptions(2, 0.01, 0.02),
        CacheOptions(cache_ttl_s, 100_000),
        ToolOptions(),
        UrlPolicy(),
        EgressOptions(max_response_bytes=100_000, body_budget_bytes=max_call_memory(100_000) + 10 * LARGE_CHARS),
    )
    scene = Scene(tools=JinaBackend(JinaClient(SentByMock(upstream.handle), 100_000), options), concurrency=100)
    whole = scene.tools.semaphore.free_bytes
    scene.kernel.calls = {f"call-{number}": record(call) for number, call in enumerate(calls, start=1)}

    async def place(number: int, call: Call) -> None:
        await asyncio.sleep(call.begins_ms / 1000)
        await asyncio.wait([scene.deliver(number)])

    await asyncio.gather(*(place(number, call) for number, call in enumerate(calls, start=1)))
    cards = scene.kernel.committed
    assert len(cards) == len(calls)
    await iterate_loop()
    assert scene.tools.semaphore.free_bytes == whole
    usages = [_usage(card.metadata) for card in cards]
    assert sum(usage["requests"] for usage in usages) == upstream.seen, [card.content for card in cards]


def _usage(metadata: dict[str, Any]) -> dict[str, int]:
    usage: dict[str, int] = metadata["tool_output"]["usage"]
    return usage


answer_mixes = st.lists(
    st.builds(
        Answer,
        st.sampled_from(["success", "large", "large", "busy", "refused", "dropped", "defect", "hang"]),
        st.sampled_from([0, 5, 30, 100]),
    ),
    min_size=1,
    max_size=6,
)
call_mixes = st.lists(
    st.builds(
        Call,
        st.sampled_from([0, 0, 1, 5, 30, 60]),
        st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
        st.sampled_from([None, 5, 30, 31, 60]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@requirement("usage.exact", "memory.limit")
@given(calls=call_mixes, answers=answer_mixes, cache_ttl_s=st.sampled_from([0, 60]))
@example([Call(0, (0,), limit_ms=30)], [Answer("hang")], 60)
@example(
    [
        Call(0, (2, 1, 0, 1), limit_ms=31, batch=True),
        Call(0, (2, 1, 0, 1), limit_ms=60),
        Call(1, (1, 2, 2), limit_ms=31, batch=True),
        Call(1, (0, 2, 0, 2), batch=True),
        Call(5, (2, 1, 0, 1), limit_ms=31, batch=True),
        Call(0, (2, 1), fresh=True),
    ],
    [Answer("large"), Answer("defect", 5), Answer("large", 30), Answer("refused", 100), Answer("dropped", 100)],
    60,
)
def test_every_request_is_in_exactly_one_result(calls: list[Call], answers: list[Answer], cache_ttl_s: float) -> None:
    run_virtually(play(calls, answers, cache_ttl_s))


MIXES = {
    "too late": ([Call(0, (0,), limit_ms=5)], [Answer("hang")]),
    "too late in a batch": ([Call(0, (0, 1, 2), limit_ms=5, batch=True)], [Answer("success"), Answer("hang")]),
    "a failure that is shared": ([Call(0, (0,)), Call(0, (0,)), Call(0, (0, 1), batch=True)], [Answer("refused", 2)]),
    "a page that batches share": (
        [Call(0, (0, 1), batch=True), Call(0, (0, 1), batch=True)],
        [Answer("refused", 2), Answer("success", 2)],
    ),
    "the first times out": ([Call(0, (0,), limit_ms=5), Call(1, (0,))], [Answer("success", 20)]),
    "a defect cancels its siblings": ([Call(0, (0, 1, 2), batch=True)], [Answer("hang"), Answer("defect", 2)]),
    "retries": ([Call(0, (0,)), Call(1, (0,))], [Answer("busy"), Answer("dropped"), Answer("success")]),
}


@pytest.mark.parametrize("mix", MIXES)
@requirement("usage.exact", "memory.limit")
def test_every_request_is_in_exactly_one_result_on_each_loop(mix: str, run: Run) -> None:
    run(play(*MIXES[mix], 60))


@requirement("hostile.neighbour")
def test_memory_of_a_call_is_accounted_to_its_project() -> None:
    async def call() -> None:
        scene = Scene()
        await scene.ended(scene.deliver())
        assert scene.tools.projects == ["proj"]

    asyncio.run(call())
