"""Chaos profile: replicas share the limit of a key, and one project floods them.

The flood continues as long as the standard load, whose project is the quiet one here.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping

from tests.chaos import faults
from tests.chaos.harness import Fault, Profile, Replica, Run
from tests.chaos.load import PROJECT

PER_MINUTE = 2_400
_WEIGHT = 4.0
"""Weight of the quiet project: its share stays above its load even if crashes lose permits."""

_HELD = 100
"""Maximum held commands of a replica: fewer than its part of a burst, so that it hands some back."""

_BURST, _EVERY_S = 600, 12.0
_MIN_HELD = 60  # commands of a replica that is full enough to be drained
_POLL_S, _POLLS = 0.1, 150
_PREFIX = "OPENAPI_TOOL__"


class Limited(Profile):
    """Crashes, drains and restarts in random order, while commands wait in every replica."""

    endless = True
    deadline_s = math.inf
    judged = ("lost", "doubled", "doorbells_missing", "over_limit")
    per_minute = PER_MINUTE
    _next_burst = -math.inf  # seconds of the monotonic clock; continuing the load is no reason for a burst more

    def settings(self, number: int) -> Mapping[str, str]:
        del number
        return {
            f"{_PREFIX}LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(PER_MINUTE),
            f"{_PREFIX}FAIRNESS__WEIGHTS": json.dumps({PROJECT: _WEIGHT}),
            f"{_PREFIX}EXECUTOR__MAX_HELD": str(_HELD),
        }

    def faults(self) -> Mapping[str, Fault]:
        names = ("kill", "kill_before_upstream", "kill_after_upstream", "kill_after_commit", "sigterm", "sigstop")
        more = ("nats_restart", "postgres_restart", "duplicate", "poison")
        return {name: faults.FAULTS[name] for name in (*names, *more)} | {"drain_full": drain_full}

    async def place(self, run: Run, calls: int, per_second: float) -> None:
        """Place calls, and bursts of the flood meanwhile; a burst that has begun is placed whole."""
        placing = asyncio.create_task(run.place(calls, per_second))
        while not placing.done():
            if time.monotonic() >= self._next_burst:
                self._next_burst = time.monotonic() + _EVERY_S
                await run.load.flood(_BURST)
            await asyncio.wait([placing], timeout=_POLL_S)
        await placing


async def drain_full(run: Run) -> int:
    """Drain a replica that holds many commands by SIGTERM; return their number, 0 if none holds enough within 15 s."""
    for _ in range(_POLLS):
        held, replica = max([(await _held(replica), number) for number, replica in enumerate(run.replicas)])
        if held >= _MIN_HELD:
            await _drain(run, run.replicas[replica], held)
            return held
        await asyncio.sleep(_POLL_S)
    return 0


async def _drain(run: Run, replica: Replica, held: int) -> None:
    replica.under_fault, began = True, time.monotonic()
    code = await asyncio.to_thread(replica.process.stop)
    run.journal.record(drained=held, seconds=round(time.monotonic() - began, 2), code=code)
    replica.under_fault = False


async def _held(replica: Replica) -> int:
    """Return the number of commands that a replica holds, 0 if it does not respond or is under a fault."""
    if replica.under_fault:
        return 0
    try:
        return int(await asyncio.to_thread(replica.metric, "openapi_tool_commands_held"))
    except OSError:
        return 0
