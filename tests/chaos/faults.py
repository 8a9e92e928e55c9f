"""Faults of the standard profile. Each returns the number of running calls that it hit."""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg

from openapi_tool.local.postgres_server import PostgresServer
from openapi_tool.local.servers import NatsServer
from tests.chaos.fail_points import DEATHS, POINTS
from tests.chaos.harness import RECORDING, Fault, Profile, Run
from tests.chaos.load import Journal

FROZEN_S = 8.0
"""Longer than AckWait, so that the commands of a frozen replica are delivered again."""
_POLL_S = 0.05
_POLLS = 60
_MAX_DOWNTIME_S = 1.0
_BURST = 20  # more error responses than the load requests in a second


async def kill(run: Run) -> int:
    replica, running = await run.busy_replica()
    run.journal.record(crash=time.time())
    replica.process.signal(signal.SIGKILL)
    return running


def kill_at(point: str) -> Callable[[Run], Awaitable[int]]:
    """Kill the next process that reaches `point` (`fail_points.py`, which writes its time to DEATHS)."""

    async def kill_there(run: Run) -> int:
        request = run.folder / point
        request.touch()
        for _ in range(_POLLS):
            await asyncio.sleep(_POLL_S)
            if not request.exists():
                return 1
        request.unlink(missing_ok=True)
        return 0

    return kill_there


async def terminate(run: Run) -> int:
    """Drain a replica by SIGTERM; `keep_replicas_alive` starts it again."""
    replica, running = await run.busy_replica()
    replica.under_fault = True
    await asyncio.to_thread(replica.process.stop)
    replica.under_fault = False
    return running


async def freeze(run: Run) -> int:
    """Freeze a replica by SIGSTOP. One at a time, so that the others can run the calls."""
    if any(replica.under_fault for replica in run.replicas):
        return 0
    replica, running = await run.busy_replica()
    replica.under_fault = True
    run.journal.record(crash=time.time(), dead_s=FROZEN_S)
    replica.process.signal(signal.SIGSTOP)

    async def wake() -> None:
        await asyncio.sleep(FROZEN_S)
        replica.process.signal(signal.SIGCONT)
        replica.under_fault = False

    run.start_task(wake())
    return running


async def restart_nats(run: Run) -> int:
    return await _restart(run, run.stack.nats)


async def restart_postgres(run: Run) -> int:
    return await _restart(run, run.stack.postgres)


async def _restart(run: Run, server: NatsServer | PostgresServer) -> int:
    running = await run.running()
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(run.random.random() * _MAX_DOWNTIME_S)
    await asyncio.to_thread(server.start)
    return running


async def end_backends(run: Run) -> int:
    running = await run.running()
    connection = await asyncpg.connect(run.addresses.dsn)
    await connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = 'openapi-tool' and datname = current_database()"
    )
    await connection.close()
    return running


_MAX_ROUNDS = 5
"""Maximum duration of the fault, in multiples of `seconds`: after a 429 no request may be sent for a while."""


def upstream_fault(seconds: float, **rule: Any) -> Callable[[Run], Awaitable[int]]:
    """Return a fault: for `seconds` the double answers every request by `rule`. These requests are the hits."""

    async def inject(run: Run) -> int:
        before, hits = len(await asyncio.to_thread(run.stack.upstream.requests)), 0
        await run.rules({**rule, "statuses": list(rule.get("statuses", ()))})
        for _ in range(_MAX_ROUNDS):
            await asyncio.sleep(seconds)
            if hits := len(await asyncio.to_thread(run.stack.upstream.requests)) - before:
                break
        await run.rules()
        return hits

    return inject


async def duplicate(run: Run) -> int:
    await run.load.duplicate(run.random.getrandbits(32))
    return 1


async def poison(run: Run) -> int:
    await run.load.publish_malformed()
    await run.load.publish_poison(run.random.getrandbits(32))
    return 1


FAULTS: Mapping[str, Fault] = {
    "kill": kill,
    **{f"kill_{point}": kill_at(point) for point in POINTS},
    "sigterm": terminate,
    "sigstop": freeze,
    "nats_restart": restart_nats,
    "postgres_restart": restart_postgres,
    "backends_ended": end_backends,
    "upstream_429": upstream_fault(1.0, statuses=[429] * _BURST, retry_after="1", answer=RECORDING),
    "upstream_503": upstream_fault(1.0, statuses=[503] * _BURST, answer=RECORDING),
    "upstream_hang": upstream_fault(0.2, hang=True, answer=RECORDING),
    "upstream_half_body": upstream_fault(0.5, drop="half", answer=RECORDING),
    "duplicate": duplicate,
    "poison": poison,
}


def schedule(order: random.Random, every_s: tuple[float, float], kinds: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Yield pauses in seconds and the kind of the next fault, without end, all kinds equally often."""
    while True:
        for kind in order.sample(kinds, len(kinds)):
            yield order.uniform(*every_s), kind


class Standard(Profile):
    """Kills, restarts and upstream errors in random order; results may be late."""

    endless = True
    deadline_s = math.inf
    judged = ("lost", "doubled", "doorbells_missing")

    def settings(self, number: int) -> Mapping[str, str]:
        """Return a limit above the load: one that is learned from injected 429s would refuse most calls unsent."""
        del number
        return {"OPENAPI_TOOL__LIMITS__SEARCH_REQUESTS_PER_MINUTE": "6000"}

    def faults(self) -> Mapping[str, Fault]:
        return FAULTS


def record_kills(folder: Path, journal: Journal) -> None:
    """Copy the times at which processes were killed at fail points to the journal."""
    deaths = folder / DEATHS
    for line in deaths.read_text().splitlines() if deaths.exists() else []:
        journal.record(crash=float(line.split()[0]))


def record_discarded(logs: Iterable[str], journal: Journal) -> None:
    """Copy the dead letters that executors logged as discarded to the journal."""
    for line in "".join(logs).splitlines():
        if "dead_letters.discarded" in line:
            logged = json.loads(line)
            at = datetime.fromisoformat(logged["time"]).timestamp()
            journal.record(discarded=logged["stream_sequence"], cause=logged["cause"], at=at)
