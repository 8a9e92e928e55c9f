"""The deadline that the waiting turn sets a call: it may come closer while the call runs.

A *turn* is a run of the kernel's agent. In each *step* it asks for one or more calls, and then waits for their results.
The kernel's *worker* waits at least `executor.worker_timeout_s`, or longer if the tool's definition says so
(`suspend_timeout_seconds`). But once a call of the step has a result, it waits only `executor.worker_timeout_s` more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openapi_tool.concurrency.cancellation import shielded
from openapi_tool.kernel.pipeline.ports import Kernel
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.deadlines import TurnLimit
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.time_limits import TimeLimits

log = logging.getLogger(__name__)

_MIN_CHECK_INTERVAL_S = 1.0  # between two queries, if `executor.worker_timeout_s` is very short
_CHECK_GRACE_S = 1.0  # for a query in progress to end after its cancellation


@asynccontextmanager
async def turn_deadline(
    kernel: Kernel, limits: TimeLimits, identity: CallIdentity, first_check_s: float
) -> AsyncIterator[TurnLimit]:
    """Yield the limit of a call's turn, which is shortened once another call of the same step has a result.

    The database is asked for such results: first after `first_check_s` seconds, then about every `worker_timeout_s`. A
    call that ends before the first check costs only a timer.
    """
    limit = TurnLimit()
    check: asyncio.Task[None] | None = None

    def start_check() -> None:
        nonlocal check
        check = asyncio.create_task(_shorten_once_known(limit, kernel, limits, identity))

    timer = asyncio.get_running_loop().call_later(first_check_s, start_check)
    try:
        yield limit
    finally:
        timer.cancel()
        if check is not None:
            check.cancel()
            # Shielded: the call may have its paid result by now, which a cancellation must not lose.
            await shielded(asyncio.wait([check]), _CHECK_GRACE_S)


async def _shorten_once_known(limit: TurnLimit, kernel: Kernel, limits: TimeLimits, identity: CallIdentity) -> None:
    """Wait until another call of the step has a result, then bring the limit forward to the end of the turn."""
    # A result that comes after a look leaves the turn at least `worker_timeout_s`, so the next look is after that.
    pause_s = max(_MIN_CHECK_INTERVAL_S, limits.worker_timeout_left_s(age_s=0.0))
    age_s = await _result_age_s(kernel, identity)
    while age_s is None:
        await asyncio.sleep(pause_s)
        age_s = await _result_age_s(kernel, identity)
    left_s = limits.worker_timeout_left_s(age_s)
    limit.shorten(time.monotonic() + left_s)
    log.info(
        "another call of the step has a result, so the worker waits less; the deadline is brought forward",
        extra={"action": "turn.shortened", "left_s": round(left_s, 3)} | log_ids(identity),
    )


async def _result_age_s(kernel: Kernel, identity: CallIdentity) -> float | None:
    """Return the age of the step's newest result, None if there is none, or during an outage of the database."""
    try:
        return await kernel.last_result_age_s(identity.project_id, identity.agent_turn_id, identity.step_id or "")
    except Unavailable as outage:
        log.debug("cannot read other results of the step: %s", outage, extra={"action": "turn.unknown"})
        return None
