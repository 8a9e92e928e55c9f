"""Measurements under a steady load: recovery after restarts, rolling restarts, growth in half an hour.

`python -m tests.chaos.steady restarts|rolling|soak` prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import psutil

from openapi_tool.local.stack import EmbeddedStack
from tests.chaos.faults import Standard, restart_nats, restart_postgres
from tests.chaos.harness import Run
from tests.chaos.load import SLOW_S
from tests.chaos.run import Options, findings, prepare, settled, start, stop

PER_SECOND = 17.0
_WARM_S = 15.0
_WINDOW_S = 3
_RECOVERED_SHARE = 0.9
_SAMPLE_S = 10.0
_SOAK_WARM_UP_S = 120.0


async def under_load(
    seconds: float, replicas: int, work: Callable[[Run], Awaitable[dict[str, Any]]], per_second: float
) -> dict[str, Any]:
    """Do `work` while calls are placed; return its findings, and those of the checker that matter here."""
    options = Options(calls=round(seconds * per_second), per_second=per_second, replicas=replicas)
    with EmbeddedStack() as stack:
        run = await prepare(Standard(stack), options, AsyncExitStack())
        await start(run)
        load = asyncio.create_task(run.load.run(options.calls, options.per_second))
        try:
            found = await work(run)
            await load
            await settled(run)
        finally:
            load.cancel()
            await stop(run)
        checked = await findings(run, Standard.deadline_s)
    return {
        **found,
        **{name: checked[name] for name in ("calls", "lost", "doubled", "doorbells_missing", "max_delay_s")},
    }


async def restarts(run: Run) -> dict[str, Any]:
    """Return the seconds from the end of each restart until results are written at 90 % of the rate again."""
    found = {}
    for name, restart in {"postgres": restart_postgres, "nats": restart_nats}.items():
        await asyncio.sleep(_WARM_S)
        await restart(run)
        back_at = time.time()
        await asyncio.sleep(_WARM_S)
        found[f"{name}_recovered_after_s"] = await _recovered(run, back_at)
    return found


async def _recovered(run: Run, back_at: float) -> float | None:
    connection = await asyncpg.connect(run.addresses.dsn)
    rows = await connection.fetch(
        "select extract(epoch from created_at)::float8 - $1 as at from state.agent_inbox "
        "where message_type = 'tool_result'",
        back_at,
    )
    await connection.close()
    for tenth in range(round((_WARM_S - _WINDOW_S) * 10)):
        since = tenth / 10
        if sum(since <= row["at"] < since + _WINDOW_S for row in rows) >= _RECOVERED_SHARE * PER_SECOND * _WINDOW_S:
            return since
    return None


async def rolling(run: Run) -> dict[str, Any]:
    """Drain one replica after the other by SIGTERM, and start it again; return the durations."""
    took = []
    for replica in run.replicas:
        await asyncio.sleep(5)
        began = time.monotonic()
        code = await asyncio.to_thread(replica.process.stop)
        took.append(round(time.monotonic() - began, 2))
        if code:
            raise AssertionError(f"a drain ended with {code}")
        await asyncio.to_thread(replica.process.start)
    return {"drains_took_s": took, "slowest_upstream_s": SLOW_S}


def soak(minutes: float) -> Callable[[Run], Awaitable[dict[str, Any]]]:
    """Measure the least memory, open files and tasks of one replica in each minute, and the growth of memory."""

    async def sample(run: Run) -> dict[str, Any]:
        [replica] = run.replicas
        process, samples = psutil.Process(replica.process.process.pid), []
        for _ in range(round(minutes * 60 / _SAMPLE_S)):
            await asyncio.sleep(_SAMPLE_S)
            tasks = await asyncio.to_thread(replica.metric, "openapi_tool_event_loop_tasks")
            samples.append((process.memory_info().rss, process.num_fds(), int(tasks)))
        names = ("resident_bytes", "open_files", "tasks")
        columns = dict(zip(names, zip(*samples, strict=True), strict=True))
        settled_in = columns["resident_bytes"][min(round(_SOAK_WARM_UP_S / _SAMPLE_S), len(samples) - 1) :]
        minute = round(60 / _SAMPLE_S)
        least = {
            f"least_{name}": [min(column[start : start + minute]) for start in range(0, len(column), minute)]
            for name, column in columns.items()
        }
        return {"resident_growth": round(max(settled_in[-minute:]) / settled_in[0] - 1, 4)} | least

    return sample


def main() -> None:
    """Do one measurement and print its findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("restarts", "rolling", "soak"), help="what to do under the load")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of a soak")
    parser.add_argument("--per-second", type=float, default=PER_SECOND, help="calls per second in a soak")
    arguments = parser.parse_args()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    kinds: Mapping[str, tuple[float, int, Callable[[Run], Awaitable[dict[str, Any]]]]] = {
        "restarts": (4 * _WARM_S + 10, 3, restarts),
        "rolling": (45, 3, rolling),
        "soak": (arguments.minutes * 60, 1, soak(arguments.minutes)),
    }
    per_second = arguments.per_second if arguments.what == "soak" else PER_SECOND
    sys.stdout.write(json.dumps(asyncio.run(under_load(*kinds[arguments.what], per_second))) + "\n")


if __name__ == "__main__":
    main()
