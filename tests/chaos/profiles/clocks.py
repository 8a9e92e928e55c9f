"""Executors whose wall clock is off: 28 s ahead, 28 s behind, 5 s ahead, and one that jumps by an hour."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from openapi_tool.local.stack import EmbeddedStack
from tests.chaos import faults
from tests.chaos.harness import RECORDING, Fault, Profile, Replica, Run, outage
from tests.chaos.shifted import JUMP_VARIABLE, OFFSET_VARIABLE

OFFSETS_S = (28.0, -28.0, 5.0, 0.0)
JUMPS = 3
"""The replica whose clock jumps."""

BEHIND = 1
"""The replica whose clock is behind; after a standstill it is the first to start."""

BACKLOG_S = 36.0
"""Longer than a worker waits: what was placed first must not be asked for any more."""

_SLOW_S, _REDELIVERED_S = 4.0, 7.5


class Clocks(Profile):
    """Every replica is started with its own offset; the servers' clocks are right."""

    replicas = len(OFFSETS_S)
    executor = "tests.chaos.shifted"
    rest_s = faults.STOPPED_S + 1

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self._jump = stack.folder / "jump"

    def settings(self, number: int) -> Mapping[str, str]:
        return {OFFSET_VARIABLE: str(OFFSETS_S[number]), JUMP_VARIABLE: str(self._jump_of(number))}

    def _jump_of(self, number: int) -> str:
        return str(self._jump if number == JUMPS else self._jump.with_suffix(".never"))

    def faults(self) -> Mapping[str, Fault]:
        return {
            "kill": faults.kill,
            "jump": self.jump,
            "kill_leased": self.kill_leased,
            "freeze": faults.freeze,
            "backlog": self.backlog,
        }

    async def jump(self, run: Run) -> int:
        """Move one clock on by an hour."""
        self._jump.touch()
        return await run.replicas[JUMPS].running()

    async def kill_leased(self, run: Run) -> int:
        """Kill one, and when its calls run elsewhere with a lease, kill the one whose clock has jumped, too."""
        await asyncio.to_thread(
            run.stack.upstream.rules, {"answer": RECORDING, "delay_s": _SLOW_S}, *run.normal_rules()
        )
        await asyncio.sleep(_SLOW_S)
        _kill(run, run.replicas[JUMPS - 1])
        await asyncio.sleep(_REDELIVERED_S)
        hit = await run.replicas[JUMPS].running()
        _kill(run, run.replicas[JUMPS])
        await run.rules()
        return hit

    async def backlog(self, run: Run) -> int:
        """Stop all executors, so that commands wait for longer than their callers."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            for replica in run.replicas:
                replica.leave_alone = True
            await asyncio.gather(*(asyncio.to_thread(replica.process.stop) for replica in run.replicas))
            yield
            await asyncio.to_thread(run.replicas[BEHIND].process.start)
            others = [replica for replica in run.replicas if not replica.alive]
            await asyncio.gather(*(asyncio.to_thread(replica.process.start) for replica in others))
            for replica in run.replicas:
                replica.leave_alone = False

        return await outage(run, "no executor", broken(), BACKLOG_S)


def _kill(run: Run, replica: Replica) -> None:
    run.journal.note(crash=time.time())
    replica.process.signal(signal.SIGKILL)
