"""`make chaos`: a steady load on three replicas while everything around them fails, then a check of what is left.

The last line printed is one JSON object; the exit code is 0 only if nothing was lost or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats

from openapi_tool.local.caller import prepare_database
from openapi_tool.local.fail_points import FOLDER_VARIABLE
from openapi_tool.local.server import free_port
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.protocol.subject import default_durable
from tests.chaos.checker import COMMANDS, check
from tests.chaos.faults import FAULTS, Replica, Run, note_deaths, schedule, torment
from tests.chaos.load import Journal, Load
from tests.role import dsn_of, make_role

DATABASE, DURABLE = "chaos", default_durable("v1r4", "jina")
EXECUTOR = "openapi_tool.local.executor"
_SETTLE_S = 90.0
_QUIET_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is like; a seed gives the same schedule of faults again.

    The load goes on for at most `hit_all_within_s` more seconds, until every kind has hit a running call.
    """

    calls: int = 1000
    per_second: float = 17.0
    replicas: int = 3
    every_s: tuple[float, float] = (1.5, 3.0)
    seed: int = 1
    kinds: tuple[str, ...] = tuple(FAULTS)
    executor: str = EXECUTOR
    hit_all_within_s: float = 0.0


async def chaos(stack: EmbeddedStack, options: Options) -> dict[str, Any]:
    """Run and check; the findings with the faults that were fired."""
    run = await prepare(stack, options)
    began = time.monotonic()
    await _with_faults(run, options)
    return {
        **await findings(run),
        "faults": run.faults,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
    }


async def prepare(stack: EmbeddedStack, options: Options) -> Run:
    """A database, replicas that are not yet started, and a load that is not yet placed."""
    folder = stack.folder / f"chaos-{options.seed}-{time.monotonic_ns()}"
    folder.mkdir()
    await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema())
    await make_role(stack.postgres.dsn(DATABASE))
    journal = Journal(folder / "journal")
    load = Load(stack.postgres.dsn(DATABASE), stack.nats.url, journal, _random(options))
    run = Run(stack, DATABASE, folder, [], load, journal, _random(options))
    run.replicas = [_replica(stack, folder, number, options) for number in range(options.replicas)]
    stack.upstream.forget()
    await run.rules()
    await load.prepare()
    return run


async def findings(run: Run) -> dict[str, Any]:
    """What the checker says."""
    note_deaths(run.folder, run.journal)
    stack = run.stack
    return await check(stack.postgres.dsn(run.database), stack.nats.url, run.journal.path, stack.upstream.requests())


def _random(options: Options) -> random.Random:
    return random.Random(options.seed)  # noqa: S311 - a schedule, no secret


def _replica(stack: EmbeddedStack, folder: Path, number: int, options: Options) -> Replica:
    port = free_port()
    settings: Mapping[str, str] = {
        FOLDER_VARIABLE: str(folder),
        "OPENAPI_TOOL__HEALTH__PORT": str(port),
        "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "SEARCH_API_KEY",
        "PG_DSN": dsn_of(stack, DATABASE),
    }
    return Replica(stack.executor(f"{folder.name}-{number}", DATABASE, settings, module=options.executor), port)


async def _with_faults(run: Run, options: Options) -> None:
    await start(run)
    keeper = asyncio.create_task(run.keep_replicas_alive())
    tormentor = asyncio.create_task(torment(run, schedule(_random(options), options.every_s, options.kinds)))
    try:
        await run.load.run(options.calls, options.per_second)
        give_up = time.monotonic() + options.hit_all_within_s
        while run.hit != set(options.kinds) and time.monotonic() < give_up:
            await run.load.run(round(options.per_second), options.per_second)
        tormentor.cancel()
        await asyncio.wait([tormentor, *run.background])
        await run.rules()
        await settled(run)
    finally:
        keeper.cancel()
        tormentor.cancel()
        await asyncio.wait([keeper, tormentor])
        await stop(run)
    if not tormentor.cancelled() and (error := tormentor.exception()):
        raise error


async def start(run: Run) -> None:
    """Start all replicas."""
    await asyncio.gather(*(asyncio.to_thread(replica.process.start) for replica in run.replicas))


async def stop(run: Run) -> None:
    """Stop all replicas and the load."""
    for replica in run.replicas:
        await asyncio.to_thread(replica.process.stop)
    await run.load.close()


async def settled(run: Run) -> None:
    """Wait until no command is left, and for a while longer."""
    client = await nats.connect(run.stack.nats.url)
    give_up = time.monotonic() + _SETTLE_S
    try:
        while time.monotonic() < give_up:
            info = await client.jetstream().consumer_info(COMMANDS, DURABLE)
            if not info.num_pending and not info.num_ack_pending:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(_QUIET_S)
    finally:
        await client.close()


def main() -> None:
    """Run, print the findings, exit with 0 only if nothing was lost or doubled."""
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # its client says at length that a server is away
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=10_000, help="calls to place")
    parser.add_argument("--per-second", type=float, default=17.0, help="calls placed a second")
    parser.add_argument("--seed", type=int, default=1, help="a schedule of faults")
    parser.add_argument("--only", nargs="*", default=sorted(FAULTS), choices=sorted(FAULTS), help="kinds of faults")
    arguments = parser.parse_args()
    options = Options(
        calls=arguments.calls, per_second=arguments.per_second, seed=arguments.seed, kinds=tuple(arguments.only)
    )
    with EmbeddedStack() as stack:
        found = asyncio.run(chaos(stack, options))
    counts = {name: len(found[name]) for name in ("lost", "doubled")}
    named = {f"{name}_calls": found[name] for name in counts}
    sys.stdout.write(json.dumps({**found, **counts, **named}) + "\n")
    sys.exit(any(counts.values()))


if __name__ == "__main__":
    main()
