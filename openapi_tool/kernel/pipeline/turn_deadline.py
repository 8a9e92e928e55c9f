"""The deadline that the waiting turn sets a call: it may come closer while the call runs."""

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

    The worker ends the turn `executor.worker_timeout_s` after such a result, which may be before the end of the
    definition's `suspend_timeout_seconds`. So the database is asked for results: first after `first_check_s` seconds,
    then about every `worker_timeout_s`. A call that ends before the first check costs only a timer.
    """
    limit = TurnLimit()
    checks: list[asyncio.Task[None]] = []  # one task once the timer has fired, else empty

    def start_check() -> None:
        checks.append(asyncio.create_task(_shorten(limit, kernel, limits, identity)))

    timer = asyncio.get_running_loop().call_later(first_check_s, start_check)
    try:
        yield limit
    finally:
        timer.cancel()
        for check in checks:
            check.cancel()
            # Shielded: the call may have its paid result by now, which a cancellation must not lose.
            await shielded(asyncio.wait([check]), _CHECK_GRACE_S)


async def _shorten(limit: TurnLimit, kernel: Kernel, limits: TimeLimits, identity: CallIdentity) -> None:
    """Wait until another call of the step has a result, then bring the limit forward to the end of the turn."""
    age_s = None  # of that result
    while age_s is None:
        try:
            age_s = await kernel.last_result_age_s(identity.project_id, identity.agent_turn_id, identity.step_id or "")
        except Unavailable as outage:
            log.debug("cannot read other results of the step: %s", outage, extra={"action": "turn.unknown"})
        if age_s is None:  # a result from now on leaves the turn at least `worker_timeout_s`, so ask again after that
            await asyncio.sleep(max(_MIN_CHECK_INTERVAL_S, limits.worker_timeout_left_s(0.0)))
    left_s = limits.worker_timeout_left_s(age_s)
    limit.shorten(time.monotonic() + left_s)
    log.info(
        "another call of the step has a result, so the worker waits less; the deadline is brought forward",
        extra={"action": "turn.shortened", "left_s": round(left_s, 3)} | log_ids(identity),
    )
