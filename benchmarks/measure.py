"""Load, and its measurement in windows.

Throughput and latency are measured in windows, of one executor after the other. CPU is compared between executors that
run at the same time and get calls in turn, so that other work of the machine slows all of them alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import asyncpg
import nats
import psutil
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.harness import Command, Harness, Scenario, place
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import VERSION

_CONFIRM_EVERY = 500  # wait for the stream from time to time, so that the publisher cannot outrun it
_STALLED_AFTER_S = 60.0  # without any doorbell


class Unanswered(Exception):
    """Some calls of a window have no result."""


@dataclass(slots=True)
class Window:
    """Measurement of some calls: seconds from due time to doorbell of each, and seconds of the whole window."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Load:
    """One connection that publishes commands and receives all doorbells."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._due: dict[str, float] = {}
        self._latencies: list[float] = []
        self._on_answer: Callable[[], None] = lambda: None

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str) -> AsyncIterator[Load]:
        """Connect and subscribe to doorbells."""
        client = await nats.connect(url, name="load")
        load = cls(client)
        await client.subscribe(
            f"cg.{VERSION}.*.*.cmd.agent.*.wakeup",
            cb=load._receive,
            pending_msgs_limit=-1,
            pending_bytes_limit=-1,
        )
        await client.flush()
        try:
            yield load
        finally:
            await client.close()

    async def _receive(self, message: Msg) -> None:
        now = time.perf_counter()
        due = self._due.pop((message.headers or {}).get("CG-Turn-Id", ""), None)
        if due is not None:
            self._latencies.append(now - due)
            self._on_answer()

    async def _send(self, command: Command, due: float | None = None) -> None:
        self._due[command.turn_id] = time.perf_counter() if due is None else due
        await self._client.publish(command.subject, command.data, headers=command.headers)

    async def closed(self, commands: Sequence[Command], in_flight: int) -> Window:
        """Keep a constant number of calls in flight: each doorbell triggers the next command."""
        waiting, in_flight_limit = deque(commands), asyncio.Semaphore(in_flight)
        self._on_answer = in_flight_limit.release

        async def send() -> None:
            while waiting:
                await in_flight_limit.acquire()
                await self._send(waiting.popleft())

        return await self._window(send, commands)

    async def open(self, commands: Sequence[Command], per_second: float) -> Window:
        """Publish each command at its time, independent of the others; latency counts from its due time."""

        async def send() -> None:
            began = time.perf_counter()
            for number, command in enumerate(commands):
                due = began + number / per_second
                if (early := due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                await self._send(command, due)

        return await self._window(send, commands)

    async def burst(self, commands: Sequence[Command]) -> Window:
        """Publish all commands at once."""
        return await self._window(lambda: self.enqueue(commands), commands)

    async def enqueue(self, commands: Sequence[Command]) -> None:
        """Publish all commands; wait for the stream's acknowledgement of every 500th."""
        for number, command in enumerate(commands, start=1):
            if number % _CONFIRM_EVERY:
                await self._send(command)
            else:
                self._due[command.turn_id] = time.perf_counter()
                await self._client.jetstream().publish(command.subject, command.data, headers=command.headers)

    async def answers(self, count: int) -> Window:
        """Wait for `count` further doorbells of enqueued commands; only `seconds` of the window is meaningful."""
        self._latencies.clear()
        return await self._until(count, time.perf_counter())

    def expect_none(self) -> None:
        """Expect no more doorbells."""
        self._due.clear()

    async def _window(self, send: Callable[[], Coroutine[None, None, None]], commands: Sequence[Command]) -> Window:
        self._latencies = []
        began = time.perf_counter()
        sending = asyncio.create_task(send())
        try:
            return await self._until(len(commands), began)
        finally:
            sending.cancel()
            self._on_answer = lambda: None

    async def _until(self, count: int, began: float) -> Window:
        progressed_at, answered = time.perf_counter(), 0
        while len(self._latencies) < count:
            await asyncio.sleep(0.005)
            if len(self._latencies) > answered:
                progressed_at, answered = time.perf_counter(), len(self._latencies)
            elif time.perf_counter() - progressed_at > _STALLED_AFTER_S:
                raise Unanswered(f"{count - answered} of {count} calls were not answered within {_STALLED_AFTER_S:g} s")
        return Window(self._latencies[:count], time.perf_counter() - began)


_SAMPLE_S = 0.25
_MB = 1_000_000


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process and its children, also ended ones."""
    process, spent = psutil.Process(pid), 0.0
    for child in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            spent += times.user + times.system
    ended = process.cpu_times()
    return spent + ended.children_user + ended.children_system


def exact_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, whose threads never end, and its running children; exact to 1 ns, not 10 ms."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    fields = [path.read_text().split() for one in pids for path in Path(f"/proc/{one}/task").glob("*/schedstat")]
    return sum(int(field[0]) for field in fields) / 1e9 or cpu_seconds(pid)


def resident_bytes(processes: Sequence[ExecutorProcess]) -> int:
    """Return the resident memory of the largest process."""
    return max(int(psutil.Process(executor.process.pid).memory_info().rss) for executor in processes)


@dataclass(slots=True)
class Reading:
    """All counters at one moment: seconds of CPU by process, NATS messages sent and received, the double's counters."""

    cpu: dict[str, float]
    sent: int
    received: int
    connections: int
    requests: int
    at: float


@dataclass(slots=True)
class Cost:
    """Difference of two readings; `resident` is the highest value in bytes."""

    before: Reading
    after: Reading
    resident: int = 0
    samples: list[int] = field(default_factory=list)

    def cpu_ms(self, name: str, calls: int) -> float:
        """Return a process's milliseconds of CPU per call; `subject` is all replicas of the measured program."""
        return (self.after.cpu[name] - self.before.cpu[name]) * 1000 / calls


async def read(harness: Harness, kind: str, processes: Sequence[ExecutorProcess]) -> Reading:
    """Read all counters."""
    cpu = {name: cpu_seconds(pid) for name, pid in harness.servers().items()}
    cpu["load"] = time.process_time()
    cpu["subject"] = sum(exact_cpu_seconds(executor.process.pid) for executor in processes)
    sent, received = await harness.messages(kind)
    upstream = await harness.upstream_counters()
    return Reading(cpu, sent, received, upstream["connections"], upstream["requests"], time.perf_counter())


@asynccontextmanager
async def measured(harness: Harness, kind: str, processes: Sequence[ExecutorProcess]) -> AsyncIterator[Cost]:
    """Measure the cost of the block; the yielded value is complete after it."""
    before = await read(harness, kind, processes)
    cost = Cost(before, before)
    watching = asyncio.create_task(_watch(processes, cost))
    try:
        yield cost
    finally:
        watching.cancel()
    cost.after = await read(harness, kind, processes)
    cost.resident = max([*cost.samples, resident_bytes(processes)])


async def _watch(processes: Sequence[ExecutorProcess], cost: Cost) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        cost.samples.append(resident_bytes(processes))


def figures(window: Window, cost: Cost, calls: int, delay_ms: int) -> dict[str, float]:
    """Return one round's figures by name; latencies are without the upstream's time, in milliseconds."""
    added = sorted(latency * 1000 - delay_ms for latency in window.latencies)
    cuts = statistics.quantiles(added, n=100, method="inclusive")
    return {
        "calls_per_s": calls / window.seconds,
        "added_p50_ms": cuts[49],
        "added_p95_ms": cuts[94],
        "added_p99_ms": cuts[98],
        "added_max_ms": added[-1],
        "cpu_ms": cost.cpu_ms("subject", calls),
        "rss_mb": cost.resident / _MB,
        "nats_sent": (cost.after.sent - cost.before.sent) / calls,
        "nats_received": (cost.after.received - cost.before.received) / calls,
        "connections": (cost.after.connections - cost.before.connections) / calls,
        "requests": (cost.after.requests - cost.before.requests) / calls,
        **{f"{name}_cpu_ms": cost.cpu_ms(name, calls) for name in ("load", "double", "nats", "postgres")},
    }


CONFIDENCE = 0.95
QUIET_S = 0.3

CPU_MS, RSS_MB, RATE, P99_MS = "cpu_ms", "rss_mb", "calls_per_s", "p99_ms"
Figures = dict[str, float]
Processes = Mapping[str, ExecutorProcess]
"""Executors by kind, which is also their setting `protocol.target`."""


async def warm(processes: Processes, scenario: Scenario, database: asyncpg.Connection, load: Load) -> None:
    """Give each executor the scenario's first calls, which are not measured. Raises Unanswered."""
    for kind in processes:
        await load.closed(await place(database, scenario.ask, scenario.warm, kind), scenario.in_flight)


async def in_turn(
    processes: Processes, rounds: int, scenario: Scenario, database: asyncpg.Connection, load: Load
) -> list[dict[str, Figures]]:
    """Return calls per second, p99 in milliseconds and memory in MB of each executor, round by round.

    A round is a window of each, in an order that rotates. Raises Unanswered.
    """
    kinds, results = list(processes), []
    for number in range(rounds):
        first = number % len(kinds)
        results.append(
            {
                kind: await _window(kind, processes[kind], scenario, database, load)
                for kind in kinds[first:] + kinds[:first]
            }
        )
    return results


async def _window(
    kind: str, process: ExecutorProcess, scenario: Scenario, database: asyncpg.Connection, load: Load
) -> Figures:
    commands = await place(database, scenario.ask, scenario.calls, kind, analyze=False)
    measured = await load.closed(commands, scenario.in_flight)
    await asyncio.sleep(QUIET_S)  # until acknowledgements and the last spans are sent
    return {
        RATE: scenario.calls / measured.seconds,
        P99_MS: statistics.quantiles(measured.latencies, n=100, method="inclusive")[98] * 1000,
        RSS_MB: resident_bytes([process]) / _MB,
    }


async def at_once(
    processes: Processes, rounds: int, scenario: Scenario, database: asyncpg.Connection, load: Load
) -> list[dict[str, Figures]]:
    """Return CPU per call in milliseconds and memory in MB of executors that run at the same time, round by round.

    Each gets the scenario's number of calls in a round. Raises Unanswered.
    """
    results = []
    for _ in range(rounds):
        placed = [await place(database, scenario.ask, scenario.calls, kind, analyze=False) for kind in processes]
        await asyncio.sleep(QUIET_S)
        before = {kind: exact_cpu_seconds(process.process.pid) for kind, process in processes.items()}
        await load.closed(list(chain.from_iterable(zip(*placed, strict=True))), scenario.in_flight)
        await asyncio.sleep(QUIET_S)
        results.append(
            {
                kind: {
                    CPU_MS: (exact_cpu_seconds(process.process.pid) - before[kind]) * 1000 / scenario.calls,
                    RSS_MB: resident_bytes([process]) / _MB,
                }
                for kind, process in processes.items()
            }
        )
    return results


def ratios(rounds: Sequence[Mapping[str, Figures]], kind: str, base: str, figure: str) -> list[float]:
    """Return a figure of each round, divided by that of `base` in the same round."""
    return [figures[kind][figure] / figures[base][figure] for figures in rounds]


def medians(rounds: Sequence[Mapping[str, Figures]], kind: str) -> Figures:
    """Return the median of each figure."""
    return {name: round(statistics.median(figures[kind][name] for figures in rounds), 3) for name in rounds[0][kind]}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median by order statistics; of few values the whole range."""
    ordered, count = sorted(values), len(values)
    beyond = [2 * sum(math.comb(count, below) for below in range(cut + 1)) / 2**count for cut in range(count // 2)]
    cut = max(0, sum(share <= 1 - CONFIDENCE for share in beyond) - 1)
    return ordered[cut], ordered[count - 1 - cut]


def ratio(values: Sequence[float]) -> dict[str, float]:
    """Return the median of ratios and the interval that holds it."""
    low, high = median_interval(values)
    return {"median": round(statistics.median(values), 3), "low": round(low, 3), "high": round(high, 3)}
