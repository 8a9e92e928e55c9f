"""CPU of calls that budgets cover, below 90 % of them: pairs of windows with and without budgets.

`python -m benchmarks.budgets` runs one executor of each kind, on a target of its own, and loads them one after the
other, in an order that alternates. Each window is compared with `off` of the same round. The last line is one JSON
object; its `holds` says whether the interval of the median ratio ends at or below the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
from contextlib import AsyncExitStack

import uvloop

from benchmarks.calls import furnish, place
from benchmarks.harness import Stand, start_all, stop_all
from benchmarks.load import Load
from benchmarks.measure import exact_cpu_seconds
from benchmarks.rounds import settings_of
from benchmarks.scenarios import CPU, Scenario
from benchmarks.windows import SURE, median_interval

OFF, PROJECT, ALL = KINDS = "off", "project", "all"
ROUNDS, CALLS, WARM_CALLS, QUIET_S, MOST = 20, 1_000, 300, 0.3, 1.05
_PLENTY = "1000000000"
_BUDGETS = {
    OFF: (),
    PROJECT: ("PROJECT_DAY_REQUESTS", "PROJECT_DAY_TOKENS"),
    ALL: (
        *("SESSION_REQUESTS", "SESSION_TOKENS", "AGENT_DAY_REQUESTS", "AGENT_DAY_TOKENS"),
        *("PROJECT_DAY_REQUESTS", "PROJECT_DAY_TOKENS", "PROJECT_MONTH_REQUESTS", "PROJECT_MONTH_TOKENS"),
    ),
}

Cpu = dict[str, float]
"""CPU per call in milliseconds by kind, user and system."""


async def measure(rounds: int, calls: int) -> list[Cpu]:
    """Return the CPU of each round. Raises Unanswered, ServerFailed."""
    scenario = Scenario("budgets", CPU.shape, calls, CPU.ask, warm=WARM_CALLS)
    async with AsyncExitStack() as stack:
        stand = await stack.enter_async_context(Stand())
        load = await stack.enter_async_context(Load.connect(stand.nats.url))
        database = await stand.database()
        stack.push_async_callback(database.close)
        await stand.clean(database)
        await furnish(database, scenario.ask.projects)
        processes = {kind: stand.process("executor", _settings(kind, scenario)) for kind in KINDS}
        await start_all(list(processes.values()))
        try:
            for kind in KINDS:
                await load.closed(await place(database, scenario.ask, scenario.warm, kind), scenario.in_flight)
            found = []
            for number in range(rounds):
                cpu: Cpu = {}
                for kind in KINDS if number % 2 else reversed(KINDS):
                    commands = await place(database, scenario.ask, calls, kind)
                    await asyncio.sleep(QUIET_S)
                    before = exact_cpu_seconds(processes[kind].process.pid)
                    await load.closed(commands, scenario.in_flight)
                    await asyncio.sleep(QUIET_S)  # acknowledgements, and the last write of the journal
                    cpu[kind] = (exact_cpu_seconds(processes[kind].process.pid) - before) * 1000 / calls
                found.append(cpu)
                sys.stderr.write(f"round {number + 1} of {rounds}: {json.dumps(cpu)}\n")
        finally:
            await stop_all(list(processes.values()))
    return found


def _settings(kind: str, scenario: Scenario) -> dict[str, str]:
    budgets = {f"OPENAPI_TOOL__BUDGETS__{name}": _PLENTY for name in _BUDGETS[kind]}
    return {**settings_of("executor", scenario), "OPENAPI_TOOL__PROTOCOL__TARGET": kind, **budgets}


def summary(rounds: list[Cpu]) -> dict[str, object]:
    """Return medians, the ratios to `off` with their intervals, and whether the limit holds."""
    shown: dict[str, object] = {}
    for kind in KINDS:
        ratios = [cpu[kind] / cpu[OFF] for cpu in rounds]
        low, high = median_interval(ratios)
        shown[kind] = {
            "cpu_ms": round(statistics.median(cpu[kind] for cpu in rounds), 3),
            "ratio": round(statistics.median(ratios), 3),
            "interval": [round(low, 3), round(high, 3)],
            "holds": high <= MOST,
        }
    return {"rounds": len(rounds), "sure": SURE, "kinds": shown}


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
