"""Measure steps of parallel calls: deferred inbox rows, further steps of the model, and a step's time (ADR 8).

Executor processes serve them with their default settings, against the double with a delay for each request. The worker
is that of `tests/kernel_conformance`, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from tests.conftest import AGENT, PROJECT, search_tool
from tests.kernel_conformance.worker import Turn, Worker
from tests.wire.conftest import World

_DATABASE = "groups"
_DELAYS_MS = (0, 50, 300)
_MAX_DEFERRALS = 60  # above the kernel's: on a busy machine a turn would fail, and have no time to measure
_SETTINGS = {"OPENAPI_TOOL__CACHE__TTL_S": "0"}


def _calls(number: int, delay: str) -> list[tuple[str, Any]]:
    delays = _DELAYS_MS if delay == "mixed" else (int(delay),)
    return [("jina_search", {"query": f"delayed-{delays[place % len(delays)]} {place}"}) for place in range(number)]


async def _step(worker: Worker, calls: list[tuple[str, Any]]) -> tuple[float, Turn]:
    """Return the milliseconds until the turn is resumed, and the turn once none of its rows is left."""
    began = time.monotonic()
    turn = await worker.ended(await worker.step(PROJECT, AGENT, calls))
    if (turn.head, len(turn.results)) != ("resumed", len(calls)):
        raise RuntimeError(f"{len(turn.results)} of {len(calls)} calls have a result; the turn is {turn.head}")
    return (turn.ended_at - began) * 1_000, turn


async def _measure(stack: EmbeddedStack, options: argparse.Namespace) -> list[dict[str, Any]]:
    await prepare_database(stack.postgres.dsn(), _DATABASE, kernel_schema())
    stack.upstream.rules(
        *({"match": f"delayed-{ms} ", "answer": "s-post-json", "delay_s": ms / 1000} for ms in _DELAYS_MS)
    )
    rows = []
    async with AsyncExitStack() as exits:
        caller = await exits.enter_async_context(Caller.connect(stack.postgres.dsn(_DATABASE), stack.nats.url))
        await caller.set_up_project(PROJECT, AGENT, [search_tool()])
        for number in range(options.replicas):
            executor = stack.executor(f"executor-{number}", _DATABASE, _SETTINGS)
            await asyncio.to_thread(executor.start)
            exits.push_async_callback(asyncio.to_thread, executor.stop)
        world = World(stack, caller, _DATABASE)
        worker = await exits.enter_async_context(Worker.running(world, max_deferrals=_MAX_DEFERRALS))
        for _ in range(5):
            await _step(worker, _calls(4, "0"))  # opens connections
        for number, delay in itertools.product(options.calls, options.delay):
            steps = [await _step(worker, _calls(number, delay)) for _ in range(options.steps)]
            rows.append(_row(number, delay, options.replicas, steps))
            sys.stdout.write("  ".join(f"{name}={value}" for name, value in rows[-1].items()) + "\n")
            sys.stdout.flush()
    return rows


def _row(number: int, delay: str, replicas: int, steps: list[tuple[float, Turn]]) -> dict[str, Any]:
    times_ms, turns = zip(*steps, strict=True)
    reasons = Counter(reason for turn in turns for reason in turn.deferrals)
    return {
        "replicas": replicas,
        "calls": number,
        "upstream_ms": delay,
        "steps": len(steps),
        "steps_deferred": sum(bool(turn.deferrals) for turn in turns),
        "rows_deferred": dict(reasons),
        "step_ms_median": round(statistics.median(times_ms)),
        "step_ms_longest": round(max(times_ms)),
    }


def main() -> None:
    """Print one row for each size and delay; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description="Steps of parallel calls (ADR 8).")
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 2, 4, 8, 30], help="calls in a step")
    parser.add_argument("--delay", nargs="+", default=["0", "50", "300", "mixed"], help="upstream delays in ms")
    parser.add_argument("--replicas", type=int, default=1, help="executor processes")
    parser.add_argument("--steps", type=int, default=100, help="steps of each size and delay")
    options = parser.parse_args()
    with EmbeddedStack() as stack:
        rows = asyncio.run(_measure(stack, options))
    sys.stdout.write(json.dumps({"groups": rows}) + "\n")


if __name__ == "__main__":
    main()
