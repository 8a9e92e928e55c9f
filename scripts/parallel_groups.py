"""Measure steps of several calls with immediate results: the rows that a worker defers, and a step's time (ADR 8).

One executor process serves them, with the default `executor.min_result_delay_s` and with 0 in turn. The worker
is that of `tests/kernel_conformance`, in this process; it suspends the turn 40 ms after its last command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from openapi_tool.local.caller import Caller, prepare_database
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from tests.conftest import AGENT, PROJECT, search_tool
from tests.kernel_conformance.worker import Worker
from tests.wire.conftest import World

_DATABASE = "groups"
_CALL = ("jina_search", {"quary": "no such argument"})  # refused without an upstream request
_MAX_DEFERRALS = 60  # above the kernel's: on a busy machine a turn would fail, and have no time to measure
_SETTINGS: tuple[dict[str, str], ...] = ({}, {"OPENAPI_TOOL__EXECUTOR__MIN_RESULT_DELAY_S": "0"})


async def _step(world: World, worker: Worker, calls: int) -> tuple[float, int]:
    """Return the milliseconds until a step has all its results, and the rows that were deferred."""
    began = time.monotonic()
    turn = await worker.ended(await worker.step(PROJECT, AGENT, [_CALL] * calls))
    took_ms = (time.monotonic() - began) * 1_000
    if (turn.head, len(turn.results)) != ("suspended", calls):
        raise RuntimeError(f"{len(turn.results)} of {calls} calls have a result; the turn is {turn.head}")
    deferred = "select count(*) from state.agent_inbox where agent_turn_id = $1 and retry_count > 0"
    return took_ms, await world.caller.database.fetchval(deferred, turn.turn_id)


async def _measure(stack: EmbeddedStack, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    await prepare_database(stack.postgres.dsn(), _DATABASE, kernel_schema())
    measured: dict[tuple[int, str], list[tuple[float, int]]] = {}
    async with Caller.connect(stack.postgres.dsn(_DATABASE), stack.nats.url) as caller:
        await caller.set_up_project(PROJECT, AGENT, [search_tool()])
        world = World(stack, caller, _DATABASE)
        for number in range(rounds):
            for settings in _SETTINGS:
                executor = stack.executor(f"executor-{number}", _DATABASE, settings)
                await asyncio.to_thread(executor.start)
                async with Worker.running(world, max_deferrals=_MAX_DEFERRALS) as worker:
                    await _step(world, worker, 1)  # opens connections
                    for calls in sizes:
                        figures = await _step(world, worker, calls)
                        measured.setdefault((calls, "0" if settings else "default"), []).append(figures)
                await asyncio.to_thread(executor.stop)
    return [_row(calls, delay, figures) for (calls, delay), figures in sorted(measured.items())]


def _row(calls: int, delay: str, figures: list[tuple[float, int]]) -> dict[str, Any]:
    times_ms, deferred = zip(*figures, strict=True)
    return {
        "calls": calls,
        "min_result_delay_s": delay,
        "step_ms_median": round(statistics.median(times_ms)),
        "step_ms_longest": round(max(times_ms)),
        "rows_deferred": sum(deferred),
        "rows": calls * len(figures),
    }


def main() -> None:
    """Print one row for each size and setting; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description="Steps of parallel calls, with and without delay (ADR 8).")
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 30, 100], help="calls in a step")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each size and setting")
    options = parser.parse_args()
    with EmbeddedStack() as stack:
        rows = asyncio.run(_measure(stack, options.calls, options.rounds))
    for row in rows:
        sys.stdout.write("  ".join(f"{name}={value}" for name, value in row.items()) + "\n")
    sys.stdout.write(json.dumps({"groups": rows}) + "\n")


if __name__ == "__main__":
    main()
