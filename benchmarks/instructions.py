"""Bytecode instructions per call, which unlike CPU time do not depend on other work of the machine.

`python -m benchmarks.instructions` prints the functions that execute most of them, and a JSON object on the last line.
Work of C libraries, the kernel and the network is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import uvloop

from benchmarks.harness import CPU, TARGETS, Harness, Scenario, place, start_all, stop_all
from benchmarks.measure import Load
from benchmarks.run import Rounds, settings_of
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.servers import START_S, ServerFailed

CALLS, WARM_CALLS = 300, 80
_IN_FLIGHT = 8
"""Running calls: so few that each ends soon, although counting slows it down.

Calls of seconds would add what is done by time, such as heartbeats, and their number depends on the machine.
"""
_MODULE_VARIABLE, _FILE_VARIABLE = "BENCH_COUNTED", "BENCH_COUNTED_FILE"
_IDLE_S = 3.0
"""How long an idle process is counted, to know what it does by time, such as checks of its servers."""
_POLL_S = 0.05
_RESTART, _WRITE = signal.SIGWINCH, signal.SIGURG
"""Signals that `serve` leaves alone."""
_ROOTS = ("/site-packages/", f"/python{sys.version_info.major}.{sys.version_info.minor}/")

Counts = dict[str, int]


async def instructions(calls: int = CALLS, settings: Mapping[str, str] = MappingProxyType({})) -> dict[str, Counts]:
    """Return the instructions of `calls` calls by function, for `floor` and `executor`.

    What the process does by time, measured while it is idle, is not among them: on a slow machine it does more of that
    during the calls. `settings` are variables of the executor. Threads other than the event loop's are not counted.
    """
    modules = dict.fromkeys(TARGETS, ("benchmarks.instructions", _MODULE_VARIABLE))
    async with Harness(settings=settings, modules=modules) as harness, Load.connect(harness.nats.url) as load:
        database = await harness.database()
        try:
            rounds = Rounds(harness, load, database)
            return {kind: await _measured(kind, harness, rounds, load, calls) for kind in TARGETS}
        finally:
            await database.close()


async def _measured(kind: str, harness: Harness, rounds: Rounds, load: Load, calls: int) -> Counts:
    scenario = Scenario("instructions", CPU.shape, calls, CPU.ask, in_flight=_IN_FLIGHT, warm=WARM_CALLS)
    file = harness.stack.folder / f"instructions-{kind}.json"
    process = harness.process(kind, {**settings_of(kind, scenario), _FILE_VARIABLE: str(file)})
    await rounds.prepare(scenario.ask.projects)
    await start_all([process])
    try:
        await rounds.warm(kind, scenario)
        commands = await place(rounds.database, scenario.ask, calls, TARGETS[kind])
        idle, idle_s = await _counted(process, file, asyncio.sleep(_IDLE_S))
        busy, busy_s = await _counted(process, file, load.closed(commands, scenario.in_flight))
        return {name: round(max(0.0, count - idle.get(name, 0) * busy_s / idle_s)) for name, count in busy.items()}
    finally:
        await stop_all([process])


async def _counted(process: ExecutorProcess, file: Path, work: Awaitable[object]) -> tuple[Counts, float]:
    """Return the instructions that a process executes during `work`, by function, and the seconds that it takes."""
    await asyncio.to_thread(_send_signal, process, _RESTART, file)
    began = time.monotonic()
    await work
    seconds = time.monotonic() - began
    await asyncio.to_thread(_send_signal, process, _WRITE, file)
    counts: Counts = json.loads(await asyncio.to_thread(file.read_text))
    return counts, seconds


def _send_signal(process: ExecutorProcess, number: signal.Signals, file: Path) -> None:
    """Send a signal and wait until the process has handled it. Raises ServerFailed."""
    file.unlink(missing_ok=True)
    process.signal(number)
    give_up = time.monotonic() + START_S
    while not file.exists():
        if time.monotonic() > give_up:
            raise ServerFailed(f"{process.process.name} did not report its counters")
        time.sleep(_POLL_S)


class _Counter:
    """Counter by `sys.settrace`; `_RESTART` sets it to 0, `_WRITE` writes the counts by function to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts: Counter[CodeType] = Counter()

    def install(self) -> None:
        signal.signal(_RESTART, self._restart)
        signal.signal(_WRITE, self._write)
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        if frame.f_code.co_filename == __file__:
            return None  # do not count the counter
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "opcode":
            self._counts[frame.f_code] += 1
        return self._on_event

    def _restart(self, *_: object) -> None:
        self._counts.clear()
        self._write()

    def _write(self, *_: object) -> None:
        counts: Counter[str] = Counter()
        for code, count in list(self._counts.items()):  # a copy: the calls below are counted, too
            counts[f"{_short(code.co_filename)}:{code.co_firstlineno} {code.co_qualname}"] += count
        unfinished = self._file.with_suffix(".part")
        unfinished.write_text(json.dumps(counts))
        unfinished.rename(self._file)


def _short(path: str) -> str:
    """Return a file's path without the folder of its package."""
    for root in (*_ROOTS, f"{Path.cwd()}/"):
        if root in path:
            return path.rpartition(root)[2]
    return path


def main() -> None:
    """Measure. In a measured process, which `_MODULE_VARIABLE` marks, run its module and count."""
    if module := os.environ.get(_MODULE_VARIABLE):
        _Counter(Path(os.environ[_FILE_VARIABLE])).install()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS, help="how many calls of each")
    parser.add_argument("--lines", type=int, default=40, help="how many functions to show")
    parser.add_argument("--setting", action="append", default=[], metavar="VARIABLE=VALUE", help="of the executor")
    arguments = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in arguments.setting)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        counts = runner.run(instructions(arguments.calls, settings))
    for name, count in Counter(counts["executor"]).most_common(arguments.lines):
        sys.stdout.write(f"{count / arguments.calls:8.0f}  {name}\n")
    per_call = {kind: round(sum(counters.values()) / arguments.calls) for kind, counters in counts.items()}
    ratio = round(per_call["executor"] / per_call["floor"], 3)
    sys.stdout.write(json.dumps({"instructions_per_call": per_call, "ratio": ratio}) + "\n")


if __name__ == "__main__":
    main()
