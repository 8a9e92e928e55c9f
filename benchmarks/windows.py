"""The same load on several executors, in turn or at the same time, and the ratios with their intervals.

Windows in turn give throughput and latency. CPU is compared of executors that run at the same time, each with every
second call (or third …): other work of the machine slows all of them alike.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain

import asyncpg

from benchmarks.calls import place
from benchmarks.load import Load
from benchmarks.measure import exact_cpu_seconds, resident_bytes
from benchmarks.scenarios import Scenario
from openapi_tool.local.executor import ExecutorProcess

CONFIDENCE = 0.95
QUIET_S = 0.3
_MB = 1_000_000

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
    await asyncio.sleep(QUIET_S)  # acknowledgements and the export of the last spans
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
    """Return an interval that holds the median with at least 95 %, whatever the distribution; all if there are few."""
    ordered, count = sorted(values), len(values)
    beyond = [2 * sum(math.comb(count, below) for below in range(cut + 1)) / 2**count for cut in range(count // 2)]
    cut = max(0, sum(share <= 1 - CONFIDENCE for share in beyond) - 1)
    return ordered[cut], ordered[count - 1 - cut]


def ratio(values: Sequence[float]) -> dict[str, float]:
    """Return the median of ratios and the interval that holds it."""
    low, high = median_interval(values)
    return {"median": round(statistics.median(values), 3), "low": round(low, 3), "high": round(high, 3)}
