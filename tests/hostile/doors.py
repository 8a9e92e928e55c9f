"""`python -m tests.hostile.doors`: how each attack on the HTTP door delays another token, and what it takes.

The victim's calls take 250 ms upstream, first alone, then during the attack, which is repeated until they are done. Its
99th percentile may grow by at most 250 ms, no call may be lost, and the gateway must stay within its memory. The exit
code is 0 only if every case passed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

from benchmarks.gateway import double_of
from openapi_tool.local.servers import free_port
from tests.hostile.door_attacks import ATTACKS, PAGE, READ

MEMORY_BYTES = 512 * 1024 * 1024
MARGIN_S, LOG_BYTES = 0.25, 1_000_000
_START_S, _ATTACK_S = 90.0, 120.0


@dataclass(slots=True)
class Measured:
    """Seconds of the victim's calls alone and beside the attack, what went wrong, and the gateway's vital signs."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    log_bytes: int = 0
    rounds: int = 0

    def wrong(self, margin_s: float = MARGIN_S) -> list[str]:
        """Return a line for each limit that is exceeded."""
        grown = percentile(self.beside_s, 99) - percentile(self.alone_s, 99)
        return [
            *self.lost,
            *([f"the victim's p99 grew by {grown:.2f} s, at most {margin_s} are allowed"] if grown > margin_s else []),
            *([f"{self.peak_bytes / 1e6:.0f} MB of memory"] if self.peak_bytes > MEMORY_BYTES else []),
            *([f"{self.log_bytes:,} bytes of log"] if self.log_bytes > LOG_BYTES * self.rounds else []),
        ]


def percentile(values: list[float], number: int) -> float:
    """Return a percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[number - 1]


@dataclass(frozen=True, slots=True)
class Attacked:
    """A gateway with a token for the attacker and one for the victim."""

    process: psutil.Process
    port: int
    log: Path
    tokens: Mapping[str, str]

    async def play(self, name: str, calls: int, every_s: float = 0.1) -> Measured:
        """Measure the victim alone, then beside an attack."""
        found = Measured()
        headers = {"Authorization": f"Bearer {self.tokens['victim']}"}
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=60, limits=limits, trust_env=False
        ) as client:
            found.alone_s = await self._calls(client, calls, every_s, found)
            began, watching = self.log.stat().st_size, asyncio.create_task(self._watch(found))
            attacking = asyncio.create_task(self._attack(name, found, calls * every_s))
            found.beside_s = await self._calls(client, calls, every_s, found)
            await attacking
            watching.cancel()
        found.log_bytes = self.log.stat().st_size - began
        return found

    async def _calls(self, client: httpx.AsyncClient, calls: int, every_s: float, found: Measured) -> list[float]:
        async def call(number: int) -> float:
            await asyncio.sleep(number * every_s)
            began = time.monotonic()
            try:
                answer = await client.post(READ, json={"url": f"{PAGE}?slow={time.monotonic_ns()}"})
                answer.raise_for_status()
            except httpx.HTTPError as error:
                found.lost.append(f"the victim's call failed: {type(error).__name__}: {error}"[:200])
            return time.monotonic() - began

        return await asyncio.gather(*map(call, range(calls)))

    async def _attack(self, name: str, found: Measured, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not found.rounds or time.monotonic() < until:
            found.rounds += 1
            attacker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.hostile.door_attacks", name, str(self.port), self.tokens["attacker"]),
                stderr=subprocess.PIPE,
            )
            async with asyncio.timeout(_ATTACK_S):
                _, errors = await attacker.communicate()
            if attacker.returncode:
                found.lost.append(f"the attack failed: {errors.decode()[-300:]}")

    async def _watch(self, found: Measured) -> None:
        while True:
            found.peak_bytes = max(found.peak_bytes, self.process.memory_info().rss)
            await asyncio.sleep(0.05)


@contextmanager
def attacked() -> Iterator[Attacked]:
    """Yield a running gateway that sends to the double."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        double, environment = stack.enter_context(double_of(folder))
        double.rules({"match": "slow", "delay_s": 0.25})
        variables = {"PATH": os.environ["PATH"], **environment, "OPENAPI_TOOL__CACHE__TTL_S": "0"}
        state, log, port = folder / "state.sqlite3", folder / "log", free_port()
        tokens = {
            name: subprocess.run(  # noqa: S603 - the interpreter
                [sys.executable, "-m", "openapi_tool", "tokens", "create", "--project", name, "--state", str(state)],
                env=variables,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for name in ("victim", "attacker")
        }
        options = ["--upstream-port", str(double.port), "--state", str(state), "--port", str(port)]
        process = stack.enter_context(
            subprocess.Popen(  # noqa: S603 - the interpreter
                [sys.executable, "-m", "openapi_tool.local.door_server", "gateway", *options],
                env=variables,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
        )
        stack.callback(process.kill)
        until = time.monotonic() + _START_S
        while b"gateway.serving" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        yield Attacked(psutil.Process(process.pid), port, log, tokens)


async def _measured(names: list[str], calls: int) -> bool:
    failed = False
    print(f"{'attack':<28} p50 alone  p99 alone      p50      p99   peak MB  log kB  rounds")  # noqa: T201
    for name in names:
        with attacked() as gateway:  # a new one for each, as memory does not shrink
            found = await gateway.play(name, calls)
        cells = (percentile(seconds, cut) for seconds in (found.alone_s, found.beside_s) for cut in (50, 99))
        print(  # noqa: T201
            f"{name:<28}{'  '.join(f'{cell:7.2f} s' for cell in cells)}"
            f"{found.peak_bytes / 1e6:10.0f}{found.log_bytes / 1e3:8.0f}{found.rounds:8}",
            flush=True,
        )
        for line in (wrong := found.wrong())[:5]:
            print(f"    {line}")  # noqa: T201
        failed = failed or bool(wrong)
    return failed


def main() -> int:
    """Measure the chosen attacks; return 1 if one exceeds a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="only these attacks")
    parser.add_argument("--calls", type=int, default=60, help="the victim's calls, alone and beside each attack")
    options = parser.parse_args()
    return int(asyncio.run(_measured(options.only or list(ATTACKS), options.calls)))


if __name__ == "__main__":
    sys.exit(main())
