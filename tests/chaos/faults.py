"""The standard profile: everything that is done to a run, each fault with how often it hit a running call."""

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

from openapi_tool.local.nats_server import NatsServer
from openapi_tool.local.postgres import PostgresServer
from tests.chaos.fail_points import DEATHS, POINTS
from tests.chaos.harness import RECORDING, Fault, Profile, Run
from tests.chaos.load import Journal

STOPPED_S = 8.0
_POLL_S = 0.05
_POLLS = 60
_AWAY_S = 1.0
_BURST = 20


async def kill(run: Run) -> int:
    replica, running = await run.busy_replica()
    run.journal.note(crash=time.time())
    replica.process.signal(signal.SIGKILL)
    return running


def kill_at(point: str) -> Callable[[Run], Awaitable[int]]:
    """Kill the next process that reaches `point`; that process writes the time."""

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
    """SIGTERM, and a new replica in its place once it has drained."""
    replica, running = await run.busy_replica()
    replica.leave_alone = True
    await asyncio.to_thread(replica.process.stop)
    replica.leave_alone = False
    return running


async def freeze(run: Run) -> int:
    """SIGSTOP for longer than AckWait; the zombie then wakes up. One at a time: somebody has to do the work."""
    if any(replica.leave_alone for replica in run.replicas):
        return 0
    replica, running = await run.busy_replica()
    replica.leave_alone = True
    run.journal.note(crash=time.time(), dead_s=STOPPED_S)
    replica.process.signal(signal.SIGSTOP)

    async def wake() -> None:
        await asyncio.sleep(STOPPED_S)
        replica.process.signal(signal.SIGCONT)
        replica.leave_alone = False

    run.later(wake())
    return running


async def restart_nats(run: Run) -> int:
    return await _restart(run, run.stack.nats)


async def restart_postgres(run: Run) -> int:
    return await _restart(run, run.stack.postgres)


async def _restart(run: Run, server: NatsServer | PostgresServer) -> int:
    running = await run.running()
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(run.random.random() * _AWAY_S)
    await asyncio.to_thread(server.start)
    return running


async def end_backends(run: Run) -> int:
    running = await run.running()
    connection = await asyncpg.connect(run.site.dsn)
    await connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = 'openapi-tool' and datname = current_database()"
    )
    await connection.close()
    return running


_ROUNDS = 5
"""Longest wait for a request, in times the fault's seconds: after a 429 calls are held back."""


def upstream_fault(seconds: float, **rule: Any) -> Callable[[Run], Awaitable[int]]:
    """The double answers every request this way for a while; hits are counted from its log at the end."""

    async def answer_so(run: Run) -> int:
        before, hits = len(await asyncio.to_thread(run.stack.upstream.requests)), 0
        await run.rules({**rule, "statuses": list(rule.get("statuses", ()))})
        for _ in range(_ROUNDS):
            await asyncio.sleep(seconds)
            if hits := len(await asyncio.to_thread(run.stack.upstream.requests)) - before:
                break
        await run.rules()
        return hits

    return answer_so


async def duplicate(run: Run) -> int:
    for load in run.loads:
        await load.duplicate(run.random.getrandbits(32))
    return 1


async def poison(run: Run) -> int:
    for load in run.loads:
        await load.rubbish()
        await load.killer(run.random.getrandbits(32))
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
    """Seconds to wait and what to do then, for ever; each kind as often as the others."""
    while True:
        for kind in order.sample(kinds, len(kinds)):
            yield order.uniform(*every_s), kind


class Standard(Profile):
    """Clean deaths, restarts and a hostile upstream, in random order; a call may take as long as it takes."""

    endless = True
    deadline_s = math.inf
    judged = ("lost", "doubled", "doorbells_missing")

    def faults(self) -> Mapping[str, Fault]:
        return FAULTS


def note_deaths(folder: Path, journal: Journal) -> None:
    """Take the moments that dying processes wrote down into the journal."""
    deaths = folder / DEATHS
    for line in deaths.read_text().splitlines() if deaths.exists() else []:
        journal.note(crash=float(line.split()[0]))


def note_given_up(logs: Iterable[str], journal: Journal) -> None:
    """Take the dead letters that executors logged as given up into the journal."""
    for line in "".join(logs).splitlines():
        if "dead_letters.discarded" in line:
            logged = json.loads(line)
            at = datetime.fromisoformat(logged["time"]).timestamp()
            journal.note(given_up=logged["stream_sequence"], cause=logged["cause"], at=at)
