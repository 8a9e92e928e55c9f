"""A quiet project that places a call every so often, and what became of each.

It lives in a process of its own, so that the work of attacking does not show in its latencies.
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
_ENOUGH, _READY = "enough", "ready"
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Pace:
    """Load of the victim during a case: seconds between calls, minimum number, milliseconds of the upstream."""

    every_s: float = 0.1
    calls: int = 6
    upstream_ms: int = 30
    patience_s: float = 20.0


@dataclass(slots=True)
class Fate:
    """Seconds from a command's publication to its doorbell, call by call; and what was lost, in words."""

    latencies_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class VictimProcess:
    """The process, from outside: `live` begins, `fate` ends and says what became of the calls."""

    def __init__(self, dsn: str, nats_url: str, version: str, guard: Guard) -> None:
        command = [sys.executable, "-m", __name__, "--dsn", dsn, "--nats", nats_url, "--protocol", version]
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": os.environ.get("PATH", "")}
        )
        guard.stop_at_end(self._process)

    def __enter__(self) -> Self:
        if self._heard() != _READY:
            raise RuntimeError("the victim did not come up")
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()
        self._pipe(self._process.stdout).close()

    def live(self, pace: Pace) -> None:
        """Place calls at this pace from now on."""
        self._say(json.dumps(asdict(pace)))

    def fate(self) -> Fate:
        """Place no more than were asked for, wait for every one. Blocks."""
        self._say(_ENOUGH)
        return Fate(**json.loads(self._heard()))

    def _say(self, line: str) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write(f"{line}\n".encode())
        pipe.flush()

    def _heard(self) -> str:
        return self._pipe(self._process.stdout).readline().decode().strip()

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise AssertionError("it was started with pipes")
        return pipe


async def furnish(caller: Caller) -> None:
    """The victim's project, agent and tool."""
    await caller.furnish(PROJECT, AGENT, [search_tool()])
    await caller.listen(f"cg.{caller.version}.{PROJECT}.*.cmd.agent.*.wakeup")


async def _live(caller: Caller, pace: Pace, enough: asyncio.Event) -> Fate:
    """Place calls until it is enough, but as many as the pace says, and wait for every one."""
    fate, placed = Fate(), 0
    async with asyncio.TaskGroup() as group:
        while placed < pace.calls or not enough.is_set():
            group.create_task(_call(caller, pace, fate))
            placed += 1
            await asyncio.sleep(pace.every_s)
    return fate


async def _call(caller: Caller, pace: Pace, fate: Fate) -> None:
    query = f"victim-{pace.upstream_ms} {next(_NUMBERS)}"
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": query}, publish=False)
    began = time.time()
    await caller.publish(call)
    try:
        answer = await caller.answer(call, pace.patience_s)
    except TimeoutError:
        fate.lost.append(f"{query}: no doorbell within {pace.patience_s} s")
        return
    fate.latencies_s.append((answer.doorbell_at or 0.0) - began)
    content = answer.card.get("content", {})
    if content.get("status") != "success" or not answer.inbox_row or not answer.edge:
        fate.lost.append(f"{query}: {content.get('status')} {content.get('error')}")


async def _obey(dsn: str, nats_url: str, version: str) -> None:
    """Do what the lines on standard input say, until it is closed."""
    async with Caller.open(dsn, version, servers=nats_url) as caller:
        await furnish(caller)
        _tell(_READY)
        while line := await asyncio.to_thread(sys.stdin.readline):
            enough = asyncio.Event()
            living = asyncio.create_task(_live(caller, Pace(**json.loads(line)), enough))
            await asyncio.to_thread(sys.stdin.readline)
            enough.set()
            _tell(json.dumps(asdict(await living)))


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Live until standard input is closed."""
    parser = argparse.ArgumentParser(description="A quiet project beside an attacker.")
    parser.add_argument("--dsn", required=True, help="the kernel's database")
    parser.add_argument("--nats", required=True, help="the kernel's NATS")
    parser.add_argument("--protocol", required=True, help="the kernel's protocol version")
    asked = parser.parse_args(arguments)
    asyncio.run(_obey(asked.dsn, asked.nats, asked.protocol))


if __name__ == "__main__":
    main()
