"""Cost of exporting spans: with a collector that answers, hangs or swallows connections, and unsampled.

`python -m benchmarks.otlp` runs one executor of each kind, on a target of its own, and loads them one after the other.
A round is one window of each kind, in an order that rotates; each is compared with `off` of the same round. The last
line is one JSON object, in which `holds` says which limits hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import asyncpg
import uvloop

from benchmarks.calls import furnish, place
from benchmarks.collector import answering, black_hole, hanging
from benchmarks.harness import Stand, start_all, stop_all
from benchmarks.load import Load
from benchmarks.measure import exact_cpu_seconds, resident_bytes
from benchmarks.rounds import settings_of
from benchmarks.scenarios import CPU, Scenario
from openapi_tool.local.executor import ExecutorProcess

OFF, UNSAMPLED, SAMPLED, HANGING, BLACK_HOLE = KINDS = "off", "unsampled", "sampled", "hanging", "black_hole"
SURE = 0.95
ROUNDS, CALLS, WARM_CALLS, QUIET_S = 12, 1_000, 300, 0.3
LEAST_THROUGHPUT, MOST_P99, MOST_UNSAMPLED_CPU, MOST_SAMPLED_CPU, MOST_QUEUE_MB = 0.95, 1.25, 1.03, 1.20, 30.0
_TELEMETRY = "OPENAPI_TOOL__TELEMETRY__"
_MB = 1_000_000

FIGURES = ("calls_per_s", "p99_ms", "cpu_ms", "rss_mb")
Figures = dict[str, float]


@dataclass(slots=True)
class Measured:
    """The figures of each round by kind, and the executors that they are of."""

    processes: Mapping[str, ExecutorProcess]
    rounds: list[dict[str, Figures]] = field(default_factory=list)

    def ratios(self, kind: str, figure: str) -> list[float]:
        """Return a figure of each round, divided by that of `off` in the same round."""
        return [each[kind][figure] / each[OFF][figure] for each in self.rounds]


async def measure(rounds: int, calls: int) -> Measured:
    """Measure all kinds. Raises Unanswered, ServerFailed."""
    async with AsyncExitStack() as stack:
        ports = {
            SAMPLED: await stack.enter_async_context(answering()),
            HANGING: stack.enter_context(hanging()),
            BLACK_HOLE: stack.enter_context(black_hole()),
        }
        ports[UNSAMPLED] = ports[SAMPLED]
        stand = await stack.enter_async_context(Stand())
        load = await stack.enter_async_context(Load.connect(stand.nats.url))
        return await _with(stand, load, ports, rounds, calls)


async def _with(stand: Stand, load: Load, ports: Mapping[str, int], rounds: int, calls: int) -> Measured:
    scenario = Scenario("otlp", CPU.shape, calls, CPU.ask, warm=WARM_CALLS)
    database = await stand.database()
    await stand.clean(database)
    await furnish(database, scenario.ask.projects)
    found = Measured({kind: stand.process("executor", _settings(kind, scenario, ports)) for kind in KINDS})
    processes = list(found.processes.values())
    await start_all(processes)
    try:
        for kind in KINDS:
            await load.closed(await place(database, scenario.ask, scenario.warm, kind), scenario.in_flight)
        for number in range(rounds):
            order = [*KINDS[number % len(KINDS) :], *KINDS[: number % len(KINDS)]]
            found.rounds.append({kind: await _window(kind, scenario, database, load, found) for kind in order})
            sys.stderr.write(f"round {number + 1} of {rounds}\n")
    finally:
        await stop_all(processes)
        await database.close()
    return found


def _settings(kind: str, scenario: Scenario, ports: Mapping[str, int]) -> dict[str, str]:
    settings = {**settings_of("executor", scenario), "OPENAPI_TOOL__PROTOCOL__TARGET": kind}
    if kind != OFF:
        settings[f"{_TELEMETRY}OTLP_ENDPOINT"] = f"http://127.0.0.1:{ports[kind]}/v1/traces"
    if kind == UNSAMPLED:
        settings[f"{_TELEMETRY}TRACE_RATIO"] = "0"
    return settings


async def _window(kind: str, scenario: Scenario, database: asyncpg.Connection, load: Load, found: Measured) -> Figures:
    """Return one window's figures: calls per second, p99 and CPU per call in milliseconds, memory in MB."""
    commands = await place(database, scenario.ask, scenario.calls, kind)
    await asyncio.sleep(QUIET_S)
    process = found.processes[kind]
    before = exact_cpu_seconds(process.process.pid)
    window = await load.closed(commands, scenario.in_flight)
    await asyncio.sleep(QUIET_S)  # acknowledgements and the export of the last spans
    cpu_s = exact_cpu_seconds(process.process.pid) - before
    return {
        "calls_per_s": scenario.calls / window.seconds,
        "p99_ms": statistics.quantiles(window.latencies, n=100, method="inclusive")[98] * 1000,
        "cpu_ms": cpu_s * 1000 / scenario.calls,
        "rss_mb": resident_bytes([process]) / _MB,
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median with at least 95 %, whatever the distribution; all if there are few."""
    ordered, count = sorted(values), len(values)
    beyond = [2 * sum(math.comb(count, each) for each in range(cut + 1)) / 2**count for cut in range(count // 2)]
    cut = max(0, sum(share <= 1 - SURE for share in beyond) - 1)
    return ordered[cut], ordered[count - 1 - cut]


def summary(found: Measured) -> dict[str, object]:
    """Return medians, ratios with their intervals, and which limits hold."""
    shown = {
        kind: {
            **{name: round(statistics.median(each[kind][name] for each in found.rounds), 3) for name in FIGURES},
            "ratio": {name: _ratio(found.ratios(kind, name)) for name in FIGURES} if kind != OFF else {},
        }
        for kind in KINDS
    }
    return {"rounds": len(found.rounds), "kinds": shown, "holds": holds(found)}


def holds(found: Measured) -> dict[str, bool]:
    """Return for each limit whether it holds: medians for stuck collectors, the interval's upper end for CPU."""
    stuck = {
        kind: statistics.median(found.ratios(kind, "calls_per_s")) >= LEAST_THROUGHPUT
        and statistics.median(found.ratios(kind, "p99_ms")) <= MOST_P99
        and found.rounds[-1][kind]["rss_mb"] - found.rounds[-1][SAMPLED]["rss_mb"] <= MOST_QUEUE_MB
        for kind in (HANGING, BLACK_HOLE)
    }
    return stuck | {
        UNSAMPLED: median_interval(found.ratios(UNSAMPLED, "cpu_ms"))[1] <= MOST_UNSAMPLED_CPU,
        SAMPLED: median_interval(found.ratios(SAMPLED, "cpu_ms"))[1] <= MOST_SAMPLED_CPU,
    }


def _ratio(ratios: Sequence[float]) -> dict[str, float]:
    low, high = median_interval(ratios)
    return {"median": round(statistics.median(ratios), 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    """Measure, and end with the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="windows of each kind")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of a window")
    arguments = parser.parse_args()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(arguments.rounds, arguments.calls))
    sys.stdout.write(json.dumps(summary(found)) + "\n")


if __name__ == "__main__":
    main()
