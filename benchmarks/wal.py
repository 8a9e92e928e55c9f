"""Bytes of PostgreSQL's write-ahead log that the executor causes per call: `python -m benchmarks.wal`.

They limit the calls that one primary takes ([docs/scaling.md](../docs/scaling.md)). The rows that the kernel writes
before the call are not among them. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import replace

import asyncpg
import uvloop

from benchmarks.harness import CPU, TARGETS, Ask, Harness, place, start_all, stop_all
from benchmarks.measure import Load
from benchmarks.run import Rounds, settings_of

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
        await database.execute("checkpoint")  # one in between would log whole pages again
        before = await database.fetchval("select pg_current_wal_lsn()")
        await load.closed(commands, scenario.in_flight)
        written: int = await database.fetchval("select pg_current_wal_lsn() - $1::pg_lsn", before)
        return round(int(written) / 1000 / calls, 2)
    finally:
        await stop_all([process])


if __name__ == "__main__":
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.write(json.dumps({"wal_kb_per_call": runner.run(measure())}) + "\n")
