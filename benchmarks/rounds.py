"""Run scenarios alternately on floor and executor, so that other load of the machine affects both."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import asyncpg

from benchmarks import floor
from benchmarks.calls import Ask, Command, place, set_up_projects
from benchmarks.harness import TARGETS, Harness, start_all, stop_all
from benchmarks.load import Load, Window
from benchmarks.measure import figures, measured, resident_bytes
from benchmarks.scenarios import Scenario
from openapi_tool.local.executor import ExecutorProcess

Figures = dict[str, float]
COUNTED_CALLS = 300
_QUIET_S = 0.3  # for acknowledgements of the calls before
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
        "OPENAPI_TOOL__EXECUTOR__MIN_ANSWER_S": str(scenario.min_answer_s),
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
