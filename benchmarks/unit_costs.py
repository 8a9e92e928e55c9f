"""Unit costs in docs/performance.md; each prints one JSON object.

`python -m benchmarks.unit_costs wal`: kilobytes of PostgreSQL's write-ahead log that the executor causes per call,
which limits the calls per second of one primary. The rows that the kernel writes before the call do not count.

`python -m benchmarks.unit_costs permits`: CPU time in microseconds of a permit that a request gets at once. The shared
records are in memory; a task updates them, whose time is not counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import replace

import asyncpg
import uvloop

from benchmarks.harness import CPU, TARGETS, Ask, Harness, place, start_all, stop_all
from benchmarks.measure import Load
from benchmarks.run import Rounds, settings_of
from openapi_tool.jina.failures import key_failure
from openapi_tool.protocol.projects import AgentKey
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.quotas.options import KeyPool, LimitOptions
from openapi_tool.quotas.permits import PermitRequest, Permits, Unlimited
from openapi_tool.state.memory import MemoryRecords
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.secret_variables import Secrets

CALLS = 500
_ASKS = {"search-2k": Ask(), "reader-50k": Ask("reader", size=50_000)}


async def measure(calls: int = CALLS) -> dict[str, float]:
    """Return kilobytes of WAL per call by scenario. Raises Unanswered, ServerFailed."""
    async with Harness() as harness, Load.connect(harness.nats.url) as load:
        database = await harness.database()
        try:
            return {name: await _of(harness, load, database, ask, calls) for name, ask in _ASKS.items()}
        finally:
            await database.close()


async def _of(harness: Harness, load: Load, database: asyncpg.Connection, ask: Ask, calls: int) -> float:
    scenario, rounds = replace(CPU, ask=ask, calls=calls), Rounds(harness, load, database)
    await rounds.prepare(ask.projects)
    process = harness.process("executor", settings_of("executor", scenario))
    await start_all([process])
    try:
        await rounds.warm("executor", scenario)
        commands = await place(database, ask, calls, TARGETS["executor"])
        await database.execute("checkpoint")  # a checkpoint during the calls would log whole pages again
        before = await database.fetchval("select pg_current_wal_lsn()")
        await load.closed(commands, scenario.in_flight)
        written: int = await database.fetchval("select pg_current_wal_lsn() - $1::pg_lsn", before)
        return round(int(written) / 1000 / calls, 2)
    finally:
        await stop_all([process])


def wal() -> dict[str, object]:
    """Return what `wal` prints."""
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return {"wal_kb_per_call": runner.run(measure())}


_ROUNDS, _PERMITS_PER_ROUND, _PAUSE_S = 60, 100, 0.02
_UNREACHED = 10_000_000  # so high that no call waits for the limit
_KINDS: dict[str, LimitOptions] = {
    "no limit": LimitOptions(),
    "requests": LimitOptions(search_requests_per_minute=1_000_000),
    "requests, tokens": LimitOptions(search_requests_per_minute=1_000_000, search_tokens_per_minute=10**5 * _UNREACHED),
    "pool of two keys": LimitOptions(pools={"A": KeyPool(("A", "B"))}),
}


async def _cost_us(permits: Permits, secrets: Secrets) -> float:
    wanted = PermitRequest("A", "search", AgentKey("project", "agent"), Deadline.after(600), secrets("A"))

    async def one_round() -> float:
        began = time.process_time()
        for _ in range(_PERMITS_PER_ROUND):
            (await permits.acquire(wanted)).done(1)
        return time.process_time() - began

    spent_s = []
    for _ in range(2 * _ROUNDS):
        spent_s.append(await one_round())
        await asyncio.sleep(_PAUSE_S)
    return round(sum(spent_s[_ROUNDS:]) / _ROUNDS / _PERMITS_PER_ROUND * 1e6, 1)  # the first half is warm-up


async def _costs() -> dict[str, float]:
    values = {"A": "the first value", "B": "the second value"}
    costs = {"no limiter": await _cost_us(Unlimited(), Secrets(values, values))}
    for name, options in _KINDS.items():
        secrets = Secrets(values, values, options.pool_of)
        limiter = Limiter("replica", options, MemoryRecords(), time.time, key_failure)
        limiter.keys.set_secrets(secrets)
        costs[name] = await _cost_us(limiter, secrets)
        await limiter.aclose()
    return costs


def permits() -> dict[str, float]:
    """Return what `permits` prints."""
    return asyncio.run(_costs())


def main() -> None:
    """Measure what the argument names, and print one JSON object."""
    costs = {"wal": wal, "permits": permits}
    sys.stdout.write(json.dumps(costs[sys.argv[1]]()) + "\n")


if __name__ == "__main__":
    main()
