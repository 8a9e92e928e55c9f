"""Cost of a window of calls, from counters of the operating system, the NATS server and the double."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness import Harness
from benchmarks.load import Window
from openapi_tool.local.executor import ExecutorProcess

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
    """Return the same for one process that ends no threads; in nanoseconds, not 10 ms steps, if Linux reports them."""
    fields = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(field[0]) for field in fields) / 1e9 or cpu_seconds(pid)


def resident_bytes(processes: Sequence[ExecutorProcess]) -> int:
    """Return the resident memory of the largest process."""
    return max(int(psutil.Process(executor.process.pid).memory_info().rss) for executor in processes)


@dataclass(slots=True)
class Reading:
    """All counters at one moment; seconds of CPU by process, messages sent and received, the double's counters."""

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
        """Return milliseconds of CPU per call of a process; `subject` is the measured program with all replicas."""
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
