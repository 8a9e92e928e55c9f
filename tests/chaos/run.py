"""Run replicas under load while faults are injected, then check every call.

The last line printed is one JSON object. The exit code is 0 only if none of the findings that the profile judges fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import nats

from openapi_tool.local.database import prepare_database
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.protocol.subjects import default_durable
from tests.chaos.checker import REACTION_S, check
from tests.chaos.fail_points import FOLDER_VARIABLE
from tests.chaos.faults import Standard, record_discarded, record_kills, schedule
from tests.chaos.files import Files
from tests.chaos.harness import DATABASE, NotInstalled, Profile, Replica, Run, inject_faults
from tests.chaos.limited import Limited
from tests.chaos.load import Journal, Load
from tests.chaos.profiles import Admin, Bouncer, Clocks, Cluster, Failover, FailoverHosts
from tests.chaos.shape import Shape
from tests.support import dsn_of, make_role

PROFILES: Mapping[str, type[Profile]] = {
    "standard": Standard,
    "cluster": Cluster,
    "failover": Failover,
    "pgbouncer": Bouncer,
    "clocks": Clocks,
    "admin": Admin,
    "limits": Limited,
    "shape": Shape,
    "failover-hosts": FailoverHosts,
    "files": Files,
}
_QUIET_S = 1.0
_PROBE_S, _PROBE_TIMEOUT = 0.25, aiohttp.ClientTimeout(total=1.0)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run; a seed gives the same schedule of faults again.

    `calls`: at least this many are placed. The load continues until every fault of `kinds` was injected; in an endless
    profile until each has hit a running call, for at most `hit_all_within_s`. `outage_s`: duration of an outage.
    `rest_s`: pause between faults, by default the profile's; `every_s`: its range in an endless profile. `settle_s`:
    maximum time for the remaining commands after the load. `keep`: folder for copies of journal and logs. `version`: of
    the kernel's protocol.
    """

    calls: int = 1000
    per_second: float = 17.0
    replicas: int | None = None
    every_s: tuple[float, float] = (1.5, 3.0)
    seed: int = 1
    kinds: tuple[str, ...] = ()
    executor: str | None = None
    hit_all_within_s: float = 0.0
    profile: str = "standard"
    outage_s: float = 15.0
    rest_s: float | None = None
    settle_s: float = 90.0
    keep: Path | None = None
    version: ProtocolVersion = DEFAULT_VERSION


async def chaos(stack: EmbeddedStack, options: Options) -> dict[str, Any]:
    """Run, check, and return the findings and faults. Raises NotInstalled, ValueError for an unknown fault."""
    if options.version != DEFAULT_VERSION and options.profile != "standard":
        raise ValueError(f"only the standard profile has a kernel of {options.version}")
    profile = PROFILES[options.profile](stack)
    if unknown := set(options.kinds) - set(profile.faults()):
        raise ValueError(f"{options.profile} has no {sorted(unknown)}, only {sorted(profile.faults())}")
    async with AsyncExitStack() as exits:
        run = await prepare(profile, options, exits)
        began = time.monotonic()
        await _with_faults(run, profile, options)
        if options.keep is not None:
            _save_logs(run, options.keep)
        found = await findings(run, profile.deadline_s, profile.per_minute)
    seconds = round(time.monotonic() - began)
    return {
        "profile": options.profile,
        **found,
        "faults": run.faults,
        "seed": options.seed,
        "seconds": seconds,
        "failed": failures(found, profile),
    }


def _save_logs(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in (run.journal.path, *run.stack.folder.glob("*.log"), *run.stack.folder.glob("*/*.log")):
        shutil.copy(file, folder / file.relative_to(run.stack.folder).as_posix().replace("/", "-"))


def failures(found: Mapping[str, Any], profile: Profile) -> list[str]:
    """Return the names of the findings that fail the run."""
    late = found["readiness"]["late"] or (found["readiness"]["slowest_ready_s"] or 0.0) > profile.ready_within_s
    return [name for name in profile.judged if (late if name == "readiness" else found[name])]


async def prepare(profile: Profile, options: Options, exits: AsyncExitStack) -> Run:
    """Return a run whose database is ready; start neither replicas nor load."""
    stack = profile.stack
    folder = stack.folder / f"chaos-{options.seed}-{time.monotonic_ns()}"
    folder.mkdir()
    addresses = await profile.open(exits)
    await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema(options.version))
    await make_role(stack.postgres.dsn(DATABASE))
    journal = Journal(folder / "journal")
    load = Load(addresses.dsn, addresses.nats_urls, journal, _random(options), options.version)
    run = Run(stack, addresses, options.outage_s, folder, [], load, journal, _random(options))
    run.replicas = [
        _replica(run, number, profile.settings(number), options.executor or profile.executor)
        for number in range(options.replicas or profile.replicas)
    ]
    stack.upstream.clear_requests()
    await run.rules()
    await load.prepare(addresses.stream_replicas)
    return run


async def findings(run: Run, deadline_s: float, per_minute: float = math.inf) -> dict[str, Any]:
    """Return the findings of the checker."""
    record_kills(run.folder, run.journal)
    record_discarded([replica.process.log_text() for replica in run.replicas], run.journal)
    requests = await asyncio.to_thread(run.stack.upstream.requests)
    return await check(
        run.addresses.dsn,
        run.addresses.nats_urls,
        run.journal.path,
        requests,
        deadline_s,
        per_minute=per_minute,
        version=run.load.version,
    )


def _random(options: Options) -> random.Random:
    return random.Random(options.seed)  # noqa: S311 - a schedule, no secret


def _replica(run: Run, number: int, own: Mapping[str, str], executor: str) -> Replica:
    port = free_port()
    settings: Mapping[str, str] = {
        FOLDER_VARIABLE: str(run.folder),
        "OPENAPI_TOOL__HEALTH__PORT": str(port),
        "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "SEARCH_API_KEY",
        "OPENAPI_TOOL__PROTOCOL__VERSION": run.load.version,
        "PG_DSN": dsn_of(run.stack, DATABASE),
        **run.addresses.settings,
        **own,
    }
    return Replica(run.stack.executor(f"{run.folder.name}-{number}", DATABASE, settings, module=executor), port)


async def _with_faults(run: Run, profile: Profile, options: Options) -> None:
    await start(run)
    faults = profile.faults()
    kinds = options.kinds or tuple(faults)
    injector = asyncio.create_task(inject_faults(run, _times(profile, options, kinds), faults))
    helpers = [
        asyncio.create_task(run.keep_replicas_alive()),
        asyncio.create_task(probe(run.replicas, run.journal)),
        asyncio.create_task(run.load.consume()),
    ]
    try:
        await profile.place(run, options.calls, options.per_second)
        await _keep_up_load(run, profile, options, injector, kinds)
        injector.cancel()
        await asyncio.wait([injector, *run.background])
        await run.rules()
        await settled(run, options.settle_s)
    finally:
        for task in (injector, *helpers):
            task.cancel()
        await asyncio.wait([injector, *helpers])
        await stop(run)
    for task in (injector, *helpers):
        if not task.cancelled() and (error := task.exception()):
            raise error


def _times(profile: Profile, options: Options, kinds: tuple[str, ...]) -> Iterator[tuple[float, str]]:
    """Return pauses in seconds and the kind of the fault after each."""
    if profile.endless:
        return schedule(_random(options), options.every_s, kinds)
    rest_s = profile.rest_s if options.rest_s is None else options.rest_s
    return iter([(rest_s, kind) for kind in kinds])


async def _keep_up_load(
    run: Run, profile: Profile, options: Options, injector: asyncio.Task[None], kinds: tuple[str, ...]
) -> None:
    """Continue the load until the faults have been injected, and then until replicas can be ready again."""
    give_up = time.monotonic() + options.hit_all_within_s
    one_second = round(options.per_second)  # number of calls
    if profile.endless:
        while run.hit != set(kinds) and time.monotonic() < give_up:
            await profile.place(run, one_second, options.per_second)
        return
    while not injector.done():
        await profile.place(run, one_second, options.per_second)
    await profile.place(run, round((REACTION_S + 1) * options.per_second), options.per_second)


async def start(run: Run) -> None:
    """Start all replicas."""
    await asyncio.gather(*(asyncio.to_thread(replica.process.start) for replica in run.replicas))


async def stop(run: Run) -> None:
    """Stop all replicas and the load."""
    await asyncio.gather(*(asyncio.to_thread(replica.process.stop) for replica in run.replicas))
    await run.load.close()


async def settled(run: Run, settle_s: float = 90.0) -> None:
    """Wait at most `settle_s` until no command is left, then one more second for doorbells."""
    client = await nats.connect(list(run.addresses.nats_urls))
    give_up = time.monotonic() + settle_s
    try:
        stream, durable = f"cg_cmd_{run.load.version}", default_durable(run.load.version, "jina")
        while time.monotonic() < give_up:
            info = await client.jetstream().consumer_info(stream, durable)
            if not info.num_pending and not info.num_ack_pending:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(_QUIET_S)
    finally:
        await client.close()


def main() -> None:
    """Run, print the findings, and exit with 1 if one that the profile judges failed."""
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # its client logs every failed reconnect
    options = _options()
    try:
        with EmbeddedStack() as stack:
            found = asyncio.run(chaos(stack, options))
    except NotInstalled as missing:
        sys.stdout.write(json.dumps({"profile": options.profile, "skipped": str(missing)}) + "\n")
        return
    sys.stdout.write(json.dumps(_counted(found)) + "\n")
    sys.exit(bool(found["failed"]))


def _counted(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the findings with the number of calls instead of each list, and the list as `NAME_calls`."""
    lists = ("lost", "late", "doubled", "refused", "requested_too_late")
    counts = {name: len(found[name]) for name in lists}
    return {**found, **counts, **{f"{name}_calls": found[name] for name in lists}}


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--profile", default="standard", choices=sorted(PROFILES), help="what fails, and which servers")
    parser.add_argument(
        "--protocol", type=ProtocolVersion, default=DEFAULT_VERSION, choices=list(ProtocolVersion), help="of the kernel"
    )
    parser.add_argument("--calls", type=int, help="calls to place (standard: 10000, else 2000)")
    parser.add_argument("--per-second", type=float, default=17.0, help="calls placed a second")
    parser.add_argument("--seed", type=int, default=1, help="a schedule of faults")
    parser.add_argument("--outage", type=float, default=15.0, help="seconds that an outage lasts")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy journal and logs there")
    parser.add_argument("--only", nargs="*", default=[], metavar="KIND", help="kinds of faults, instead of all")
    arguments = parser.parse_args()
    return Options(
        calls=arguments.calls or (10_000 if arguments.profile == "standard" else 2_000),
        per_second=arguments.per_second,
        seed=arguments.seed,
        kinds=tuple(arguments.only),
        profile=arguments.profile,
        outage_s=arguments.outage,
        keep=arguments.keep,
        version=arguments.protocol,
    )


async def probe(replicas: Sequence[Replica], journal: Journal) -> None:
    """Poll `/readyz` of every replica until cancelled, and record each response."""
    async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as session, asyncio.TaskGroup() as group:
        for number, replica in enumerate(replicas):
            group.create_task(_probe_one(session, number, replica.port, journal))


async def _probe_one(session: aiohttp.ClientSession, number: int, port: int, journal: Journal) -> None:
    while True:
        at = time.time()
        ready, why = await _readiness(session, f"http://127.0.0.1:{port}/readyz")
        journal.record(probe=number, at=at, ready=ready, why=why)
        await asyncio.sleep(max(0.0, at + _PROBE_S - time.time()))


async def _readiness(session: aiohttp.ClientSession, url: str) -> tuple[bool, str]:
    """Return whether a replica is ready, else the reason; one that does not respond is not ready."""
    try:
        async with session.get(url) as answer:
            return answer.ok, "" if answer.ok else await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        return False, type(error).__name__


if __name__ == "__main__":
    main()
