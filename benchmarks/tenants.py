"""`make bench-tenants`: shares of projects and replicas that compete; one JSON object on the last line.

Each scenario runs real processes: NATS, PostgreSQL, the double, and replicas of the executor. Slots, not CPU, limit a
replica: it runs `SLOTS` calls at once, each of which takes `DELAY_MS`.

The double counts the requests of each key in a sliding window of 60 s, and answers those above the limit with 429.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import uvloop

from benchmarks import shifted
from benchmarks.double import MINUTE_S, Behaviour
from benchmarks.faults import FAULTS
from benchmarks.harness import Ask, Demand, Harness, Outcome, Traffic, place, project_id
from benchmarks.measure import exact_cpu_seconds
from benchmarks.shifted import SHIFT_VARIABLE
from benchmarks.world import (
    CALL_LIMIT_S,
    DELAY_MS,
    NO_SETTINGS,
    OVERLOAD,
    PREFIX,
    WARM_S,
    Figures,
    Size,
    World,
    between,
)
from openapi_tool.kernel.jetstream.leases import BUCKET
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.nats_records.record_store import LIMITS

Act = Callable[["World", list[ExecutorProcess]], Awaitable[None]]
"""Function that changes the replicas in the middle of a run."""

_OVER_LIMIT, _PROJECTS, _LIMITED_DELAY_MS = 3, 10, 200
"""Of the scenarios with a limit: demand as a multiple of it, projects, milliseconds of an upstream response."""

_STEADY_PER_S, _HEADROOM = 50, 2  # of `plenty`: calls per second, and the limit as a multiple of them
_WINDOW_BEGINS_S, _WINDOW_S = 5, 10
"""Start of the window in which the rate after a change is measured, and its length, in seconds."""

_CLOCKS_S = 5.0


async def limit(world: World) -> Figures:
    """Let replicas share a limit at a demand of three times it."""
    return await _run_limited(world)


async def kill(world: World) -> Figures:
    """Kill a replica in the middle; `after_5_s` is the use of the limit from 5 s to 15 s after that."""

    async def kill_one(_: World, replicas: list[ExecutorProcess]) -> None:
        await asyncio.to_thread(replicas.pop().process.kill)

    return await _run_limited(world, kill_one)


async def start(world: World) -> Figures:
    """Start two more replicas in the middle."""

    async def start_two(world: World, replicas: list[ExecutorProcess]) -> None:
        for _ in range(2):
            replicas.append(world.harness.process("executor", {**world.common, **_settings(world)}))
            await asyncio.to_thread(replicas[-1].start)

    return await _run_limited(world, start_two)


async def clocks(world: World) -> Figures:
    """Set the clocks of the replicas 5 s apart."""
    number = world.size.sharing
    shifts = [_CLOCKS_S * (at / max(1, number - 1) - 0.5) for at in range(number)]
    return await _run_limited(world, per_replica=[{SHIFT_VARIABLE: str(shift)} for shift in shifts])


async def plenty(world: World) -> Figures:
    """Place calls at a steady rate within the limit; return the KV operations per call."""
    size = world.size
    demand = Demand(int(_STEADY_PER_S * size.seconds), _STEADY_PER_S, _PROJECTS, wait=True)
    settings = _settings(world) | {
        f"{PREFIX}LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(int(_HEADROOM * _STEADY_PER_S * MINUTE_S))
    }
    async with world.serving(size.sharing, settings), Traffic.connect(world.harness.nats.url) as traffic:
        placed = await place(world.database, Ask(delay_ms=_LIMITED_DELAY_MS, projects=_PROJECTS), demand.count, "jina")
        operations = await traffic.operations(LIMITS.bucket.name)
        [outcome] = await traffic.run([(demand, placed)], size.seconds, 0.0)
    return {
        "calls": demand.count,
        "unanswered": outcome.unanswered(),
        "kv_operations": len(operations),
        "kv_operations_per_call": round(len(operations) / demand.count, 3),
    }


async def quiet(world: World) -> Figures:
    """Five projects demand 20 : 20 : 20 : 200 : 400 for a limit of 300; return the waits of the three quiet ones."""
    size = world.size
    rates = [share * size.limit / 300 / MINUTE_S for share in _QUIET_DEMANDS]
    demands = [Demand(max(1, int(rate * size.seconds)), rate, first=number) for number, rate in enumerate(rates)]
    async with (
        world.serving(size.sharing, _settings(world)),
        Traffic.connect(world.harness.nats.url) as traffic,
    ):
        placed = [
            (demand, await place(world.database, Ask(delay_ms=_LIMITED_DELAY_MS, first=number), demand.count, "jina"))
            for number, demand in enumerate(demands)
        ]
        began = time.time()
        outcomes = await traffic.run(placed, size.seconds, 0.0)
        counted = await world.harness.upstream_counters()
    waits = sorted(seconds for outcome in outcomes[:_QUIET] for seconds in outcome.latencies)
    used = _used(counted, began, size)
    return used | {f"quiet_{name}_s": round(waits[int(share * (len(waits) - 1))], 2) for name, share in _QUANTILES}


async def free_key(world: World) -> Figures:
    """Demand three times the limit of a key for which none is configured, on two replicas."""
    size = world.size
    demand = Demand(
        int(_OVER_LIMIT * size.limit * size.seconds / MINUTE_S), _OVER_LIMIT * size.limit / MINUTE_S, _PROJECTS
    )
    settings = {f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(CALL_LIMIT_S)}
    async with world.serving(2, settings), Traffic.connect(world.harness.nats.url) as traffic:
        placed = await place(world.database, Ask(delay_ms=_LIMITED_DELAY_MS, projects=_PROJECTS), demand.count, "jina")
        began = time.time()
        running = asyncio.create_task(traffic.run([(demand, placed)], size.seconds, 0.0))
        await asyncio.sleep(MINUTE_S)
        first = await world.harness.upstream_counters()
        await running
        counted = await world.harness.upstream_counters()
    later = {"answered_429_later": counted["refused"] - first["refused"]}
    return _used(counted, began, size) | later | {"requests_later": counted["requests"] - first["requests"]}


async def lone_429(world: World) -> Figures:
    """The double refuses one of the first requests of a key without a limit, with Retry-After 2; two calls a second."""
    demand = Demand(int(2 * world.size.seconds), 2.0, _PROJECTS)
    async with world.serving(2, {}), Traffic.connect(world.harness.nats.url) as traffic:
        placed = await place(world.database, Ask(delay_ms=_LIMITED_DELAY_MS, projects=_PROJECTS), demand.count, "jina")
        [outcome] = await traffic.run([(demand, placed)], world.size.seconds, 0.0)
        _, refused = await traffic.limits_by_replica()
        counted = await world.harness.upstream_counters()
    return {
        "calls": demand.count,
        "requests": counted["requests"],
        "answered_429": counted["refused"],
        "refused_early": sum(refused),
        "p95_s": round(outcome.p95(), 2),
        "max_s": round(max(outcome.latencies), 2),
    }


def _used(counted: Mapping[str, Any], began: float, size: Size) -> Figures:
    """Return what was served of a limit, and the longest time in seconds in which nothing was."""
    seconds = sorted(int(second) for second in counted["served"])
    allowed = size.limit * size.seconds / MINUTE_S
    return {
        "used": round(between(counted, began, began + size.seconds) / allowed, 3),
        "answered_429": counted["refused"],
        "most_in_60_s": counted["most_in_60_s"],
        "longest_gap_s": max((second - first for first, second in itertools.pairwise(seconds)), default=None),
    }


_QUIET_DEMANDS, _QUIET = (20, 20, 20, 200, 400), 3
_QUANTILES = ("p50", 0.5), ("p95", 0.95), ("max", 1.0)
_LONE_NUMBER = 10

LIMITED: Mapping[str, Callable[[World], Awaitable[Figures]]] = MappingProxyType(
    {
        "limit": limit,
        "kill": kill,
        "start": start,
        "clocks": clocks,
        "plenty": plenty,
        "quiet": quiet,
        "free-key": free_key,
        "lone-429": lone_429,
    }
)


def _settings(world: World) -> dict[str, str]:
    return {
        f"{PREFIX}LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(world.size.limit),
        f"{PREFIX}TOOLS__MAX_TIMEOUT_S": str(CALL_LIMIT_S),
    }


async def _run_limited(world: World, act: Act | None = None, per_replica: Sequence[Mapping[str, str]] = ()) -> Figures:
    """Return the counters of the double, and the shares of the replicas in the last 60 s.

    `could_have_been_served` is the unused rest of the limit, divided by the number of requests refused early.
    """
    size, changed_at = world.size, 0.0
    demand = Demand(
        int(_OVER_LIMIT * size.limit * size.seconds / MINUTE_S), _OVER_LIMIT * size.limit / MINUTE_S, _PROJECTS
    )
    async with (
        world.serving(size.sharing, _settings(world), per_replica) as replicas,
        Traffic.connect(world.harness.nats.url) as traffic,
    ):
        placed = await place(world.database, Ask(delay_ms=_LIMITED_DELAY_MS, projects=_PROJECTS), demand.count, "jina")
        began = time.time()
        publishing = asyncio.create_task(traffic.run([(demand, placed)], size.seconds, 0.0))
        if act:
            await asyncio.sleep(size.seconds / 2)
            await act(world, replicas)
            changed_at = time.time()
        await publishing
        shares, refused = await traffic.limits_by_replica()
        counted = await world.harness.upstream_counters()
    mean = sum(shares) / max(1, len(shares))
    result = {
        "allowed": round(size.limit * size.seconds / MINUTE_S),
        "served": between(counted, began, began + size.seconds),
        "answered_429": counted["refused"],
        "most_in_60_s": counted["most_in_60_s"],
        "least_of_share": round(min(shares, default=0) / max(1, mean), 3),
        "most_of_share": round(max(shares, default=0) / max(1, mean), 3),
    }
    unused = max(0, result["allowed"] - result["served"])
    result["used"] = round(result["served"] / result["allowed"], 3)
    result["refused_early"] = sum(refused)
    result["could_have_been_served"] = round(unused / max(1, sum(refused)), 3)
    if act:
        since = int(changed_at) + _WINDOW_BEGINS_S
        until = min(since + _WINDOW_S, int(began + size.seconds))
        rate = between(counted, since, until) / (until - since) if until > since else None
        result["after_5_s"] = rate and round(rate * MINUTE_S / size.limit, 3)
    return result


_MAX_HELD = 512  # the default of the setting
_BLOCKED_MS = 120_000  # longer than the scenario
_WEIGHTS = (1, 2, 4)


async def backlog(world: World) -> Figures:
    """Queue thousands of calls of project 0; place one a second of project 1 behind them."""
    queued, quiet = Demand(world.size.backlog), world.one_a_second()
    [alone] = await world.measure(quiet)
    [undisturbed] = await world.measure(queued)
    behind, disturbed = reversed(await world.measure(queued, quiet))
    throughput_kept = disturbed.answered.total() / undisturbed.answered.total()
    return _quiet(alone, behind) | {"queued": queued.count, "throughput_kept": round(throughput_kept, 3)}


async def flood(world: World) -> Figures:
    """Like `backlog`, with three times as many queued commands as the durable delivers unacknowledged."""
    queued, quiet = Demand(OVERLOAD * world.size.max_ack_pending), world.one_a_second()
    settings = {f"{PREFIX}NATS__MAX_ACK_PENDING": str(world.size.max_ack_pending)}
    [alone] = await world.measure(quiet, settings=settings)
    _, behind = await world.measure(queued, quiet, settings=settings)
    return _quiet(alone, behind) | {"queued": queued.count}


def _quiet(alone: Outcome, behind: Outcome) -> Figures:
    """Return the latency of the quiet project with and without the other one, and their ratio."""
    return {
        "p95_alone_s": round(alone.p95(), 3),
        "p95_behind_s": round(behind.p95(), 3),
        "p95_ratio": round(behind.p95() / alone.p95(), 2),
        "unanswered": behind.unanswered(),
    }


async def equal(world: World) -> Figures:
    """Projects of equal weight demand three times the calls that can be run."""
    return await _shares(world, [1.0] * world.size.projects, NO_SETTINGS)


async def weighted(world: World) -> Figures:
    """Three projects of weights 1, 2 and 4 demand three times the calls that can be run."""
    weights = {project_id(number): weight for number, weight in enumerate(_WEIGHTS)}
    return await _shares(world, _WEIGHTS, {f"{PREFIX}FAIRNESS__WEIGHTS": json.dumps(weights)})


async def _shares(world: World, weights: Sequence[float], settings: Mapping[str, str]) -> Figures:
    """Return each project's answered calls relative to its share: the least, the most and the standard deviation."""
    [outcome] = await world.measure(world.too_much(len(weights)), settings=settings)
    per_weight = outcome.answered.total() / sum(weights)
    shares = [outcome.answered[project_id(number)] / (per_weight * weight) for number, weight in enumerate(weights)]
    return {
        "answered": outcome.answered.total(),
        "of_capacity": round(outcome.answered.total() / world.size.per_second / world.size.seconds, 3),
        "least_of_share": round(min(shares), 3),
        "most_of_share": round(max(shares), 3),
        "deviation": round(statistics.pstdev(shares), 3),
    }


async def held(world: World) -> Figures:
    """A replica whose only slot is busy holds as many commands as it may; after SIGTERM another one runs them.

    `heartbeats_share` is the CPU that holding them takes, as a share of one core; `lease_writes` are the changes of the
    lease bucket until all are answered.
    """
    settings = {f"{PREFIX}EXECUTOR__CONCURRENCY": "1", f"{PREFIX}EXECUTOR__DRAIN_TIMEOUT_S": "1"}
    async with world.serving(1, settings) as [first], Traffic.connect(world.harness.nats.url) as traffic:
        blocker = await place(world.database, Ask(delay_ms=_BLOCKED_MS), 1, "jina")
        waiting = await place(world.database, Ask(delay_ms=DELAY_MS), _MAX_HELD, "jina")
        await traffic.queue(blocker)
        await asyncio.sleep(WARM_S)
        idle = await _cpu_share(first, world.size.seconds / 2)
        await traffic.queue(waiting)
        await asyncio.sleep(WARM_S)
        holding = await _cpu_share(first, world.size.seconds / 2)
        second = world.harness.process("executor", {f"{PREFIX}TOOLS__MAX_TIMEOUT_S": "600"})
        await asyncio.to_thread(second.start)  # before the first stops, as in a rolling update
        try:
            await asyncio.to_thread(first.stop)
            await traffic.answers(waiting)
        finally:
            await asyncio.to_thread(second.process.kill)
        return {
            "held": len(waiting),
            "heartbeats_share": round(holding - idle, 4),
            "handed_back": first.log_text().count("call.handed_back"),
            "hand_back_s": round(_logged_at(first, "drain.started") - _logged_at(first, "service.stopping"), 3),
            "unanswered": traffic.outcome(waiting, 0, math.inf).unanswered(),
            "lease_writes": await traffic.writes(f"KV_{BUCKET}"),
        }


async def _cpu_share(replica: ExecutorProcess, seconds: float) -> float:
    """Return the CPU time of a replica as a share of one core, over some seconds."""
    before, began = exact_cpu_seconds(replica.process.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    return (exact_cpu_seconds(replica.process.pid) - before) / (time.perf_counter() - began)


def _logged_at(replica: ExecutorProcess, action: str) -> float:
    """Return the time of a log line, in seconds since the epoch."""
    [line] = [line for line in replica.log_text().splitlines() if f'"action":"{action}"' in line]
    return datetime.fromisoformat(json.loads(line)["time"]).timestamp()


SCENARIOS: Mapping[str, Callable[[World], Awaitable[Figures]]] = {
    "backlog": backlog,
    "flood": flood,
    "equal": equal,
    "weighted": weighted,
    "held": held,
    **LIMITED,
    **{name: fault.run for name, fault in FAULTS.items()},
}


async def run(names: Sequence[str], size: Size) -> Figures:
    """Run scenarios one after the other; return the figures of each by its name."""
    results: Figures = {}
    unlimited = [name for name in names if name not in LIMITED and name not in FAULTS]
    if unlimited:
        await _run(Harness(), unlimited, size, results)
    for name in [name for name in LIMITED if name in names]:  # the double remembers the last minute
        behaviour = Behaviour(refused_number=_LONE_NUMBER) if name == "lone-429" else Behaviour(size.limit)
        await _run(_shifted(behaviour), [name], size, results)
    for name in [name for name in FAULTS if name in names]:
        await _run(_shifted(FAULTS[name].behaviour(size)), [name], size, results)
    return results


def _shifted(behaviour: Behaviour) -> Harness:
    return Harness(modules={"executor": (shifted.__name__, shifted.MODULE_VARIABLE)}, behaviour=behaviour)


async def _run(harness: Harness, names: Sequence[str], size: Size, results: Figures) -> None:
    async with harness:
        database = await harness.database()
        try:
            for name in names:
                sys.stderr.write(f"{name}: {(SCENARIOS[name].__doc__ or '').splitlines()[0]}\n")
                results[name] = await SCENARIOS[name](World(harness, database, size))
                sys.stderr.write(f"{json.dumps(results[name])}\n")
        finally:
            await database.close()


def main() -> None:
    """Run the chosen scenarios and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    for name, value in ((name, getattr(Size(), name)) for name in Size.__slots__):
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    names = arguments.pop("only")
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(run(names, Size(**arguments)))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
