"""CPU of calls with budgets that are less than 90 % used, compared with calls without budgets.

`python -m benchmarks.budgets` runs one executor of each kind, on a target of its own, all at the same time
(`benchmarks.measure`). The last line is one JSON object; its `holds` says whether the interval of the median ratio to
`off` ends at or below the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys

import uvloop

from benchmarks.harness import CPU, Harness, Scenario, set_up_projects, start_all, stop_all
from benchmarks.measure import CPU_MS, Figures, Load, at_once, medians, ratio, ratios, warm
from benchmarks.run import settings_of

OFF, PROJECT, ALL = KINDS = "off", "project", "all"
ROUNDS, CALLS, WARM_CALLS, MAX_RATIO = 30, 300, 300, 1.05
_UNREACHED_BUDGET = "1000000000"
_BUDGETS = {
    OFF: (),
    PROJECT: ("PROJECT_DAY_REQUESTS", "PROJECT_DAY_TOKENS"),
    ALL: (
        *("SESSION_REQUESTS", "SESSION_TOKENS", "AGENT_DAY_REQUESTS", "AGENT_DAY_TOKENS"),
        *("PROJECT_DAY_REQUESTS", "PROJECT_DAY_TOKENS", "PROJECT_MONTH_REQUESTS", "PROJECT_MONTH_TOKENS"),
    ),
}


async def measure(rounds: int, calls: int) -> list[dict[str, Figures]]:
    """Return the figures of each round. Raises Unanswered, ServerFailed."""
    scenario = Scenario("budgets", CPU.shape, calls, CPU.ask, warm=WARM_CALLS)
    async with Harness() as harness, Load.connect(harness.nats.url) as load:
        database = await harness.database()
        await harness.clean(database)
        await set_up_projects(database, scenario.ask.projects)
        processes = {kind: harness.process("executor", _settings(kind, scenario)) for kind in KINDS}
        await start_all(list(processes.values()))
        try:
            await warm(processes, scenario, database, load)
            return await at_once(processes, rounds, scenario, database, load)
        finally:
            await stop_all(list(processes.values()))
            await database.close()


def _settings(kind: str, scenario: Scenario) -> dict[str, str]:
    budgets = {f"OPENAPI_TOOL__BUDGETS__{name}": _UNREACHED_BUDGET for name in _BUDGETS[kind]}
    return {**settings_of("executor", scenario), "OPENAPI_TOOL__PROTOCOL__TARGET": kind, **budgets}


def summary(rounds: list[dict[str, Figures]]) -> dict[str, object]:
    """Return medians, the ratios to `off` with their intervals, and whether the limit holds."""
    shown: dict[str, object] = {OFF: medians(rounds, OFF)}
    for kind in KINDS[1:]:
        cpu_ratio = ratio(ratios(rounds, kind, OFF, CPU_MS))
        shown[kind] = {**medians(rounds, kind), "ratio": cpu_ratio, "holds": cpu_ratio["high"] <= MAX_RATIO}
    return {"rounds": len(rounds), "kinds": shown}


def main() -> None:
    """Measure, and end with the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of all kinds")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of each kind in a round")
    arguments = parser.parse_args()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds = runner.run(measure(arguments.rounds, arguments.calls))
    sys.stdout.write(json.dumps(summary(rounds)) + "\n")


if __name__ == "__main__":
    main()
