"""The victim: a quiet project that places calls at a fixed rate and records their outcomes.

It runs in its own process, so that the work of attacking does not delay it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import IO, Self

from openapi_tool.local.caller import Caller
from openapi_tool.local.guard import Guard
from tests.conftest import search_tool

PROJECT, AGENT = "proj_victim", "agent_victim"
_STOP, _READY = "stop", "ready"
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Pace:
    """Load of the victim during a case: seconds between calls, minimum number, milliseconds of the upstream."""

    every_s: float = 0.1
    calls: int = 6
    upstream_ms: int = 30
    timeout_s: float = 20.0


@dataclass(slots=True)
class CallOutcomes:
    """Seconds from publication to doorbell of each call, and a line for each lost or failed call."""

    latencies_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class VictimProcess:
    """Client of the victim's process."""

    def __init__(self, dsn: str, nats_url: str, version: str, guard: Guard) -> None:
        command = [sys.executable, "-m", __name__, "--dsn", dsn, "--nats", nats_url, "--protocol", version]
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": os.environ.get("PATH", "")}
        )
        guard.stop_at_end(self._process)

    def __enter__(self) -> Self:
        if self._read_line() != _READY:
            raise RuntimeError("the victim did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()
        self._pipe(self._process.stdout).close()

    def start(self, pace: Pace) -> None:
        """Start to place calls at this pace."""
        self._write_line(json.dumps(asdict(pace)))

    def outcomes(self) -> CallOutcomes:
        """Stop after at least the calls of the pace, wait for all of them, and return their outcomes. Blocks."""
        self._write_line(_STOP)
        return CallOutcomes(**json.loads(self._read_line()))

    def _write_line(self, line: str) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write(f"{line}\n".encode())
        pipe.flush()

    def _read_line(self) -> str:
        return self._pipe(self._process.stdout).readline().decode().strip()

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise AssertionError("started without pipes")
        return pipe


async def set_up(caller: Caller) -> None:
    """Create the victim's project, agent and tool."""
    await caller.set_up_project(PROJECT, AGENT, [search_tool()])
    await caller.listen(f"cg.{caller.version}.{PROJECT}.*.cmd.agent.*.wakeup")


async def _place_calls(caller: Caller, pace: Pace, stop: asyncio.Event) -> CallOutcomes:
    """Place calls until `stop` is set, but at least as many as in `pace`; wait for all of them."""
    outcomes, placed = CallOutcomes(), 0
    async with asyncio.TaskGroup() as group:
        while placed < pace.calls or not stop.is_set():
            group.create_task(_call(caller, pace, outcomes))
            placed += 1
            await asyncio.sleep(pace.every_s)
    return outcomes


async def _call(caller: Caller, pace: Pace, outcomes: CallOutcomes) -> None:
    query = f"victim-{pace.upstream_ms} {next(_NUMBERS)}"  # the upstream delays its response by this many milliseconds
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": query}, publish=False)
    began = time.time()
    await caller.publish(call)
    try:
        answer = await caller.result(call, pace.timeout_s)
    except TimeoutError:
        outcomes.lost.append(f"{query}: no doorbell within {pace.timeout_s} s")
        return
    outcomes.latencies_s.append((answer.doorbell_at or 0.0) - began)
    content = answer.card.get("content", {})
    if content.get("status") != "success" or not answer.inbox_row or not answer.edge:
        outcomes.lost.append(f"{query}: {content.get('status')} {content.get('error')}")


async def _serve(dsn: str, nats_url: str, version: str) -> None:
    """Read standard input: a line with a pace starts calls, the next line stops them; print their outcomes as JSON."""
    async with Caller.open(dsn, version, servers=nats_url) as caller:
        await set_up(caller)
        _print_line(_READY)
        while line := await asyncio.to_thread(sys.stdin.readline):
            stop = asyncio.Event()
            placing = asyncio.create_task(_place_calls(caller, Pace(**json.loads(line)), stop))
            await asyncio.to_thread(sys.stdin.readline)
            stop.set()
            _print_line(json.dumps(asdict(await placing)))


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until standard input is closed."""
    parser = argparse.ArgumentParser(description="A quiet project beside an attacker.")
    parser.add_argument("--dsn", required=True, help="the kernel's database")
    parser.add_argument("--nats", required=True, help="the kernel's NATS")
    parser.add_argument("--protocol", required=True, help="the kernel's protocol version")
    options = parser.parse_args(arguments)
    asyncio.run(_serve(options.dsn, options.nats, options.protocol))


if __name__ == "__main__":
    main()
