"""`make bench`: measure floor and executor in rounds, and report the figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import ssl
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.sax.saxutils import escape

import asyncpg
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import floor
from benchmarks.double import unique_query
from benchmarks.harness import (
    DEFAULT_RUNS,
    PROFILES,
    TARGETS,
    Ask,
    Command,
    Harness,
    Profile,
    Scenario,
    place,
    set_up_projects,
    start_all,
    stop_all,
)
from benchmarks.measure import Load, Window, figures, measured, resident_bytes
from benchmarks.without import PARTS
from openapi_tool.local.executor import ExecutorProcess

Figures = dict[str, float]
COUNTED_CALLS = 300
_QUIET_S = 0.3  # until the calls before are acknowledged
_LONGEST = "added_max_ms"


class Failed(Exception):
    """Some calls failed, so the figures would be meaningless."""


@dataclass(slots=True)
class ScenarioResult:
    """Figures of each round by `floor` and `executor`; `idle_rss_mb` is the executor's memory before any call."""

    scenario: Scenario
    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    idle_rss_mb: float = 0.0

    def medians(self, kind: str) -> Figures:
        """Return the median of every figure over all rounds; for the longest latency its maximum."""
        rounds = self.rounds.get(kind, [])
        middle = {name: statistics.median(figures[name] for figures in rounds) for name in next(iter(rounds), ())}
        return middle | {_LONGEST: max(figures[_LONGEST] for figures in rounds)} if rounds else middle

    def ratios(self) -> Figures:
        """Return executor / floor: the median over rounds of the ratio within a round."""
        pairs = list(zip(self.rounds.get("floor", []), self.rounds.get("executor", []), strict=False))
        return {
            name: statistics.median(executors[name] / floors[name] for floors, executors in pairs)
            for name in (pairs[0][0] if pairs else ())
            if all(floors[name] for floors, _ in pairs)
        }


def settings_of(kind: str, scenario: Scenario) -> dict[str, str]:
    """Return the environment of a process: defaults, except concurrency, minimum result delay and time limits."""
    if kind == "floor":
        return {floor.CONCURRENCY_VARIABLE: str(scenario.concurrency)}
    return {
        "OPENAPI_TOOL__EXECUTOR__CONCURRENCY": str(scenario.concurrency),
        "OPENAPI_TOOL__EXECUTOR__MIN_RESULT_DELAY_S": str(scenario.min_result_delay_s),
        "OPENAPI_TOOL__TOOLS__MAX_TIMEOUT_S": "600",
    }


class Rounds:
    """Measures scenarios on one harness."""

    def __init__(self, harness: Harness, load: Load, database: asyncpg.Connection) -> None:
        self._harness = harness
        self._load = load
        self.database = database

    async def scenario(self, scenario: Scenario, runs: int) -> ScenarioResult:
        """Run all rounds of a scenario. Raises Unanswered, Failed, ServerFailed."""
        result, runs = ScenarioResult(scenario), min(runs, scenario.runs)
        kinds = tuple(TARGETS)
        if scenario.shape == "backlog":
            for kind in kinds * runs:
                result.rounds.setdefault(kind, []).append(await self._backlog(kind, scenario))
            return result
        await self.prepare(scenario.ask.projects)
        processes = {kind: self._processes(kind, scenario) for kind in kinds}
        everything = [process for several in processes.values() for process in several]
        try:
            await start_all(everything)
            result.idle_rss_mb = resident_bytes(processes["executor"]) / 1e6
            for kind in kinds:
                await self.warm(kind, scenario)
            for _ in range(runs):
                for kind in kinds:
                    result.rounds.setdefault(kind, []).append(await self._round(kind, scenario, processes[kind]))
        finally:
            await stop_all(everything)
        await self._check()
        return result

    async def prepare(self, projects: int) -> None:
        """Empty tables and stream, and register projects, agents and tools."""
        await self._harness.clean(self.database)
        await set_up_projects(self.database, projects)

    def _processes(self, kind: str, scenario: Scenario) -> list[ExecutorProcess]:
        replicas = scenario.replicas
        return [self._harness.process(kind, settings_of(kind, scenario)) for _ in range(replicas)]

    async def warm(self, kind: str, scenario: Scenario) -> None:
        """Run the calls of a scenario that are not measured."""
        ask = scenario.ask
        commands = await place(self.database, ask, scenario.warm, TARGETS[kind])
        await self._load.closed(commands, scenario.in_flight)

    async def _round(self, kind: str, scenario: Scenario, processes: list[ExecutorProcess]) -> Figures:
        commands = await place(self.database, scenario.ask, scenario.calls, TARGETS[kind])
        await asyncio.sleep(_QUIET_S)
        async with measured(self._harness, kind, processes) as cost:
            window = await self._run(scenario, commands)
        return figures(window, cost, scenario.calls, scenario.ask.delay_ms)

    async def _run(self, scenario: Scenario, commands: list[Command]) -> Window:
        if scenario.shape == "open":
            window = await self._load.open(commands, scenario.per_second)
            window.seconds -= scenario.ask.delay_ms / 1000  # the upstream time of the last command does not count
            return window
        if scenario.shape == "burst":
            return await self._load.burst(commands)
        return await self._load.closed(commands, scenario.in_flight)

    async def _backlog(self, kind: str, scenario: Scenario) -> Figures:
        """Measure the first calls of a backlog; discard the rest."""
        await self.prepare(scenario.ask.projects)
        commands = await place(self.database, scenario.ask, scenario.waiting, TARGETS[kind])
        await self._load.enqueue(commands)
        [process] = processes = self._processes(kind, scenario)
        await asyncio.to_thread(process.start)
        try:
            await self._load.answers(scenario.warm)
            async with measured(self._harness, kind, processes) as cost:
                window = await self._load.answers(scenario.calls)
        finally:
            await asyncio.to_thread(process.process.kill)
            self._load.expect_none()
        await self._check()
        return figures(window, cost, scenario.calls, scenario.ask.delay_ms)

    async def _check(self) -> None:
        failed = await self.database.fetchval(
            "select content ->> 'error' from public.cards "
            "where metadata ->> 'type' = 'tool.result' and content ->> 'status' <> 'success' limit 1"
        )
        if failed is not None:
            raise Failed(failed)

    async def statements(self, ask: Ask) -> float:
        """Return SQL statements per call from PostgreSQL's log, including those of health checks."""
        await self.prepare(1)
        scenario = Scenario("statements", "closed", COUNTED_CALLS, ask)
        process = self._harness.process("executor", settings_of("executor", scenario), {"log_statement": "all"})
        await asyncio.to_thread(process.start)
        try:
            await self.warm("executor", scenario)
            before = self._harness.statements_logged()
            await self._round("executor", scenario, [process])
            return (self._harness.statements_logged() - before) / COUNTED_CALLS
        finally:
            await asyncio.to_thread(process.stop)

    async def idle(self, seconds: float) -> Figures:
        """Return the cost of an idle executor per second: CPU milliseconds, its own and the servers', and messages."""
        await self.prepare(1)
        process = self._harness.process("executor", {})
        await asyncio.to_thread(process.start)
        try:
            await asyncio.sleep(1)
            async with measured(self._harness, "executor", [process]) as cost:
                await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(process.stop)
        # One "call": the cost of the whole period.
        spent = {f"{name}_cpu_ms": cost.cpu_ms(name, 1) / seconds for name in ("subject", "nats", "postgres")}
        return spent | {"nats_sent": (cost.after.sent - cost.before.sent) / seconds, "rss_mb": cost.resident / 1e6}

    async def echo(self, calls: int) -> Figures:
        """Return the calls per second that load generator and NATS server reach if a call does no work."""
        await self.prepare(1)
        process = self._harness.process("floor", {floor.ECHO_VARIABLE: "1"})
        await asyncio.to_thread(process.start)
        try:
            return await self._round("floor", Scenario("echo", "closed", calls, Ask(delay_ms=0)), [process])
        finally:
            await asyncio.to_thread(process.stop)


def as_json(result: ScenarioResult) -> Mapping[str, object]:
    """Return medians, ratios and the number of rounds."""
    return {
        "rounds": len(result.rounds["executor"]),
        "idle_rss_mb": round(result.idle_rss_mb, 1),
        **{kind: _rounded(result.medians(kind)) for kind in result.rounds},
        "ratio": _rounded(result.ratios()),
    }


def _rounded(named: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in named.items()}


COLUMNS = {
    "calls_per_s": ("calls/s", 0),
    "cpu_ms": ("CPU ms", 2),
    "added_p50_ms": ("added p50", 1),
    "added_p95_ms": ("p95", 1),
    "added_p99_ms": ("p99", 1),
    "added_max_ms": ("max ms", 0),
    "rss_mb": ("RSS MB", 0),
    "nats_sent": ("NATS sent", 2),
    "nats_received": ("received", 2),
    "connections": ("upstream conn.", 2),
    "load_cpu_ms": ("load CPU", 2),
    "double_cpu_ms": ("double CPU", 2),
    "nats_cpu_ms": ("NATS CPU", 2),
    "postgres_cpu_ms": ("PG CPU", 2),
}
_RATIOS = ("calls_per_s", "cpu_ms", "added_p50_ms", "added_p95_ms", "added_p99_ms", "rss_mb", "nats_sent")
_PLOTS = {
    "cpu_ms": "CPU per call (ms)",
    "calls_per_s": "calls per second",
    "added_p99_ms": "added latency, p99 (ms)",
    "rss_mb": "resident memory (MB)",
}
_BAR, _LABELS, _WIDTH = 14, 210, 760
_COLOURS = {"floor": "#8fb3d9", "executor": "#d9822b"}


def show(results: Sequence[ScenarioResult], more: Mapping[str, Any]) -> None:
    """Print the table: floor, executor and their ratio for each scenario, medians over all rounds."""
    table = Table(title="medians over rounds; per call")
    table.add_column("scenario", no_wrap=True)
    table.add_column("")
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        for kind in result.rounds:
            table.add_row(result.scenario.name, kind, *_cells(result.medians(kind), COLUMNS))
        if ratios := result.ratios():
            table.add_row("", "ratio", *_cells(ratios, _RATIOS, 2), end_section=True)
    console = Console(width=200)
    console.print(table)
    for name, value in more.items():
        console.print(f"{name}: {value}")


def _cells(figures: Mapping[str, float], names: Iterable[str], places: int | None = None) -> list[str]:
    """Return a cell for each column, empty for a figure that is not requested or missing."""
    shown = figures.keys() & set(names)
    return [
        f"{figures[name]:.{default_places if places is None else places}f}" if name in shown else ""
        for name, (_, default_places) in COLUMNS.items()
    ]


def plot(results: Sequence[ScenarioResult], folder: Path) -> None:
    """Write one SVG file with bars for each figure."""
    folder.mkdir(exist_ok=True)
    for name, title in _PLOTS.items():
        bars = [
            (f"{result.scenario.name} ({kind})", kind, result.medians(kind)[name])
            for result in results
            for kind in result.rounds
        ]
        (folder / f"{name}.svg").write_text(_bars(title, bars), encoding="utf-8")


def _bars(title: str, bars: Sequence[tuple[str, str, float]]) -> str:
    height = (len(bars) + 2) * (_BAR + 4)
    largest = max([value for _, _, value in bars] + [1e-9])
    rows = [
        row
        for number, (label, kind, value) in enumerate(bars, start=1)
        for row in _bar(number * (_BAR + 4), label, kind, value, max(value, 0) / largest)
    ]
    size = f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    heading = f'<text x="4" y="{_BAR}" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, heading, *rows, "</svg>\n"])


def _bar(top: int, label: str, kind: str, value: float, share: float) -> list[str]:
    width = max(1, round(share * (_WIDTH - _LABELS - 70)))
    base = top + _BAR - 3
    return [
        f'<text x="{_LABELS - 6}" y="{base}" text-anchor="end">{escape(label)}</text>',
        f'<rect x="{_LABELS}" y="{top}" width="{width}" height="{_BAR}" fill="{_COLOURS[kind]}"/>',
        f'<text x="{_LABELS + width + 4}" y="{base}">{value:.2f}</text>',
    ]


OUT = Path(__file__).parent / "out"
_ECHO_CALLS = 8_000
_IDLE_S = 10.0
_CONNECTIONS, _REQUESTS = 32, 8_000
_SIZE = 2_000
_HOST = "s.jina.ai"


async def bench(
    scenarios: Sequence[Scenario],
    runs: int,
    *,
    extras: bool,
    without: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[ScenarioResult], dict[str, Any]]:
    """Measure scenarios one after the other; with `extras` also the limits of the benchmark, and SQL statements.

    `settings` are variables of the executors, which the floor does not read.
    """
    async with Harness(without, settings) as harness, Load.connect(harness.nats.url) as load:
        database = await harness.database()
        rounds = Rounds(harness, load, database)
        results, more = [], {}
        try:
            if extras:
                more = await _extras(harness, rounds)
            for number, scenario in enumerate(scenarios, start=1):
                _print_status(f"{number}/{len(scenarios)} {scenario.name}")
                results.append(await rounds.scenario(scenario, runs))
        finally:
            await database.close()
    return results, more


async def _extras(harness: Harness, rounds: Rounds) -> dict[str, Any]:
    _print_status("limits of load generator and double, cost of idling, SQL statements per call")
    echo = await rounds.echo(_ECHO_CALLS)
    return {
        "load_limit_calls_per_s": round(echo["calls_per_s"]),
        "double_limit_requests_per_s": round(await double_limit(harness)),
        "idle_per_s": {name: round(value, 2) for name, value in (await rounds.idle(_IDLE_S)).items()},
        "sql_statements": {tool: round(await rounds.statements(Ask(tool)), 2) for tool in ("search", "reader")},
    }


def _print_status(text: str) -> None:
    sys.stderr.write(text + "\n")


def _chosen(profile: Profile, only: Sequence[str]) -> list[Scenario]:
    """Return the scenarios of a profile, or the named ones of any profile. Exits on an unknown name."""
    if not only:
        return list(PROFILES[profile])
    known = {scenario.name: scenario for scenario in (*PROFILES["full"], *PROFILES[profile])}
    if unknown := set(only) - known.keys():
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [known[name] for name in only]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=tuple(PROFILES), default="standard", help="which scenarios")
    parser.add_argument("--runs", type=int, help="rounds of floor and executor; medians are shown")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these scenarios, of any profile")
    parser.add_argument("--without", choices=tuple(PARTS), help="disable a part of the executor")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="VARIABLE=VALUE",
        help="variable of the executors, such as OPENAPI_TOOL__POSTGRES__POOL_SIZE=4",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object to a file, too")
    return parser.parse_args()


def main() -> None:
    """Measure, show, plot, and end with the JSON object."""
    arguments = _arguments()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    scenarios = _chosen(arguments.profile, arguments.only)
    runs = arguments.runs or DEFAULT_RUNS[arguments.profile]
    quick = arguments.profile == "quick"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        extras = not quick and not arguments.only
        settings = dict(setting.split("=", 1) for setting in arguments.setting)
        measuring = bench(scenarios, runs, extras=extras, without=arguments.without, settings=settings)
        results, more = runner.run(measuring)
    result = {
        "profile": arguments.profile,
        "without": arguments.without,
        "settings": settings,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **more,
        "scenarios": {scenario.scenario.name: as_json(scenario) for scenario in results},
    }
    show(results, more)
    if not quick:
        plot(results, OUT)
    line = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")


class _Client(asyncio.Protocol):
    """Sends the next request as soon as a response is complete; `sent` holds the number of requests of all clients."""

    def __init__(self, sent: list[int], done: asyncio.Event) -> None:
        self._sent = sent
        self._done = done
        self._request = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        self._sent[0] += 1
        query = unique_query(0, _SIZE, self._sent[0])
        self._transport.write(f"GET /?q={query} HTTP/1.1\r\nHost: {_HOST}\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head = data.index(b"\r\n\r\n") + 4
            self._left = head + int(data[:head].rpartition(b"Content-Length: ")[2])
        self._left -= len(data)
        if self._left:
            return
        if self._sent[0] < _REQUESTS:
            self._send()
        else:
            self._transport.close()
            self._done.set()


async def double_limit(harness: Harness) -> float:
    """Return the limit of the double in requests per second, over several connections of a minimal client."""
    tls = ssl.create_default_context(cafile=harness.stack.certificates.ca)
    loop, sent, done = asyncio.get_running_loop(), [0], asyncio.Event()
    began = time.perf_counter()
    clients = [
        loop.create_connection(
            lambda: _Client(sent, done), "127.0.0.1", harness.upstream_port, ssl=tls, server_hostname=_HOST
        )
        for _ in range(_CONNECTIONS)
    ]
    opened = await asyncio.gather(*clients)
    await done.wait()
    seconds = time.perf_counter() - began
    for transport, _ in opened:
        transport.abort()
    return _REQUESTS / seconds


if __name__ == "__main__":
    main()
