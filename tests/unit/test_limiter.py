"""The rate limiter of several replicas."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from datetime import datetime
from typing import Any

import orjson
import pytest

from openapi_tool.cli.budgets import used_accounts
from openapi_tool.fair_queue import project_key
from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.jina.failures import key_failure, upstream_failure
from openapi_tool.options.budgets import BudgetLimits, BudgetOptions, time_zone
from openapi_tool.protocol.errors import RateLimited
from openapi_tool.protocol.projects import AgentKey
from openapi_tool.quotas import limit_record
from openapi_tool.quotas.account_record import unused
from openapi_tool.quotas.amounts import Amount, Attempt
from openapi_tool.quotas.learned_limit import LEARNED_S
from openapi_tool.quotas.limit_record import MAX_REPLICAS, LimitRecord, Recovery, Replica, ReportedCalls, parse
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.quotas.options import KeyLimits, LimitOptions
from openapi_tool.quotas.periods import Periods
from openapi_tool.quotas.permits import Permit, PermitRequest
from openapi_tool.quotas.rates import Rates
from openapi_tool.quotas.shared_record import encode
from openapi_tool.state.nats_kv import MAX_VALUE_BYTES
from openapi_tool.state.port import Stored
from openapi_tool.tools.deadlines import Deadline
from tests.requirements import requirement
from tests.unit.test_limits import Replicas, refusal, replicas
from tests.waiting import WAIT_S, until

RECORD = "limit.A.search"


@requirement("limits.shared")
async def test_a_request_of_millions_of_tokens_does_not_stop_all_later_ones() -> None:
    async with replicas(1, LimitOptions(search_tokens_per_minute=200_000)) as world:
        [limiter] = world.limiters
        for wait_s, tokens in ((0, 10_000), (10, 2_000_000), (70, 10_000), (10, 10_000), (10, 10_000)):
            world.now += wait_s
            (await world.permit(limiter)).done(tokens)


@pytest.mark.parametrize(
    "torn", [{"replicas": {"x": ["a"]}}, {"requests": {"used": {"9": 1e308}, "paced": 0}}, {"version": 2}]
)
@requirement("limits.window")
async def test_a_record_that_is_damaged_or_of_another_version_stops_no_call(
    torn: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(2, LimitOptions(search_requests_per_minute=60)) as world:
        for limiter in world.limiters:
            (await world.permit(limiter)).done(1)
        world.put(RECORD, orjson.dumps(orjson.loads(world.records[RECORD][1]) | torn))
        world.now += 10
        for limiter in world.limiters:
            (await world.permit(limiter)).done(1)
    assert "limits.unreadable" in [getattr(record, "action", None) for record in caplog.records]


@requirement("limits.shared", "budgets.reservations")
def test_the_fullest_record_fits_into_its_bucket() -> None:
    now, names = 1_900_000_000.123, [f"{number:010x}" for number in range(MAX_REPLICAS)]
    for count in (1, 50, MAX_REPLICAS):
        limit, rates = LimitRecord(), Rates(5_000, 1_000_000, 5_000)
        for name in names[:count]:
            waiting = {project_key(f"{name} {at}"): ReportedCalls(1_000, now) for at in range(min(20, 1_000 // count))}
            limit.replicas[name] = Replica(seen=now, waiting=waiting, counted=now)
        limit.recovery = Recovery(until=now, missing=names[:count], requests=5_000, tokens=1_000_000)
        account = unused({"scope": "session", "project": "x" * 255, "who": "x" * 255, "tool": "x" * 255})
        account.replicas = dict.fromkeys(names[:count], now)
        while limit.room or account.room:
            number = limit.room + account.room
            attempt = Attempt(f"{names[0]}.ffff{number:x}", now - number / 100, Amount(1, 1_000_000), now, f"p{number}")
            if limit.room:
                limit.reserve(attempt, rates)
                limit.turns.serve(project_key(attempt.project), 1 / 3)
            if account.room:
                account.reserve(attempt)
        assert len(encode(limit)) < MAX_VALUE_BYTES
        assert len(encode(account)) < MAX_VALUE_BYTES


@requirement("limits.window")
async def test_a_forged_change_with_a_huge_revision_holds_calls_back_for_seconds_only() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=60)) as world:
        [limiter] = world.limiters
        (await world.permit(limiter)).done(1)
        forged = orjson.dumps(orjson.loads(world.records[RECORD][1]) | {"paused_until": 9e11})
        limiter.on_change(RECORD, Stored(forged, 10**18))
        with pytest.raises(RateLimited, match=r"Call again in 1?[0-9]?[0-9] s"):
            await world.permit(limiter)
        world.now += 25  # longer than the interval of reports
        await asyncio.sleep(0.6)
        (await world.permit(limiter)).done(1)


def forge(world: Replicas, part: dict[str, object]) -> None:
    """Replace parts of the stored record, and notify all replicas."""
    world.put(RECORD, orjson.dumps(orjson.loads(world.records[RECORD][1]) | part))


IN_2096 = 4_000_000_000
WAITING = {"seen": IN_2096, "waiting": {"p": [1_000_000, 0]}}


FORGED: list[dict[str, object]] = [
    {"requests": {"used": {}, "credit": -1e15, "paced": 1e12}},
    {"requests": {"used": {str(2 * IN_2096): 1_000_000}, "paced": 0}},
    {"replicas": {"forged": WAITING}},
    {"turns": {"time": 1e15, "ends": {"p": 1e15}}},
    {"open": {"forged.1": [0, 0, 1e12]}},
    {"recovery": {"until": 1e12, "missing": ["x"], "requests": 0, "tokens": 0}},
    {"learned": {"limit": 10, "changed": 1e12, "until": 1e12}},
]


@requirement("limits.window")
async def test_a_forged_record_holds_calls_back_for_minutes_only() -> None:
    async def held_back_by(part: dict[str, object]) -> None:
        async with replicas(2, LimitOptions(search_requests_per_minute=60, search_concurrent=5)) as world:
            for limiter in world.limiters:
                (await world.permit(limiter)).done(1)
            forge(world, part)
            for _ in range(7):
                world.now += 21  # longer than the interval of reports
                await asyncio.sleep(0.3)
            for limiter in world.limiters * 4:
                (await world.permit(limiter)).done(1)

    await asyncio.gather(*map(held_back_by, FORGED))


@requirement("limits.shared")
async def test_a_forged_limit_of_a_key_without_one_ends_after_an_hour() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        permit = await world.permit(limiter)
        permit.failed(refusal(42901))
        await asyncio.sleep(0.1)
        forge(world, {"learned": {"limit": 10, "changed": 1e12, "until": 1e12}})
        world.now += 21
        await asyncio.sleep(0.3)
        assert limiter.snapshot()[0]["found_by_429"]
        world.now += LEARNED_S
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
        record = parse(world.records[RECORD][1])
        assert record is not None
        assert record.paused_until >= world.now + 29, "shared once the store is back"
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

        world.write = slow  # type: ignore[method-assign, assignment]
        later = asyncio.create_task(world.permit(limiter))
        async with asyncio.timeout(WAIT_S):
            await writing.wait()
        error = refusal(42901)
        error.retry_after = 90
        permit.failed(error)
        end_first.set()
        await asyncio.sleep(0.1)  # the first write is confirmed; that of the pause is under way
        paused_s = limiter.snapshot()[0]["paused_s"]
        end_second.set()
        assert paused_s > 80
        (await later).done(1)


@requirement("limits.window")
async def test_a_defect_of_the_limiter_is_logged_and_later_calls_get_permits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    real, broken = LimitRecord.reserve, [True]

    def broken_once(*given: Any) -> None:
        if broken:
            broken.pop()
            raise TypeError("a defect")
        real(*given)

    monkeypatch.setattr(LimitRecord, "reserve", broken_once)
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
    async with replicas(1, LimitOptions(search_requests_per_minute=1)) as world:
        [limiter] = world.limiters
        permit = await world.permit(limiter)
        world.now += 5
        permit.connected()
        permit.done(1)
        world.now += 57  # 62 s since the permit, 57 s since the request
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
    world = Replicas(LimitOptions(search_requests_per_minute=60, max_wait_share=1))
    limiter = Limiter("r", world.options, world, lambda: world.now, key_failure, {"heavy": 3.0})
    world.limiters.append(limiter)
    world.use({"A": "first value"})
    served: Counter[str] = Counter()

    async def call(project: str) -> None:
        wanted = PermitRequest("A", "search", AgentKey(project, "a"), Deadline.after(30), world.secrets("A"))
        (await limiter.acquire(wanted)).done(1)
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
            wanted = PermitRequest("A", "search", AgentKey(project, "a"), Deadline.after(30), world.secrets("A"))
            return asyncio.create_task(limiter.acquire(wanted))

        quiet = await acquire("quiet")
        quiet.done(1)
        slow = [acquire("slow") for _ in range(20)]
        await until(lambda: sum(task.done() for task in slow) >= 7)
        await asyncio.sleep(0.3)
        granted = [task for task in slow if task.done()]
        assert len(granted) == 7
        quiet = await asyncio.wait_for(acquire("quiet"), WAIT_S)
        quiet.done(1)
        granted[0].result().done(1)
        await until(lambda: sum(task.done() for task in slow) >= 8)
        await asyncio.sleep(0.3)
        assert sum(task.done() for task in slow) == 8, "one ended, one began"
        for task in slow:
            task.cancel()


@requirement("limits.shared", "hostile.neighbour")
async def test_a_project_that_has_its_share_elsewhere_delays_no_request_of_another() -> None:
    """Its turn is next, as the other one has sent more, but it may hold no more concurrent requests."""
    async with replicas(2, LimitOptions(search_concurrent=8)) as world:
        here, elsewhere = world.limiters

        def acquire(limiter: Limiter, project: str) -> asyncio.Task[Permit]:
            wanted = PermitRequest("A", "search", AgentKey(project, "a"), Deadline.after(30), world.secrets("A"))
            return asyncio.create_task(limiter.acquire(wanted))

        for _ in range(20):
            (await acquire(elsewhere, "quick")).done(1)
        slow = [acquire(elsewhere, "slow") for _ in range(10)]
        await until(lambda: sum(task.done() for task in slow) >= 7)
        for _ in range(5):
            (await asyncio.wait_for(acquire(here, "quick"), WAIT_S)).done(1)
        assert sum(task.done() for task in slow) == 7
        for task in slow:
            task.cancel()


@requirement("limits.shared")
async def test_one_project_alone_uses_all_concurrent_requests() -> None:
    async with replicas(1, LimitOptions(search_concurrent=8)) as world:
        [limiter] = world.limiters
        permits = [await world.permit(limiter) for _ in range(8)]
        assert limiter.snapshot()[0]["running"] == len(permits)


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
    assert used_accounts(replicas) == [{**one, "share": 0.3}]
    assert used_accounts(replicas, "q") == []


@pytest.mark.parametrize("tokens", [30_000, 90_000, 300_000])
@requirement("limits.waiting", "limits.shared", "hostile.neighbour")
async def test_large_requests_of_one_project_leave_tokens_to_another(tokens: int) -> None:
    async with replicas(1, LimitOptions(reader_tokens_per_minute=100_000, max_wait_share=1)) as world:
        [limiter] = world.limiters
        served: Counter[str] = Counter()

        async def call(project: str, cost: int) -> None:
            wanted = PermitRequest("A", "reader", AgentKey(project, "a"), Deadline.after(28), world.secrets("A"))
            with suppress(RateLimited):
                permit = await limiter.acquire(wanted)
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
            for one in limiter._limits.values():  # noqa: SLF001
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
                for one in limiter._limits.values():  # noqa: SLF001
                    one.wake()
        for waiting in calls:
            waiting.cancel()
        await asyncio.wait(calls)
    assert len(refused) <= 80
    assert len(calls) - len(refused) >= 150


@requirement("limits.plans")
def test_a_plan_sets_the_limits_that_are_not_set_otherwise() -> None:
    options = LimitOptions(plan="free", search_requests_per_minute=60, keys={"B": KeyLimits(plan="premium")})
    assert options.of("A") == KeyLimits(search_requests_per_minute=60, reader_requests_per_minute=500)
    assert options.of("b") == KeyLimits(search_requests_per_minute=1_000, reader_requests_per_minute=5_000)
    assert LimitOptions().of("A") == KeyLimits()


@requirement("limits.plans")
async def test_a_dry_run_counts_requests_above_the_limit_and_holds_none_back() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=2, dry_run=True)) as world:
        [limiter] = world.limiters
        for _ in range(5):
            (await world.permit(limiter)).done(1)
        [shown] = limiter.snapshot()
        assert (shown["used"], shown["would_have_waited"], shown["refused"], shown["dry_run"]) == (5, 4, 0, True)


@requirement("limits.waiting", "cli.limits")
async def test_a_dry_run_holds_no_call_back_although_its_record_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_record, "MAX_ENTRIES", 4)
    async with replicas(1, LimitOptions(search_requests_per_minute=60, dry_run=True)) as world:
        [limiter] = world.limiters
        permits = [await world.permit(limiter) for _ in range(20)]
        record = parse(world.records[RECORD][1])
        assert record is not None
        assert len(record.open) + len(record.replicas) == 4
        for permit in permits:
            permit.done(1)
        await asyncio.sleep(2)
        record = parse(world.records[RECORD][1])
        assert record is not None
        assert (record.open, record.requests.total(world.now)) == ({}, 20)


@requirement("limits.window")
async def test_a_cheap_first_read_of_a_small_limit_is_followed_by_a_wait_of_its_estimate() -> None:
    async with replicas(1, LimitOptions(reader_tokens_per_minute=20_000)) as world:
        [limiter] = world.limiters
        (await world.permit(limiter, endpoint="reader")).done(500)
        await limiter.aclose()
        with pytest.raises(RateLimited) as refused:
            await world.permit(limiter, endpoint="reader")
        assert refused.value.detail == {"retry_after_s": 30}
        [shown] = limiter.snapshot()
        assert (shown["used_tokens"], shown["estimated_tokens"]) == (500, 8_100)


@requirement("limits.plans")
def test_the_configured_limits_are_known_before_a_key_is_used() -> None:
    options = LimitOptions(plan="free", dry_run=True, keys={"B": KeyLimits(reader_concurrent=2)})
    found = Replicas(options).start().configured()
    search = {"endpoint": "search", "requests_per_minute": 100, "tokens_per_minute": None, "concurrent": None}
    assert found[0] == {"variable": None, **search, "dry_run": True}
    shown = [[limit[name] for name in ("variable", "endpoint", "requests_per_minute", "concurrent")] for limit in found]
    assert list(map(tuple, shown)) == [
        (None, "search", 100, None), (None, "reader", 500, None), ("B", "search", 100, None), ("B", "reader", 500, 2),
    ]  # fmt: skip
    assert Replicas().start().configured() == []


@requirement("limits.waiting")
async def test_a_call_that_would_wait_for_more_than_its_share_of_the_time_is_refused_at_once() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=6)) as world:
        [limiter] = world.limiters
        for _ in range(3):
            (await world.permit(limiter)).done(1)
        with pytest.raises(RateLimited, match="Call again in 10 s"):  # 60 s / 6
            await world.permit(limiter, wait_s=29)
        waiting = asyncio.create_task(world.permit(limiter, wait_s=31))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        world.now += 21  # the burst is paid back at half of the rate
        (await waiting).done(1)


@requirement("limits.learned")
async def test_a_429_of_concurrency_teaches_no_limit_of_requests() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        for _ in range(3):
            permit = await world.permit(limiter)
            error = upstream_failure(429, {"status": 42903, "readableMessage": "Too many concurrent requests"}, "1")
            permit.failed(error)
            await asyncio.sleep(0.1)
            world.now += 2
        assert not any(shown["found_by_429"] for shown in limiter.snapshot())


@requirement("limits.learned", "limits.window")
@pytest.mark.parametrize("first", [LimitOptions(), LimitOptions(search_requests_per_minute=50)], ids=["none", "one"])
async def test_a_permit_that_is_given_back_is_no_request_of_a_limit_that_is_set_later(first: LimitOptions) -> None:
    async with replicas(1, first) as world:
        [limiter] = world.limiters
        for _ in range(5):
            (await world.permit(limiter)).unsent()
        (await world.permit(limiter)).done(1)
        limiter.apply_options(LimitOptions(search_requests_per_minute=60))
        await asyncio.sleep(0.1)
        world.now += 1
        (await world.permit(limiter)).done(1)
        [shown] = limiter.snapshot()
        assert (shown["sent"], shown["used"]) == (2, 2)


@requirement("limits.learned")
async def test_a_learned_limit_is_probed_upwards_by_single_requests() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters

        async def seconds(number: int) -> None:
            for _ in range(number):
                world.now += 1
                await asyncio.sleep(0.002)

        for refused in (True, True):
            for _ in range(10):
                (await world.permit(limiter)).done(1)
            if refused:
                (await world.permit(limiter)).failed(refusal(42903))
                await asyncio.sleep(0.1)
                await seconds(3)
        assert limiter.snapshot()[0]["requests_per_minute"] == 20
        world.now += 181
        calls = [asyncio.create_task(world.permit(limiter, wait_s=300)) for _ in range(30)]
        await asyncio.sleep(0.1)
        assert limiter.snapshot()[0]["requests_per_minute"] == 21
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


@requirement("reload", "limits.window")
async def test_limits_that_are_set_or_removed_later_apply_to_all_that_is_sent_from_then_on() -> None:
    async with replicas(2, LimitOptions()) as world:
        for limiter in (*world.limiters, *world.limiters):
            (await world.permit(limiter)).done(1)
        for limiter in world.limiters:
            limiter.apply_options(LimitOptions(search_requests_per_minute=10))
        await asyncio.sleep(0.1)
        assert [shown["used"] for limiter in world.limiters for shown in limiter.snapshot()] == [4, 4]
        refused = 0
        for number in range(10):
            try:
                (await world.permit(world.limiters[number % 2], wait_s=2)).done(1)
            except RateLimited:
                refused += 1
        assert 4 <= refused <= 6
        for limiter in world.limiters:
            limiter.apply_options(LimitOptions())
        for limiter in world.limiters * 5:
            (await world.permit(limiter)).done(1)


@pytest.mark.parametrize("options", [LimitOptions(), LimitOptions(search_requests_per_minute=1_000_000)])
@requirement("limits.shared")
async def test_the_times_of_requests_are_kept_for_a_minute_only(options: LimitOptions) -> None:
    async with replicas(1, options) as world:
        [limiter] = world.limiters
        for _ in range(300):
            (await world.permit(limiter)).done(1)
            world.now += 1
        [limit] = limiter._limits.values()  # noqa: SLF001 - what it keeps is not shown
        assert limit.sent_in_window() == 60
        assert len(limit._sent) <= 61  # noqa: SLF001
