"""Measure the results of calls whose executor is killed twice while it runs them, by SIGKILL or by a poison call.

A command of which two runs were lost with their executor is a suspect, of which few run at a time
(`kernel/jetstream/command_runner.py`).
`python -m tests.chaos.suspects [--poison]` prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.servers import ServerFailed
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from tests.chaos.fail_points import DEATHS, FOLDER_VARIABLE, KILLER
from tests.chaos.harness import DATABASE, EXECUTOR, RECORDING
from tests.chaos.load import AGENT, PROJECT, TOOL
from tests.support import dsn_of, make_role

CALLS, UPSTREAM_S, TIMEOUT_S, POLL_S = 40, 3.0, 60.0, 0.1


async def measure(*, poison: bool) -> dict[str, Any]:
    """Kill the executor twice while all calls run (or let a poison call kill it), restart it, count results."""
    with EmbeddedStack() as stack, TemporaryDirectory() as folder:
        await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema())
        await make_role(stack.postgres.dsn(DATABASE))
        stack.upstream.rules({"answer": RECORDING, "delay_s": UPSTREAM_S})
        settings = {"PG_DSN": dsn_of(stack, DATABASE), FOLDER_VARIABLE: folder, "OPENAPI_TOOL__CACHE__TTL_S": "0"}
        executor = stack.executor("executor", DATABASE, settings, module=EXECUTOR)
        async with Caller.connect(stack.postgres.dsn(DATABASE), stack.nats.url) as caller:
            await caller.set_up_project(PROJECT, AGENT, [TOOL])
            await asyncio.to_thread(executor.start)
            queries = [f"slow {number}" for number in range(CALLS)]
            if poison:
                queries[CALLS // 2] = f"{KILLER} at once"
            placed_at = time.monotonic()
            calls = [await caller.place(PROJECT, AGENT, "jina_search", {"query": query}) for query in queries]
            restarting = asyncio.create_task(_keep_alive(executor))
            if not poison:
                await _kill_twice(executor, lambda: len(stack.upstream.requests()))
            results, last_s = await _results(caller, calls, placed_at)
            restarting.cancel()
            await asyncio.wait([restarting])
        await asyncio.to_thread(executor.stop)
        return {
            "calls": CALLS,
            "poison": poison,
            "executors_killed_by_it": _deaths(Path(folder, DEATHS)),
            "results": dict(results),
            "last_result_s": round(last_s, 1),
        }


def _deaths(journal: Path) -> int:
    return len(journal.read_text().splitlines()) if journal.exists() else 0


async def _keep_alive(executor: ExecutorProcess) -> None:
    while True:
        if not executor.process.alive:
            try:
                await asyncio.to_thread(executor.start)
            except ServerFailed:  # killed again while it started
                continue
        await asyncio.sleep(POLL_S)


async def _kill_twice(executor: ExecutorProcess, requests: Callable[[], int]) -> None:
    for run in (1, 2):
        while await asyncio.to_thread(requests) < run * CALLS:  # noqa: ASYNC110 - the double sends no event
            await asyncio.sleep(POLL_S)
        executor.signal(signal.SIGKILL)


async def _results(caller: Caller, calls: list[PlacedCall], placed_at: float) -> tuple[Counter[str], float]:
    """Return the number of results by status or code, and the seconds until the last one."""
    ids = [call.tool_call_id for call in calls]
    last_s, found = 0.0, Counter[str]()
    while found.total() < len(calls) and time.monotonic() - placed_at < TIMEOUT_S:
        rows = await caller.database.fetch(
            "select coalesce(content -> 'error' ->> 'code', content ->> 'status') as outcome from cards "
            "where metadata ->> 'type' = 'tool.result' and tool_call_id = any($1)",
            ids,
        )
        if len(rows) > found.total():
            found, last_s = Counter(row["outcome"] for row in rows), time.monotonic() - placed_at
        await asyncio.sleep(POLL_S)
    return found, last_s


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--poison", action="store_true", help="one of the calls kills every executor that runs it")
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    sys.stdout.write(json.dumps(asyncio.run(measure(poison=parser.parse_args().poison))) + "\n")


if __name__ == "__main__":
    main()
