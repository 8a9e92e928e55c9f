"""All cases by name; running a case beside the victim's calls, and checking its limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.placed_call import VERSION
from openapi_tool.local.stack import EmbeddedStack
from tests.hostile import answers, definitions, keys, rows, schemas, wire
from tests.hostile.case import Case
from tests.hostile.scene import Scene, Stage, Vitals
from tests.hostile.victim import CallOutcomes, Pace
from tests.support import delete_streams

_VICTIMS_LOG_BYTES = 1_000

CASES: Mapping[str, Case] = {
    **wire.CASES,
    **definitions.CASES,
    **keys.CASES,
    **definitions.CASES,
    **answers.CASES,
    **schemas.CASES,
    **keys.CASES,
    **rows.CASES,
    **rows.CASES,
    **wire.CASES,
}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The executor's vital signs, the outcomes of the victim's calls, and the number of attacks."""

    vitals: Vitals
    outcomes: CallOutcomes
    rounds: int


async def make_world(
    stack: EmbeddedStack, database: str, template: str | None, schema: str | None, version: str = VERSION
) -> None:
    """Create the database and the kernel's stream."""
    await prepare_database(stack.postgres.dsn(), database, schema, template)
    async with Caller.open(stack.postgres.dsn(database), version, servers=stack.nats.url) as caller:
        await delete_streams(caller)
        await caller.make_stream()


@asynccontextmanager
async def attacking(stage: Stage) -> AsyncIterator[Scene]:
    """Yield a new attacker; reset all measurements."""
    dsn, bus = stage.stack.postgres.dsn(stage.database), stage.stack.nats.url
    async with Caller.open(dsn, stage.version, servers=bus) as caller:
        yield await Scene.open(stage, caller)


async def replace_executor(stage: Stage) -> None:
    """Replace executor, stream and durable after a case that failed."""
    stage.executor.process.kill()
    await forget(stage)
    await asyncio.to_thread(stage.restart)


async def forget(stage: Stage) -> None:
    """Empty the command stream and delete the executor's streams: other tests use the same server."""
    dsn = stage.stack.postgres.dsn(stage.database)
    async with Caller.open(dsn, stage.version, servers=stage.stack.nats.url) as caller:
        await delete_streams(caller)
        await caller.make_stream()


async def play(case: Case, stage: Stage, pace: Pace, max_rounds: int = 1) -> CaseResult:
    """Repeat the attack until the victim has placed all its calls, at most `max_rounds` times.

    Raises the exceptions of the attack.
    """
    prepare(case, stage)
    async with attacking(stage) as scene:
        stage.victim.start(pace)
        until, rounds = time.monotonic() + pace.calls * pace.every_s, 0
        try:
            while not rounds or (rounds < max_rounds and time.monotonic() < until):
                rounds += 1
                await scene.begin_round()
                await case.attack(scene)
            await scene.settled()
        finally:
            outcomes = await asyncio.to_thread(stage.victim.outcomes)
    return CaseResult(stage.vitals(), outcomes, rounds)


def prepare(case: Case, stage: Stage) -> None:
    """Write the upstream's answers of a case to their files."""
    for name, response in case.answers().items():
        (stage.answers / name).write_bytes(response)


def broken_limits(case: Case, result: CaseResult) -> list[str]:
    """Return a line for each limit that the case exceeded; that of the log applies per round."""
    vitals, found = result.vitals, list(result.outcomes.lost)
    if not vitals.alive:
        found.append("the executor died")
    if vitals.peak_bytes > case.memory_bytes:
        found.append(f"{vitals.peak_bytes / 1e6:.0f} MB of memory, at most {case.memory_bytes / 1e6:.0f} are allowed")
    if vitals.lag_s > case.lag_s:
        found.append(f"the event loop stood still for {vitals.lag_s:.3f} s, at most {case.lag_s} are allowed")
    slowest_s = max(result.outcomes.latencies_s, default=0.0)
    if slowest_s > case.latency_s:
        found.append(f"the victim waited for {slowest_s:.1f} s, at most {case.latency_s} are allowed")
    max_log = case.log_bytes * result.rounds + _VICTIMS_LOG_BYTES * len(result.outcomes.latencies_s)
    if vitals.log_bytes > max_log:
        found.append(f"{vitals.log_bytes:,} bytes of log, at most {max_log:,} are allowed")
    return found
