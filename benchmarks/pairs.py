"""Cost of a call on two executors in one run: this checkout beside another one, or beside itself with other settings.

`python -m benchmarks.pairs --other FOLDER` compares with the package in another checkout, on the same Python with
the same dependencies; `--other-python FILE` compares with another interpreter. `--setting NAME=VALUE` sets a variable
of this executor, `--other-setting` one of the other.
Both run at the same time, and each gets every second call, so that other work of the machine slows both alike.
The last line is one JSON object: medians over the rounds of both executors' CPU per call in milliseconds and memory in
MB, and the ratio this / other with an interval that holds its median with 95 %.

`python -m benchmarks.pairs --budgets` compares executors with budgets, less than 90 % used, with one without budgets
(`off`). All run at the same time, each on a target of its own. `holds` says whether the interval of the median ratio to
`off` ends at or below the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import uvloop

from benchmarks.harness import CPU, Ask, Harness, Scenario, set_up_projects, start_all, stop_all
from benchmarks.measure import (
    CPU_MS,
    P99_MS,
    RATE,
    RSS_MB,
    Figures,
    Load,
    at_once,
    in_turn,
    medians,
    ratio,
    ratios,
    warm,
)
from benchmarks.run import settings_of

THIS, OTHER = KINDS = "this", "other"
ROUNDS, CALLS, WARM_CALLS = 30, 400, 300


async def measure(
    environments: Mapping[str, Mapping[str, str]],
    rounds: int,
    calls: int,
    other_python: str = "",
    ask: Ask = CPU.ask,
    *,
    windows_in_turn: bool = False,
) -> list[dict[str, Figures]]:
    """Return the figures of each round by kind. Raises Unanswered, ServerFailed."""
    scenario = Scenario("pairs", CPU.shape, calls, ask, warm=WARM_CALLS)
    async with Harness() as harness, Load.connect(harness.nats.url) as load:
        database = await harness.database()
        await harness.clean(database)
        await set_up_projects(database, scenario.ask.projects)
        processes = {kind: harness.process("executor", environments[kind]) for kind in KINDS}
        if other_python:
            process = processes[OTHER].process
            process.command = [other_python, *process.command[1:]]
        await start_all(list(processes.values()))
        try:
            await warm(processes, scenario, database, load)
            measured = in_turn if windows_in_turn else at_once
            return await measured(processes, rounds, scenario, database, load)
        finally:
            await stop_all(list(processes.values()))
            await database.close()


def environments_of(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the variables of both executors."""
    common = settings_of("executor", CPU)
    this = {**common, **pairs_of(arguments.setting)}
    other = {name: value for name, value in common.items() if name not in arguments.unknown}
    other |= pairs_of(arguments.other_setting)
    if arguments.other:  # without PYTHONSAFEPATH the package in the working directory would be imported first
        other |= {"PYTHONPATH": arguments.other, "PYTHONSAFEPATH": "1"}
    return {
        kind: {**settings, "OPENAPI_TOOL__PROTOCOL__TARGET": kind} for kind, settings in ((THIS, this), (OTHER, other))
    }


def pairs_of(assignments: Sequence[str]) -> dict[str, str]:
    """Return the variables in `NAME=VALUE` assignments."""
    return {name: value for name, _, value in (assignment.partition("=") for assignment in assignments)}


def main() -> None:
    """Measure, and end with the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", default="", metavar="FOLDER", help="the other checkout; without it this one")
    parser.add_argument("--other-python", default="", metavar="FILE", help="the other's interpreter (of a venv)")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--other-setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--unknown", action="append", default=[], metavar="NAME", help="a setting that the other lacks")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of both executors")
    parser.add_argument(
        "--calls", type=int, help=f"calls of each in a round, by default {CALLS}; {BUDGET_CALLS} with --budgets"
    )
    parser.add_argument("--tool", choices=("search", "reader"), default=CPU.ask.tool)
    parser.add_argument("--size", type=int, default=CPU.ask.size, metavar="BYTES", help="of the upstream's response")
    parser.add_argument("--budgets", action="store_true", help="compare executors with budgets and without")
    parser.add_argument("--in-turn", action="store_true", help="run windows in turn: throughput and p99 instead of CPU")
    arguments = parser.parse_args()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if arguments.budgets:
            measured = runner.run(measure_budgets(arguments.rounds, arguments.calls or BUDGET_CALLS))
            sys.stdout.write(json.dumps(summary_of_budgets(measured)) + "\n")
            return
        environments = environments_of(arguments)
        rounds = runner.run(
            measure(
                environments,
                arguments.rounds,
                arguments.calls or CALLS,
                arguments.other_python,
                replace(CPU.ask, tool=arguments.tool, size=arguments.size),
                windows_in_turn=arguments.in_turn,
            )
        )
    compared = (RATE, P99_MS, RSS_MB) if arguments.in_turn else (CPU_MS, RSS_MB)
    summary = {
        "rounds": len(rounds),
        **{kind: medians(rounds, kind) for kind in KINDS},
        "ratio": {name: ratio(ratios(rounds, THIS, OTHER, name)) for name in compared},
    }
    sys.stdout.write(json.dumps(summary) + "\n")


OFF, PROJECT, ALL = BUDGET_KINDS = "off", "project", "all"
BUDGET_CALLS, _BUDGET_WARM_CALLS, MAX_RATIO = 300, 300, 1.05
_UNREACHED_BUDGET = "1000000000"
_BUDGETS = {
    OFF: (),
    PROJECT: ("PROJECT_DAY_REQUESTS", "PROJECT_DAY_TOKENS"),
    ALL: (
        *("SESSION_REQUESTS", "SESSION_TOKENS", "AGENT_DAY_REQUESTS", "AGENT_DAY_TOKENS"),
        *("PROJECT_DAY_REQUESTS", "PROJECT_DAY_TOKENS", "PROJECT_MONTH_REQUESTS", "PROJECT_MONTH_TOKENS"),
    ),
}


async def measure_budgets(rounds: int, calls: int) -> list[dict[str, Figures]]:
    """Return the figures of each round. Raises Unanswered, ServerFailed."""
    scenario = Scenario("budgets", CPU.shape, calls, CPU.ask, warm=_BUDGET_WARM_CALLS)
    async with Harness() as harness, Load.connect(harness.nats.url) as load:
        database = await harness.database()
        await harness.clean(database)
        await set_up_projects(database, scenario.ask.projects)
        processes = {kind: harness.process("executor", _settings(kind, scenario)) for kind in BUDGET_KINDS}
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


def summary_of_budgets(rounds: list[dict[str, Figures]]) -> dict[str, object]:
    """Return medians, the ratios to `off` with their intervals, and whether the limit holds."""
    shown: dict[str, object] = {OFF: medians(rounds, OFF)}
    for kind in BUDGET_KINDS[1:]:
        cpu_ratio = ratio(ratios(rounds, kind, OFF, CPU_MS))
        shown[kind] = {**medians(rounds, kind), "ratio": cpu_ratio, "holds": cpu_ratio["high"] <= MAX_RATIO}
    return {"rounds": len(rounds), "kinds": shown}


if __name__ == "__main__":
    main()
