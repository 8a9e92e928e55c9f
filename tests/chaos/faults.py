"""Everything that is done to a run, each fault with how often it hit a running call."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.fail_points import DEATHS, POINTS
from openapi_tool.local.nats_server import NatsServer
from openapi_tool.local.postgres import PostgresServer
from openapi_tool.local.server import ServerFailed
from openapi_tool.local.stack import EmbeddedStack
from tests.chaos.load import QUICK_S, SLOW_S, Journal, Load

RECORDING = "s-post-json"
STOPPED_S = 8.0
_POLL_S = 0.05
_POLLS = 60
_AWAY_S = 1.0
_BURST = 20


@dataclass(slots=True)
class Replica:
    """One executor, and where its metrics are."""

    process: ExecutorProcess
    port: int
    leave_alone: bool = False

    @property
    def alive(self) -> bool:
        return self.process.process.alive

    async def running(self) -> int:
        """Calls that run in it now; 0 where it does not say."""
        try:
            return int(await asyncio.to_thread(self.metric, "openapi_tool_calls_running"))
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        """One of its metrics, 0 where it has none of this name. Raises OSError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=0.5) as answer:
            found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


@dataclass(slots=True)
class Run:
    """The servers, replicas and load of a run."""

    stack: EmbeddedStack
    database: str
    folder: Path
    replicas: list[Replica]
    load: Load
    journal: Journal
    random: random.Random
    faults: dict[str, dict[str, int]] = field(default_factory=dict)
    background: set[asyncio.Task[Any]] = field(default_factory=set)

    def normal_rules(self) -> list[dict[str, Any]]:
        return [
            {"match": "slow", "answer": RECORDING, "delay_s": SLOW_S},
            {"answer": RECORDING, "delay_s": QUICK_S},
        ]

    async def rules(self, *more: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self.stack.upstream.rules, *more, *self.normal_rules())

    async def busy_replica(self) -> tuple[Replica, int]:
        """A replica with a call in it, if one gets any soon, and how many."""
        chosen = self.random.choice([replica for replica in self.replicas if not replica.leave_alone])
        for _ in range(_POLLS):
            if running := await chosen.running():
                return chosen, running
            await asyncio.sleep(_POLL_S)
        return chosen, 0

    async def running(self) -> int:
        """Calls that run in any replica, once there are some, if there are any soon."""
        for _ in range(_POLLS):
            if running := sum([await replica.running() for replica in self.replicas]):
                return running
            await asyncio.sleep(_POLL_S)
        return 0

    async def keep_replicas_alive(self) -> None:
        """Start again whatever died, as a cluster would."""
        while True:
            for replica in self.replicas:
                if not replica.alive and not replica.leave_alone:
                    with contextlib.suppress(ServerFailed):  # it may die of the next fault before it is up
                        await asyncio.to_thread(replica.process.start)
            await asyncio.sleep(_POLL_S)

    @property
    def hit(self) -> set[str]:
        """Kinds of faults that have hit a running call."""
        return {kind for kind, count in self.faults.items() if count["hit"]}

    def later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)


async def kill(run: Run) -> int:
    replica, running = await run.busy_replica()
    run.journal.note(crash=time.time())
    replica.process.signal(signal.SIGKILL)
    return running


def kill_at(point: str) -> Callable[[Run], Awaitable[int]]:
    """Whoever gets to `point` next dies there; the point's own process notes the moment."""

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
    connection = await asyncpg.connect(run.stack.postgres.dsn(run.database))
    await connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = 'openapi-tool' and datname = current_database()"
    )
    await connection.close()
    return running


def upstream_fault(seconds: float, **rule: Any) -> Callable[[Run], Awaitable[int]]:
    """The double answers every request this way for a while; hits are counted from its log at the end."""

    async def answer_so(run: Run) -> int:
        before = len(await asyncio.to_thread(run.stack.upstream.requests))
        await run.rules({**rule, "statuses": list(rule.get("statuses", ()))})
        await asyncio.sleep(seconds)
        await run.rules()
        return len(await asyncio.to_thread(run.stack.upstream.requests)) - before

    return answer_so


async def duplicate(run: Run) -> int:
    await run.load.duplicate(run.random.getrandbits(32))
    return 1


async def poison(run: Run) -> int:
    await run.load.rubbish()
    await run.load.killer(run.random.getrandbits(32))
    return 1


FAULTS: Mapping[str, Callable[[Run], Awaitable[int]]] = {
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


async def torment(run: Run, times: Iterator[tuple[float, str]]) -> None:
    """One fault after another."""
    for wait_s, kind in times:
        await asyncio.sleep(wait_s)
        began = time.time()
        hit = await FAULTS[kind](run)
        run.journal.note(fault=kind, began=began, ended=time.time())
        count = run.faults.setdefault(kind, {"fired": 0, "hit": 0})
        count["fired"] += 1
        count["hit"] += bool(hit)


def note_deaths(folder: Path, journal: Journal) -> None:
    """Take the moments that dying processes wrote down into the journal."""
    deaths = folder / DEATHS
    for line in deaths.read_text().splitlines() if deaths.exists() else []:
        journal.note(crash=float(line.split()[0]))
