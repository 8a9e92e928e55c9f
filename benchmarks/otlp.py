"""Cost of exporting spans: to a collector that responds, hangs or drops connections, and with no call sampled.

`python -m benchmarks.otlp` runs one executor of each kind, on a target of its own. Throughput and p99 are measured one
after the other, CPU of executors that run at the same time (`benchmarks.measure`); each is compared with `off`
of the same round. The last line is one JSON object, in which `holds` says which limits hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import socket
import statistics
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import uvloop

from benchmarks.harness import CPU, Harness, Scenario, set_up_projects, start_all, stop_all
from benchmarks.measure import (
    CPU_MS,
    P99_MS,
    RATE,
    RSS_MB,
    Figures,
    Load,
    at_once,
    in_turn,
    median_interval,
    medians,
    ratio,
    ratios,
    warm,
)
from benchmarks.run import settings_of
from openapi_tool.local.executor import ExecutorProcess

_LENGTH = re.compile(rb"content-length: (\d{1,9})\r\n", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_FILLERS = 4  # more connections than an accept queue with backlog 0 takes


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each POST of a connection with 200."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            await reader.readexactly(int(length.group(1)) if length else 0)
            writer.write(_ANSWER)
    writer.close()


@asynccontextmanager
async def answering() -> AsyncIterator[int]:
    """Run a collector in its own process, so that its CPU is not counted as the load's; yield its port."""
    command = [sys.executable, "-m", "benchmarks.otlp", "--collector"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield int(await process.stdout.readline()) if process.stdout else 0
    finally:
        process.terminate()
        await process.wait()


@contextmanager
def hanging() -> Iterator[int]:
    """Accept connections and requests, and never respond; yield the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield listening.getsockname()[1]


@contextmanager
def black_hole() -> Iterator[int]:
    """Drop every attempt to connect, as a firewall does, by a full accept queue; yield the port."""
    with ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port: int = listening.getsockname()[1]
        for _ in range(_FILLERS):
            filler = sockets.enter_context(socket.socket())
            filler.settimeout(0)
            filler.connect_ex(("127.0.0.1", port))
        yield port


async def collect() -> None:
    """Run the collector that `answering` starts: print the port, answer until killed."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


OFF, UNSAMPLED, SAMPLED, HANGING, BLACK_HOLE = KINDS = "off", "unsampled", "sampled", "hanging", "black_hole"
ROUNDS, CALLS, WARM_CALLS = 12, 1_000, 300
MIN_THROUGHPUT, MAX_P99, MAX_UNSAMPLED_CPU, MAX_SAMPLED_CPU, MAX_QUEUE_MB = 0.95, 1.25, 1.03, 1.20, 30.0
"""Limits of ratios to `off`, and of the memory that spans for a stuck collector take."""

_AT_ONCE = (OFF, UNSAMPLED, SAMPLED)
_TELEMETRY = "OPENAPI_TOOL__TELEMETRY__"


@dataclass(slots=True)
class Measured:
    """The executors by kind, and their figures round by round: in turn (all kinds), at once (`_AT_ONCE`)."""

    processes: Mapping[str, ExecutorProcess]
    in_turn: list[dict[str, Figures]] = field(default_factory=list)
    at_once: list[dict[str, Figures]] = field(default_factory=list)

    def ratios(self, kind: str, figure: str) -> list[float]:
        """Return a figure of each round, divided by that of `off` in the same round."""
        return ratios(self.at_once if figure == CPU_MS else self.in_turn, kind, OFF, figure)


async def measure(rounds: int, calls: int, warm: int = WARM_CALLS) -> Measured:
    """Measure all kinds, each after `warm` calls that do not count. Raises Unanswered, ServerFailed."""
    async with AsyncExitStack() as stack:
        ports = {
            SAMPLED: await stack.enter_async_context(answering()),
            HANGING: stack.enter_context(hanging()),
            BLACK_HOLE: stack.enter_context(black_hole()),
        }
        ports[UNSAMPLED] = ports[SAMPLED]
        harness = await stack.enter_async_context(Harness())
        load = await stack.enter_async_context(Load.connect(harness.nats.url))
        scenario = Scenario("otlp", CPU.shape, calls, CPU.ask, warm=warm)
        return await _with(harness, load, ports, rounds, scenario)


async def _with(harness: Harness, load: Load, ports: Mapping[str, int], rounds: int, scenario: Scenario) -> Measured:
    database = await harness.database()
    await harness.clean(database)
    await set_up_projects(database, scenario.ask.projects)
    measured = Measured({kind: harness.process("executor", _settings(kind, scenario, ports)) for kind in KINDS})
    processes = list(measured.processes.values())
    await start_all(processes)
    try:
        await warm(measured.processes, scenario, database, load)
        measured.in_turn = await in_turn(measured.processes, rounds, scenario, database, load)
        chosen = {kind: measured.processes[kind] for kind in _AT_ONCE}
        measured.at_once = await at_once(chosen, rounds, scenario, database, load)
    finally:
        await stop_all(processes)
        await database.close()
    return measured


def _settings(kind: str, scenario: Scenario, ports: Mapping[str, int]) -> dict[str, str]:
    settings = {**settings_of("executor", scenario), "OPENAPI_TOOL__PROTOCOL__TARGET": kind}
    if kind != OFF:
        settings[f"{_TELEMETRY}OTLP_ENDPOINT"] = f"http://127.0.0.1:{ports[kind]}/v1/traces"
    if kind == UNSAMPLED:
        settings[f"{_TELEMETRY}TRACE_RATIO"] = "0"
    return settings


def summary(measured: Measured) -> dict[str, object]:
    """Return medians, ratios with their intervals, and which limits hold."""
    shown = {
        kind: {
            **medians(measured.in_turn, kind),
            **(medians(measured.at_once, kind) if kind in _AT_ONCE else {}),
            "ratio": {name: ratio(measured.ratios(kind, name)) for name in _compared(kind)},
        }
        for kind in KINDS
    }
    return {"rounds": len(measured.in_turn), "kinds": shown, "holds": holds(measured)}


def _compared(kind: str) -> tuple[str, ...]:
    if kind == OFF:
        return ()
    return (RATE, P99_MS, CPU_MS) if kind in _AT_ONCE else (RATE, P99_MS)


def holds(measured: Measured) -> dict[str, bool]:
    """Return for each limit whether it holds: medians for stuck collectors, the interval's upper end for CPU."""
    stuck = {
        kind: statistics.median(measured.ratios(kind, RATE)) >= MIN_THROUGHPUT
        and statistics.median(measured.ratios(kind, P99_MS)) <= MAX_P99
        and measured.in_turn[-1][kind][RSS_MB] - measured.in_turn[-1][SAMPLED][RSS_MB] <= MAX_QUEUE_MB
        for kind in (HANGING, BLACK_HOLE)
    }
    return stuck | {
        UNSAMPLED: median_interval(measured.ratios(UNSAMPLED, CPU_MS))[1] <= MAX_UNSAMPLED_CPU,
        SAMPLED: median_interval(measured.ratios(SAMPLED, CPU_MS))[1] <= MAX_SAMPLED_CPU,
    }


def main() -> None:
    """Measure, and end with the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="windows of each kind")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of a window")
    parser.add_argument("--collector", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collector:
        with suppress(KeyboardInterrupt):
            asyncio.run(collect())
        return
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(measure(arguments.rounds, arguments.calls))
    sys.stdout.write(json.dumps(summary(measured)) + "\n")


if __name__ == "__main__":
    main()
