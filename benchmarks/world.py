"""Extent and surroundings of the scenarios of `benchmarks.tenants`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import asyncpg

from benchmarks.harness import Ask, Demand, Harness, Outcome, Traffic, place, set_up_projects, start_all
from openapi_tool.local.executor import ExecutorProcess

Figures = dict[str, Any]
PREFIX = "OPENAPI_TOOL__"
SLOTS, DELAY_MS = 32, 500
OVERLOAD = 3
WARM_S = 5.0
CALL_LIMIT_S = 20
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Size:
    """Extent of the scenarios: seconds of a measurement, replicas, queued commands, projects, the durable's limit.

    `limit` is that of the upstream in requests a minute, which `sharing` replicas share.
    """

    seconds: float = 30.0
    replicas: int = 2
    backlog: int = 5_000
    projects: int = 50
    max_ack_pending: int = 5_000
    limit: int = 600
    sharing: int = 4

    @property
    def per_second(self) -> float:
        """Return the calls per second that all replicas can run."""
        return self.replicas * SLOTS * 1_000 / DELAY_MS


class World:
    """Harness on which each measurement begins with empty tables, an empty stream and new replicas."""

    def __init__(self, harness: Harness, database: asyncpg.Connection, size: Size) -> None:
        self.harness = harness
        self.database = database
        self.size = size

    @property
    def common(self) -> dict[str, str]:
        """Return the settings of all replicas."""
        return {f"{PREFIX}EXECUTOR__CONCURRENCY": str(SLOTS), f"{PREFIX}TOOLS__MAX_TIMEOUT_S": "600"}

    @asynccontextmanager
    async def serving(
        self, replicas: int, settings: Mapping[str, str], per_replica: Sequence[Mapping[str, str]] = ()
    ) -> AsyncIterator[list[ExecutorProcess]]:
        """Start replicas on empty servers; kill those in the list at the end. `per_replica` adds settings for each."""
        await self.harness.clean(self.database)
        await set_up_projects(self.database, self.size.projects)
        own = [{**self.common, **settings, **own_settings} for own_settings in per_replica or [{}] * replicas]
        started = [self.harness.process("executor", own_settings) for own_settings in own]
        try:
            await start_all(started)
            yield started
        finally:
            for replica in started:
                if replica.process.alive:
                    await asyncio.to_thread(replica.process.kill)

    async def measure(self, *demands: Demand, settings: Mapping[str, str] = NO_SETTINGS) -> list[Outcome]:
        """Return the outcome of each demand on new replicas."""
        async with self.serving(self.size.replicas, settings), Traffic.connect(self.harness.nats.url) as traffic:
            asks = [Ask(delay_ms=DELAY_MS, projects=demand.projects, first=demand.first) for demand in demands]
            placed = [
                (demand, await place(self.database, ask, demand.count, "jina"))
                for demand, ask in zip(demands, asks, strict=True)
            ]
            return await traffic.run(placed, self.size.seconds, WARM_S)

    def one_a_second(self) -> Demand:
        """Return the demand of a quiet project, number 1: one call a second."""
        return Demand(int(self.size.seconds), 1.0, first=1, wait=True)

    def too_much(self, projects: int) -> Demand:
        """Return three times the demand that can be served, of `projects` projects in turn, until the window ends."""
        per_second = OVERLOAD * self.size.per_second
        return Demand(int(per_second * (self.size.seconds + WARM_S)), per_second, projects)


def between(counted: Mapping[str, Any], since: float, until: float) -> int:
    """Return the number of requests served from `since` to `until`, in whole seconds."""
    return sum(number for second, number in counted["served"].items() if int(since) <= int(second) < int(until))
