"""Scenarios of `make bench-tenants` with a limit of the upstream and a demand of three times that limit.

The double counts the requests of each key in a sliding window of 60 s, and answers those above the limit with 429.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks.calls import Ask, Demand, Traffic, place
from benchmarks.double import MINUTE_S
from benchmarks.shifted import SHIFT_VARIABLE
from openapi_tool.bus.storage import LIMITS
from openapi_tool.local.executor import ExecutorProcess

if TYPE_CHECKING:
    from benchmarks.tenants import World

Figures = dict[str, Any]
Act = Callable[["World", list[ExecutorProcess]], Awaitable[None]]
"""Function that changes the replicas in the middle of a run."""

_OVERLOAD, _PROJECTS, _DELAY_MS = 3, 10, 200
_CALL_LIMIT_S = 20
_PREFIX = "OPENAPI_TOOL__"
_STEADY_PER_S, _HEADROOM = 50, 2
_WINDOW_BEGINS_S, _WINDOW_S = 5, 10
"""Start of the window in which the rate after a change is measured, and its length, in seconds."""

_CLOCKS_S = 5.0


async def limit(world: World) -> Figures:
    """Let replicas share a limit at a demand of three times it."""
    return await _run(world)


async def kill(world: World) -> Figures:
    """Kill a replica in the middle; `after_5_s` is the use of the limit from 5 s to 15 s after that."""

    async def kill_one(_: World, replicas: list[ExecutorProcess]) -> None:
        await asyncio.to_thread(replicas.pop().process.kill)

    return await _run(world, kill_one)


async def start(world: World) -> Figures:
    """Start two more replicas in the middle."""

    async def start_two(world: World, replicas: list[ExecutorProcess]) -> None:
        for _ in range(2):
            replicas.append(world.harness.process("executor", {**world.common, **_settings(world)}))
            await asyncio.to_thread(replicas[-1].start)

    return await _run(world, start_two)


async def clocks(world: World) -> Figures:
    """Set the clocks of the replicas 5 s apart."""
    number = world.size.sharing
    shifts = [_CLOCKS_S * (at / max(1, number - 1) - 0.5) for at in range(number)]
    return await _run(world, per_replica=[{SHIFT_VARIABLE: str(shift)} for shift in shifts])


async def plenty(world: World) -> Figures:
    """Place calls at a steady rate within the limit; return the KV operations per call."""
    size = world.size
    demand = Demand(int(_STEADY_PER_S * size.seconds), _STEADY_PER_S, _PROJECTS, wait=True)
    settings = _settings(world) | {
        f"{_PREFIX}LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(int(_HEADROOM * _STEADY_PER_S * MINUTE_S))
    }
    async with world.serving(size.sharing, settings), Traffic.connect(world.harness.nats.url) as traffic:
        placed = await place(world.database, Ask(delay_ms=_DELAY_MS, projects=_PROJECTS), demand.count, "jina")
        operations = await traffic.operations(LIMITS.bucket)
        [outcome] = await traffic.run([(demand, placed)], size.seconds, 0.0)
    return {
        "calls": demand.count,
        "unanswered": outcome.unanswered(),
        "kv_operations": len(operations),
        "kv_operations_per_call": round(len(operations) / demand.count, 3),
    }


LIMITED: Mapping[str, Callable[[World], Awaitable[Figures]]] = MappingProxyType(
    {"limit": limit, "kill": kill, "start": start, "clocks": clocks, "plenty": plenty}
)


def _settings(world: World) -> dict[str, str]:
    return {
        f"{_PREFIX}LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(world.size.limit),
        f"{_PREFIX}TOOLS__MAX_TIMEOUT_S": str(_CALL_LIMIT_S),
    }


async def _run(world: World, act: Act | None = None, per_replica: Sequence[Mapping[str, str]] = ()) -> Figures:
    """Return the counters of the double, and the shares of the replicas in the last 60 s.

    `could_have_been_served` is the part of the requests refused early that the limit would have allowed: all that it
    allowed and that was not sent.
    """
    size, changed_at = world.size, 0.0
    demand = Demand(int(_OVERLOAD * size.limit * size.seconds / MINUTE_S), _OVERLOAD * size.limit / MINUTE_S, _PROJECTS)
    async with (
        world.serving(size.sharing, _settings(world), per_replica) as replicas,
        Traffic.connect(world.harness.nats.url) as traffic,
    ):
        placed = await place(world.database, Ask(delay_ms=_DELAY_MS, projects=_PROJECTS), demand.count, "jina")
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
        "served": _between(counted, began, began + size.seconds),
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
        rate = _between(counted, since, until) / (until - since) if until > since else None
        result["after_5_s"] = rate and round(rate * MINUTE_S / size.limit, 3)
    return result


def _between(counted: Mapping[str, Any], since: float, until: float) -> int:
    """Return the requests that were served in a time, by whole seconds."""
    return sum(number for second, number in counted["served"].items() if int(since) <= int(second) < int(until))
