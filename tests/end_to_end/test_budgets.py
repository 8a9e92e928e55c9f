"""Budgets, usage and disabled tools of three executors under load, also killed; checked against the double's log."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.kernel.postgres.usage import usage
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_records.record_store import BUDGETS
from openapi_tool.nats_records.shared_bucket import BUCKET as SWITCHES
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.account_record import AccountRecord, parse
from tests.chaos.fail_points import BUDGET_MARGIN_VARIABLE, DEATHS, FOLDER_VARIABLE, POINTS
from tests.conftest import PROJECT, reader_tool, search_tool
from tests.requirements import requirement
from tests.support import dsn_of, pool_of
from tests.wire.conftest import World

LIMIT, REPLICAS, RUNNING, MARGIN_S = 100, 3, 8, 2.0
"""Budget in requests, executors, concurrent calls of one, and seconds after which a silent executor counts as dead."""

SEARCH_TOKENS, PAGE_TOKENS, TOKENS = 10_000, 500, 20_000
"""Tokens that the double charges for a search and for a page, and the budget in tokens."""

RULES: Sequence[Mapping[str, Any]] = (
    {"match": "busy", "statuses": [503] * 4, "answer": "s-post-json"},
    {"match": "refused", "statuses": [422] * 100},
    {"match": "dropped", "drop": "half", "answer": "s-post-json"},
    {"match": "slow", "answer": "s-post-json", "delay_s": 0.4},
    {"match": "/article", "answer": "o-budget-ok", "delay_s": 0.05},
    {"answer": "s-post-json", "delay_s": 0.05},
)
MIXES = range(int(os.environ.get("USAGE_MIXES", "1")))
"""Seeds of the mixes of calls; one in the suite, more with the variable."""

ARRIVAL_S = 0.5
"""Maximum seconds until the double logs a request that an executor sent before it was killed."""

CALLS, KILLED_EVERY_S, RATE = 48, 0.5, 24
"""Calls, seconds between kills, and calls per second."""

PAGES = {"tool_name": "pages", "options": {"jina": {"mode": "reader", "tool": "jina.read_many"}}}
SETTINGS = {
    "OPENAPI_TOOL__CACHE__TTL_S": "0",
    "OPENAPI_TOOL__NATS__ACK_WAIT_S": "3",
    "OPENAPI_TOOL__RETRY__INITIAL_BACKOFF_S": "0.01",
}


@dataclass
class Fleet:
    """Three executors with fail points, whose replicas count as dead after `MARGIN_S`."""

    world: World
    executors: list[ExecutorProcess]
    points: Path

    async def keep_alive(self) -> None:
        """Restart executors that died, until cancelled."""
        while True:
            for executor in self.executors:
                if not executor.process.alive:
                    await asyncio.to_thread(executor.start)
            await asyncio.sleep(0.02)

    def deaths(self) -> list[float]:
        file = self.points / DEATHS
        return [float(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []

    async def stop(self) -> None:
        """Drain all executors, which report their use."""
        codes = await asyncio.gather(*(asyncio.to_thread(executor.stop) for executor in self.executors))
        assert set(codes) == {0}

    async def log(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self.world.stack.upstream.requests)

    async def account(self) -> AccountRecord:
        """Return the only account in the bucket."""
        bucket = await self.world.caller.client.jetstream().key_value(BUDGETS.bucket.name)
        [value] = [(await bucket.get(key)).value or b"" for key in await bucket.keys()]
        record = parse(value)
        assert record is not None
        return record


@asynccontextmanager
async def fleet(
    stack: EmbeddedStack, world: World, points: Path, running: int = 64, **budgets: int
) -> AsyncIterator[Fleet]:
    """Start three executors with these budgets, each of which runs `running` calls at once."""
    settings = {
        **SETTINGS,
        "OPENAPI_TOOL__EXECUTOR__CONCURRENCY": str(running),
        "PG_DSN": dsn_of(stack, world.database),
        FOLDER_VARIABLE: str(points),
        BUDGET_MARGIN_VARIABLE: str(MARGIN_S),
        **{f"OPENAPI_TOOL__BUDGETS__{name.upper()}": str(value) for name, value in budgets.items()},
    }
    for tool in (search_tool(), reader_tool(), PAGES):
        await world.caller.add_tool(PROJECT, tool)
    await asyncio.to_thread(stack.upstream.rules, *RULES)
    names = [f"budgets-{world.database[-6:]}-{number}" for number in range(REPLICAS)]
    executors = [stack.executor(name, world.database, settings, module="tests.chaos.fail_points") for name in names]
    try:
        await asyncio.gather(*(asyncio.to_thread(executor.start) for executor in executors))
        yield Fleet(world, executors, points)
    finally:
        await asyncio.gather(*(asyncio.to_thread(executor.stop) for executor in executors))
    for executor in executors:
        assert "Traceback" not in executor.log_text(), executor.log_text()


@pytest.fixture
def world(stack: EmbeddedStack, caller: Any, database: str) -> World:
    return World(stack, caller, database)


async def published(world: World, placed: Iterable[PlacedCall]) -> None:
    await asyncio.gather(*map(world.caller.publish, placed))


@requirement("budgets.exact", "budgets.calls")
async def test_three_processes_send_exactly_the_budget(stack: EmbeddedStack, world: World, tmp_path: Path) -> None:
    async with fleet(stack, world, tmp_path, project_day_requests=LIMIT) as three:
        placed = [await world.place({"query": f"call{number}x"}) for number in range(2 * LIMIT)]
        await published(world, placed)
        await world.settled()
        environment = {"NATS_SERVERS": world.stack.nats.url}
        shown = await asyncio.to_thread(
            CliRunner().invoke, app, ["budgets", "--project", PROJECT, "--json"], env=environment
        )
    cards = [(await world.caller.read_result(call)).card for call in placed]
    refused = [card["content"]["error"] for card in cards if card["content"]["error"]]
    assert {error["code"] for error in refused} == {"budget_exceeded"}
    assert (len(await three.log()), len(refused)) == (LIMIT, LIMIT)
    assert min(error["detail"]["used"] for error in refused) >= LIMIT - 2
    left = [card["metadata"]["tool_output"]["budget"]["project_day"]["requests_left"] for card in cards]
    assert min(left) == 0
    [account] = json.loads(shown.stdout)["budgets"]
    assert (account["scope"], account["requests_left"]) == ("project_day", 0)


@requirement("budgets.exact")
async def test_tokens_are_exceeded_by_no_more_than_running_requests_cost(
    stack: EmbeddedStack, world: World, tmp_path: Path
) -> None:
    """The first requests are estimated at the minimum charge of a page: one token."""
    async with fleet(stack, world, tmp_path, RUNNING, project_day_tokens=TOKENS) as three:
        placed = [await world.place({"url": page(number)}, "jina_reader", suffix="read") for number in range(LIMIT)]
        await published(world, placed)
        await world.settled()
    log = await three.log()
    # A request counts as running for longer than the double sees it: its cost is reserved before, and settled after.
    most = REPLICAS * RUNNING
    assert TOKENS - PAGE_TOKENS < len(log) * PAGE_TOKENS <= TOKENS + most * (PAGE_TOKENS - 1)
    assert (await three.account()).used == (len(log), len(log) * PAGE_TOKENS)


def page(number: int, part: int = 0) -> str:
    return f"http://site.fixture.test:8099/article?call{number}x{part}"


async def mixed(world: World, number: int, random_: random.Random) -> PlacedCall:
    """Place one of several kinds of calls; all of its requests have its number in them."""
    kind = random_.choice(["quick", "quick", "slow", "slow", "busy", "refused", "dropped", "page", "pages"])
    if kind == "pages":
        urls = [page(number, part) for part in range(random_.randint(1, 4))]
        return await world.place({"urls": urls}, "pages", suffix="read")
    if kind == "page":
        return await world.place({"url": page(number)}, "jina_reader", suffix="read")
    return await world.place({"query": f"{kind} call{number}x"})


@pytest.mark.thorough
@requirement("usage.exact", "usage.lost", "budgets.exact", "budgets.reservations")
@pytest.mark.parametrize("seed", MIXES)
async def test_usage_and_budgets_equal_the_doubles_count_while_executors_are_killed(
    stack: EmbeddedStack, world: World, tmp_path: Path, seed: int
) -> None:
    """An executor is killed once at each fail point. Only requests of calls that ran in it may be missing."""
    random_ = random.Random(seed)  # noqa: S311 - repeatable
    async with fleet(stack, world, tmp_path, project_day_requests=10_000) as three:
        alive = asyncio.create_task(three.keep_alive())
        kills = asyncio.create_task(kill_at_each_point(three, random_))
        placed = []
        for number in range(CALLS):
            placed.append(await mixed(world, number, random_))
            await world.caller.publish(placed[-1])
            await asyncio.sleep(1 / RATE)
        await kills
        await world.settled()
        await asyncio.sleep(max(0.0, three.deaths()[-1] + MARGIN_S + 0.1 - time.time()))
        placed += [await mixed(world, CALLS + number, random_) for number in range(2 * REPLICAS)]
        await published(world, placed[CALLS:])
        await world.settled()
        alive.cancel()
        await three.stop()
        log, account = await three.log(), await three.account()
    cards = [(await world.caller.read_result(call)).card for call in placed]
    deaths = three.deaths()
    assert len(deaths) == len(POINTS)
    missing = [request for number, card in enumerate(cards) for request in uncounted(number, card, log, deaths)]
    now = datetime.now(UTC)
    total, *_ = await usage(pool_of(world.dsn), PROJECT, now - timedelta(hours=1), now, "tool.openapi", By.TOOL)
    counted = len(log) - len(missing), tokens(log) - tokens(missing)
    assert (total["calls"], total["requests"], total["tokens"]) == (len(placed), *counted)
    words = ["usage", "--project", PROJECT, "--json"]
    environment = {"PG_DSN": world.dsn, "NATS_SERVERS": world.stack.nats.url}
    shown = await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)
    beyond = json.loads(shown.stdout)["total"]["no_result"]
    held = account.used.requests + account.lost.requests + len(account.open)
    assert (total["requests"] + beyond, shown.stderr) == (held, ""), "each request is in a card or in the column"
    assert total["tokens"] <= account.used.tokens <= tokens(log)
    assert total["requests"] <= account.used.requests
    assert len(log) <= held <= len(log) + RUNNING * len(deaths), "requests in flight at a kill stay charged"


async def kill_at_each_point(three: Fleet, random_: random.Random) -> None:
    """Kill the first executor at each fail point in turn; in the end all have been restarted."""
    for point in random_.sample(POINTS, len(POINTS)):
        await asyncio.sleep(KILLED_EVERY_S)
        (three.points / point).touch()


def uncounted(
    number: int, card: Mapping[str, Any], log: Sequence[Mapping[str, Any]], deaths: Sequence[float]
) -> Sequence[Mapping[str, Any]]:
    """Return the requests of a call that its result does not count; its executor was killed after each of them."""
    text = re.compile(rf"call{number}x")
    sent = [request for request in log if text.search(urllib.parse.unquote(request["target"]) + request["body"])]
    about = card["metadata"]["tool_output"]
    requests = (about if "usage" in about else card["content"]["result"])["usage"]["requests"]
    assert requests <= len(sent), card
    missing, counted = sent[: len(sent) - requests], sent[len(sent) - requests :]
    next_at = counted[0]["at"] if counted else card["created_at"].timestamp()
    assert all(any(request["at"] - ARRIVAL_S <= death <= next_at for death in deaths) for request in missing), (
        requests,
        [(request["at"], request["body"]) for request in sent],
        deaths,
    )
    return missing


def tokens(log: Iterable[Mapping[str, Any]]) -> int:
    """Return the tokens that these requests cost, also if the response was cut off."""
    answered = [request for request in log if request.get("status") == 200]
    return sum(SEARCH_TOKENS if request["host"].startswith("s.") else PAGE_TOKENS for request in answered)


@requirement("switches")
async def test_no_request_begins_two_seconds_after_a_tool_was_disabled(
    stack: EmbeddedStack, world: World, tmp_path: Path
) -> None:
    """Three processes under load, one of which is killed and restarted; then the record is deleted."""
    async with fleet(stack, world, tmp_path) as three:
        load = asyncio.create_task(endless(world))
        await asyncio.sleep(0.5)
        words = ["tools", "disable", "jina_search", "--project", PROJECT, "--reason", "it costs too much"]
        done = await asyncio.to_thread(CliRunner().invoke, app, words, env={"NATS_SERVERS": world.stack.nats.url})
        disabled_at = time.time()
        assert done.exit_code == 0, done.output
        killed = three.executors[0]
        killed.process.kill()
        await asyncio.to_thread(killed.start)
        await asyncio.sleep(max(0.0, disabled_at + 2 - time.time()))
        before = len(await three.log())
        await world.caller.client.jetstream().delete_key_value(SWITCHES)
        await asyncio.sleep(1.5)
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load
        begun = [request["at"] - disabled_at for request in await three.log()]
        logs = [executor.log_text() for executor in three.executors]
    assert min(begun) < 0 < before
    assert max(begun) < 2
    assert all("it costs too much" in log for log in logs)
    assert any("switches.written_again" in log for log in logs)


async def endless(world: World) -> None:
    """Place calls until cancelled."""
    number = 0
    while True:
        with suppress(Unavailable):
            call = await world.place({"query": f"call{number}x"})
            await world.caller.publish(call)
        number += 1
        await asyncio.sleep(0.02)
