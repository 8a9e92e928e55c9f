"""Scenarios of `benchmarks.tenants` with faults: limits and budgets beside the double's log and the accounts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import nats
from nats.aio.client import Client
from nats.js.errors import NoKeysError, NotFoundError

from benchmarks.double import MINUTE_S, Behaviour
from benchmarks.harness import DATABASE, Ask, Command, Demand, Outcome, Traffic, place, project_id
from benchmarks.world import CALL_LIMIT_S, OVERLOAD, PREFIX, Figures, Size, World, between
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.nats_records.record_store import BUDGETS
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.quotas.account_record import parse
from openapi_tool.quotas.shared_record import END_MARGIN_S

Act = Callable[[list[ExecutorProcess]], Coroutine[Any, Any, None]]

_REPLICAS, _CONCURRENT = 3, 6
_REQUEST_MS, _SHORT_MS = 1_000, 200
_STOPPED_S, _OUTAGE_S = 8.0, 20.0
_DEADLINE_S = 60
_BUDGET = 100
_KILLS, _CALLS_PER_S = 4, 20.0
_PAGES, _PAGE_BYTES, _PAGE_BUDGET, _BYTES_PER_TOKEN = 12, 11_000_000, 50_000, 5
_LATE_MS, _LATE_LIMIT_S = 30_000, 5
_STATS_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A scenario, and what the double does in it."""

    run: Callable[[World], Awaitable[Figures]]
    behaviour: Callable[[Size], Behaviour]


async def stopped(world: World) -> Figures:
    """Limit of 6 concurrent requests, three replicas, one of which is stopped for 8 s; demand twice the limit."""

    async def stop_one(replicas: list[ExecutorProcess]) -> None:
        await asyncio.sleep(world.size.seconds / 3)
        replicas[-1].signal(signal.SIGSTOP)
        await asyncio.sleep(_STOPPED_S)
        replicas[-1].signal(signal.SIGCONT)

    return await _concurrent(world, {f"{PREFIX}LIMITS__SEARCH_CONCURRENT": str(_CONCURRENT)}, stop_one)


async def concurrency_429(world: World) -> Figures:
    """The double allows 6 concurrent requests, and no limit is configured: no limit of requests may be learned."""
    return await _concurrent(world, {}, None)


async def _concurrent(world: World, settings: Mapping[str, str], act: Act | None) -> Figures:
    seconds, per_second = world.size.seconds, 2 * _CONCURRENT * 1_000 / _REQUEST_MS
    demand = Demand(int(per_second * seconds), per_second, 10)
    settings = {**settings, f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(CALL_LIMIT_S)}
    run = await _served(world, demand, Ask(delay_ms=_REQUEST_MS, projects=10), settings, act)
    allowed = _CONCURRENT * seconds * 1_000 / _REQUEST_MS
    return {
        "used": round(between(run.counted, run.began, run.began + seconds) / allowed, 3),
        "most_at_once": run.counted["most_at_once"],
        "answered_429": run.counted["refused"],
        "at_s": [round(at - run.began, 1) for at in run.counted["refused_at"][:20]],
        "requests": run.counted["requests"],
        "learned": max((limit["requests_per_minute"] or 0 for limit in run.limits), default=0),
        "results": dict(run.results),
    }


async def outage(world: World) -> Figures:
    """NATS is down for 20 s; three replicas hold calls meanwhile, and the demand is three times the limit."""
    size = world.size

    async def stop_nats(replicas: list[ExecutorProcess]) -> None:
        del replicas
        await asyncio.sleep(size.seconds / 3)
        await asyncio.to_thread(world.harness.nats.stop)
        await asyncio.sleep(_OUTAGE_S)
        await asyncio.to_thread(world.harness.nats.start)

    per_second = OVERLOAD * size.limit / MINUTE_S
    settings = {**_limit(size), f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(_DEADLINE_S)}
    demand = Demand(int(per_second * size.seconds), per_second, 10)
    run = await _served(world, demand, Ask(delay_ms=_SHORT_MS, projects=10), settings, stop_nats)
    return _used(run, size) | {"requests": run.counted["requests"], "results": dict(run.results)}


async def overload(world: World) -> Figures:
    """Calls with a deadline of 60 s demand three times the limit."""
    size, per_second = world.size, OVERLOAD * world.size.limit / MINUTE_S
    settings = {**_limit(size), f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(_DEADLINE_S)}
    demand = Demand(int(per_second * size.seconds), per_second, 10, wait=True)
    run = await _served(world, demand, Ask(delay_ms=_SHORT_MS, projects=10), settings)
    served = sorted(run.seconds["success"])
    refused = sorted(run.seconds["rate_limited"])
    return _used(run, size) | {
        "results": dict(run.results),
        "success_p50_s": round(served[len(served) // 2], 2),
        "success_max_s": round(served[-1], 2),
        "refused_p50_s": round(refused[len(refused) // 2], 2) if refused else None,
        "refused_max_s": round(refused[-1], 2) if refused else None,
    }


async def budget(world: World) -> Figures:
    """200 calls of a project whose budget is 100 requests, three replicas, two of which are killed."""

    async def kill_two(replicas: list[ExecutorProcess]) -> None:
        for replica in replicas[:2]:
            await asyncio.sleep(1.0)
            await asyncio.to_thread(replica.process.kill)

    settings = {
        f"{PREFIX}BUDGETS__PROJECT_DAY_REQUESTS": str(_BUDGET),
        f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(CALL_LIMIT_S),
        f"{PREFIX}NATS__ACK_WAIT_S": "3",
    }
    demand = Demand(2 * _BUDGET, 40.0, wait=True)
    run = await _served(world, demand, Ask(delay_ms=_REQUEST_MS), settings, kill_two)
    [account] = run.accounts
    held = [error for error in run.errors if error.get("code") == "budget_exceeded"]
    covered = [
        error["detail"]
        for error in held
        if error["detail"]["used"] + error["detail"].get("reserved", 0) + error["detail"]["needed"] <= _BUDGET
    ]
    return {
        "requests": run.counted["requests"],
        "account": account,
        "results": dict(run.results),
        "refused_for_now": sum("retry_after_s" in error["detail"] for error in held),
        "refused_though_covered": len(covered),
        "unanswered": run.outcome.unanswered(),
    }


async def kills(world: World) -> Figures:
    """Four kills at 20 calls a second; accounts and `usage` once all reservations have ended, beside the double's."""

    async def kill_four(replicas: list[ExecutorProcess]) -> None:
        for number in range(_KILLS):
            await asyncio.sleep(world.size.seconds / (_KILLS + 1))
            replica = replicas[number % len(replicas)]
            await asyncio.to_thread(replica.process.kill)
            await asyncio.to_thread(replica.start)

    names = ("PROJECT_DAY_REQUESTS", "PROJECT_MONTH_REQUESTS", "AGENT_DAY_REQUESTS")
    settings = {
        **{f"{PREFIX}BUDGETS__{name}": "100000" for name in names},
        f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(CALL_LIMIT_S),
        f"{PREFIX}NATS__ACK_WAIT_S": "3",
    }
    demand = Demand(int(_CALLS_PER_S * world.size.seconds), _CALLS_PER_S, wait=True)
    ask = Ask(delay_ms=_REQUEST_MS)
    run = await _served(world, demand, ask, settings, kill_four, settle_s=END_MARGIN_S + CALL_LIMIT_S + 2)
    return {
        "requests": run.counted["requests"],
        "accounts": list(run.accounts),
        "cards": run.requests_of_cards,
        "usage": await _usage(world),
        "results": dict(run.results),
        "unanswered": run.outcome.unanswered(),
    }


async def large_pages(world: World) -> Figures:
    """12 pages of 11 MB, which are too large, with a budget of 50,000 tokens."""
    return await _pages(world, Ask("reader", delay_ms=_SHORT_MS, size=_PAGE_BYTES), CALL_LIMIT_S)


async def late_pages(world: World) -> Figures:
    """12 pages for which the call has not enough time, with the same budget."""
    return await _pages(world, Ask("reader", delay_ms=_LATE_MS, size=200_000), _LATE_LIMIT_S)


async def _pages(world: World, ask: Ask, limit_s: int) -> Figures:
    settings = {
        f"{PREFIX}BUDGETS__PROJECT_DAY_TOKENS": str(_PAGE_BUDGET),
        f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(limit_s),
        f"{PREFIX}RETRY__MAX_RETRIES": "0",
    }
    run = await _served(world, Demand(_PAGES, 100.0, wait=True), ask, settings)
    [account] = run.accounts
    return {
        "requests": run.counted["requests"],
        "billed_tokens": run.counted["tokens"],
        "account": account,
        "results": dict(run.results),
    }


@dataclass(frozen=True, slots=True)
class _Run:
    """Counters of the double, results by code with their latencies, errors, limits of the replicas, and accounts."""

    began: float
    counted: Mapping[str, Any]
    outcome: Outcome
    results: Counter[str]
    seconds: Mapping[str, Sequence[float]]
    errors: Sequence[Mapping[str, Any]]
    requests_of_cards: int
    limits: Sequence[Mapping[str, Any]]
    accounts: Sequence[Mapping[str, Any]]


async def _served(
    world: World, demand: Demand, ask: Ask, settings: Mapping[str, str], act: Act | None = None, settle_s: float = 0.0
) -> _Run:
    """Place calls at a rate on three replicas while `act` disturbs them; look at the accounts `settle_s` later."""
    url, seconds = world.harness.nats.url, world.size.seconds
    async with world.serving(_REPLICAS, settings) as replicas, Traffic.connect(url) as traffic:
        commands = await place(world.database, ask, demand.count, "jina")
        began = time.time()
        disturbing = asyncio.create_task(act(replicas)) if act else None
        [outcome] = await traffic.run([(demand, commands)], seconds, 0.0)
        if disturbing is not None:
            await disturbing
        counted = await world.harness.upstream_counters()
        await asyncio.sleep(settle_s)
        async with _connected(url) as client:
            limits = [limit for replica in await gather_stats(client, _STATS_S) for limit in replica["upstream_limits"]]
            accounts = await _accounts(client)
        errors, requests, codes = await _results(world, commands)
    seconds_of: dict[str, list[float]] = {}
    for latency, command in zip(outcome.latencies, commands, strict=True):
        seconds_of.setdefault(codes.get(command.turn_id, "unanswered"), []).append(latency)
    results = Counter({code: len(found) for code, found in seconds_of.items()})
    return _Run(began, counted, outcome, results, seconds_of, errors, requests, limits, accounts)


async def _usage(world: World) -> dict[str, Any]:
    """Return requests and tokens of the first project as `openapi-tool usage` shows them."""
    servers = world.harness.stack.postgres.dsn(DATABASE), world.harness.nats.url
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openapi_tool", "usage", "--project", project_id(0), "--json"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **dict(zip(("PG_DSN", "NATS_SERVERS"), servers, strict=True))},
    )
    printed, _ = await process.communicate()
    total = json.loads(printed)["total"]
    return {name: total[name] for name in ("requests", "tokens", "no_result", "no_result_tokens")}


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def _results(world: World, commands: Sequence[Command]) -> tuple[list[dict[str, Any]], int, dict[str, str]]:
    """Return the errors of the result cards, the requests that they count, and their codes by turn."""
    rows = await world.database.fetch(
        "select metadata ->> 'agent_turn_id' as turn, content -> 'error' as error, "
        "coalesce(metadata #> '{tool_output,usage,requests}', content #> '{result,usage,requests}') as requests "
        "from public.cards where metadata ->> 'type' = 'tool.result' and metadata ->> 'agent_turn_id' = any($1)",
        [command.turn_id for command in commands],
    )
    errors = [row["error"] for row in rows if row["error"]]
    codes = {row["turn"]: (row["error"] or {}).get("code", "success") for row in rows}
    return errors, sum(row["requests"] or 0 for row in rows), codes


async def _accounts(client: Client) -> list[dict[str, Any]]:
    """Return the accounts of the bucket: what was used and lost, and what is reserved."""
    try:
        bucket = await client.jetstream().key_value(BUDGETS.bucket.name)
        keys = await bucket.keys()
    except (NotFoundError, NoKeysError):
        return []
    found = []
    for key in keys:
        record = parse((await bucket.get(key)).value)
        if record is not None:
            amounts = {"used": record.used, "lost": record.lost, "reserved": record.reserved}
            found.append({"scope": record.about["scope"], **{name: list(amount) for name, amount in amounts.items()}})
    return sorted(found, key=lambda one: str(one["scope"]))


def _limit(size: Size) -> dict[str, str]:
    return {f"{PREFIX}LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(size.limit)}


def _used(run: _Run, size: Size) -> Figures:
    allowed = size.limit * size.seconds / MINUTE_S
    return {
        "used": round(between(run.counted, run.began, run.began + size.seconds) / allowed, 3),
        "answered_429": run.counted["refused"],
        "most_in_60_s": run.counted["most_in_60_s"],
    }


def _unlimited(_: Size) -> Behaviour:
    return Behaviour()


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "stopped": Fault(stopped, lambda _: Behaviour(concurrent=_CONCURRENT)),
        "concurrency-429": Fault(concurrency_429, lambda _: Behaviour(concurrent=_CONCURRENT)),
        "outage": Fault(outage, lambda size: Behaviour(size.limit)),
        "overload": Fault(overload, lambda size: Behaviour(size.limit)),
        "budget": Fault(budget, _unlimited),
        "kills": Fault(kills, _unlimited),
        "large-pages": Fault(large_pages, lambda _: Behaviour(bytes_per_token=_BYTES_PER_TOKEN)),
        "late-pages": Fault(late_pages, lambda _: Behaviour(bytes_per_token=_BYTES_PER_TOKEN)),
    }
)
