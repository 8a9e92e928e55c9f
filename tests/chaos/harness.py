"""Common parts of all profiles: replicas, the state of a run, outages, and injection of faults."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import Client

from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.servers import ServerFailed
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subject import default_durable
from tests.chaos.checker import COMMANDS
from tests.chaos.load import QUICK_S, SLOW_S, Journal, Load
from tests.chaos.periods import DEADLINE_S

DATABASE, DURABLE = "chaos", default_durable("v1r4", "jina")
RECORDING = "s-post-json"
EXECUTOR = "tests.chaos.fail_points"
_POLL_S = 0.05
_POLLS = 60  # 3 s
_NATS_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Replica:
    """One executor, and the port of its health server.

    `under_fault`: a fault has stopped it, so it gets no other fault and is not restarted.
    """

    process: ExecutorProcess
    port: int
    under_fault: bool = False

    @property
    def alive(self) -> bool:
        return self.process.process.alive

    async def running(self) -> int:
        """Return the number of calls that it runs, 0 if it does not respond."""
        try:
            return int(await asyncio.to_thread(self.metric, "openapi_tool_calls_running"))
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        """Return one of its metrics, 0 if it has none of this name. Raises OSError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=0.5) as answer:
            found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the kernel's servers.

    Executors get `settings` (environment variables) besides the usual ones. The command stream has `stream_replicas`.
    """

    dsn: str
    nats_urls: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)
    stream_replicas: int = 1


@dataclass(slots=True)
class Run:
    """The servers, replicas and load of a run; `outage_s` is the duration of an outage.

    `older` is the load of a second kernel, of protocol v1r3, which the same replicas serve.
    """

    stack: EmbeddedStack
    addresses: Addresses
    outage_s: float
    folder: Path
    replicas: list[Replica]
    load: Load
    journal: Journal
    random: random.Random
    faults: dict[str, dict[str, int]] = field(default_factory=dict)
    background: set[asyncio.Task[Any]] = field(default_factory=set)
    older: Load | None = None

    @property
    def loads(self) -> list[Load]:
        """Return the load of each kernel."""
        return [self.load, *([self.older] if self.older else [])]

    async def place(self, calls: int, per_second: float) -> None:
        """Place `calls` calls in each kernel."""
        await asyncio.gather(*(load.run(calls, per_second) for load in self.loads))

    def normal_rules(self) -> list[dict[str, Any]]:
        """Return the rules of the double outside of faults: every request succeeds."""
        return [
            {"match": "slow", "answer": RECORDING, "delay_s": SLOW_S},
            {"answer": RECORDING, "delay_s": QUICK_S},
        ]

    async def rules(self, *more: Mapping[str, Any]) -> None:
        """Set the rules of the double: `more`, then the normal ones."""
        await asyncio.to_thread(self.stack.upstream.rules, *more, *self.normal_rules())

    async def busy_replica(self) -> tuple[Replica, int]:
        """Return a random replica and its number of running calls, once it has any, or 0 after 3 s."""
        chosen = self.random.choice([replica for replica in self.replicas if not replica.under_fault])
        for _ in range(_POLLS):
            if running := await chosen.running():
                return chosen, running
            await asyncio.sleep(_POLL_S)
        return chosen, 0

    async def running(self) -> int:
        """Return the number of running calls of all replicas, once there are any, or 0 after 3 s."""
        for _ in range(_POLLS):
            if running := sum([await replica.running() for replica in self.replicas]):
                return running
            await asyncio.sleep(_POLL_S)
        return 0

    async def keep_replicas_alive(self) -> None:
        """Restart replicas that ended, as Kubernetes would."""
        while True:
            for replica in self.replicas:
                if not replica.alive and not replica.under_fault:
                    with contextlib.suppress(ServerFailed):  # the next fault may kill it while it starts
                        await asyncio.to_thread(replica.process.start)
            await asyncio.sleep(_POLL_S)

    @property
    def hit(self) -> set[str]:
        """Return the kinds of faults that have hit a running call."""
        return {kind for kind, count in self.faults.items() if count["hit"]}

    async def delivered(self) -> int | None:
        """Return the number of deliveries of the durable, None if NATS does not answer at once."""
        try:
            async with asyncio.timeout(_NATS_TIMEOUT_S), nats_client(self.addresses.nats_urls) as client:
                info = await client.jetstream().consumer_info(COMMANDS, DURABLE)
        except (nats.errors.Error, OSError, TimeoutError):
            return None
        return info.delivered.consumer_seq if info.delivered else None

    def start_task(self, work: Any) -> None:
        """Run a coroutine in the background until the end of the run."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)


@asynccontextmanager
async def nats_client(urls: Sequence[str]) -> AsyncIterator[Client]:
    """Yield a connection that fails in an outage instead of reconnecting.

    `nats.connect` would leak a socket if the server accepts but never responds; `close` ends that, too.
    Raises nats.errors.Error, OSError, TimeoutError.
    """
    client = Client()
    try:
        await client.connect(list(urls), allow_reconnect=False, connect_timeout=1, error_cb=_ignore)
        yield client
    finally:
        await client.close()


async def _ignore(_: Exception) -> None:
    """Ignore errors of the connection: outages are intended."""


Fault = Callable[[Run], Awaitable[int]]
"""Injects a fault into a run; returns the number of running calls that it hit, or 1 if it cannot count them."""


async def outage(run: Run, why: str, broken: AbstractAsyncContextManager[Any], seconds: float | None = None) -> int:
    """Enter `broken`, which keeps calls from being finished, for `seconds` (by default `run.outage_s`).

    The period is recorded in the journal: the checker needs it to judge deadlines and readiness.
    """
    running, began = await run.running(), time.time()
    async with broken:
        since, before = time.time(), await run.delivered()
        await asyncio.sleep(run.outage_s if seconds is None else seconds)
        after, until = await run.delivered(), time.time()
    deliveries = None if before is None or after is None else after - before
    run.journal.record(outage=why, began=began, since=since, until=until, over=time.time(), deliveries=deliveries)
    return running


async def inject_faults(run: Run, times: Iterable[tuple[float, str]], faults: Mapping[str, Fault]) -> None:
    """Inject the faults one after another, and count those that hit a running call."""
    for wait_s, kind in times:
        await asyncio.sleep(wait_s)
        began = time.time()
        hit = await faults[kind](run)
        run.journal.record(fault=kind, began=began, ended=time.time())
        count = run.faults.setdefault(kind, {"fired": 0, "hit": 0})
        count["fired"] += 1
        count["hit"] += bool(hit)


class NotInstalled(Exception):
    """Raised if a program that a profile needs is not installed."""


class Profile(ABC):
    """Kind of run: the servers besides the embedded stack's, and the faults in the order of their injection."""

    replicas = 3
    executor = EXECUTOR
    rest_s = 8.0
    """Seconds between faults; more than `REACTION_S` if readiness is judged."""

    endless = False
    """Inject faults in random order until the load ends, instead of each once."""

    deadline_s = DEADLINE_S
    judged: Sequence[str] = ("lost", "doubled", "doorbells_missing", "refused", "requested_too_late", "readiness")
    """Findings that fail a run."""

    per_minute = math.inf
    """Requests that the upstream allows in any 60 s."""

    def __init__(self, stack: EmbeddedStack) -> None:
        self.stack = stack

    async def open(self, exits: AsyncExitStack) -> Addresses:
        """Start further servers, which `exits` stops. Raises NotInstalled."""
        del exits
        return Addresses(self.stack.postgres.dsn(DATABASE), [self.stack.nats.url])

    def settings(self, number: int) -> Mapping[str, str]:
        """Return the environment variables of one replica only."""
        del number
        return {}

    async def place(self, run: Run, calls: int, per_second: float) -> None:
        """Place the load."""
        await run.place(calls, per_second)

    @abstractmethod
    def faults(self) -> Mapping[str, Fault]:
        """Return the faults by name."""
