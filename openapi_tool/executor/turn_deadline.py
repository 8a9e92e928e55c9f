"""Deadline of the turn that a call belongs to: another result of the step may bring it forward (protocol section 7)."""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from openapi_tool.executor.ids import ids
from openapi_tool.executor.ports import Kernel
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.deadline import TimeLimits, TurnLimit

log = logging.getLogger(__name__)

_MIN_CHECK_INTERVAL_S = 1.0


class TurnDeadline:
    """Context that shortens a call's limit once another call of the same step has a result.

    `suspend_timeout_seconds` extends the turn's deadline. A result of another call of the step sets that deadline to
    the time of the result plus `executor.worker_timeout_s`, which may be earlier. So this class asks the database for
    such results: first after `first_check_s`, when that wait ends, then once per such wait. A call that ends
    earlier costs only a timer.
    """

    def __init__(self, kernel: Kernel, limits: TimeLimits, identity: CallIdentity, first_check_s: float) -> None:
        self.limit = TurnLimit()
        self._kernel = kernel
        self._limits = limits
        self._identity = identity
        self._first_check_s = first_check_s
        self._timer: asyncio.TimerHandle | None = None
        self._check: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._first_check_s, self._start_checks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._check is not None:
            self._check.cancel()
            await asyncio.wait([self._check])

    def _start_checks(self) -> None:
        self._check = asyncio.create_task(self._shorten())

    async def _shorten(self) -> None:
        while (age_s := await self._last_result_age_s()) is None:  # noqa: ASYNC110 - the other call may run in another process
            # A later result leaves the turn at least `worker_timeout_s` from now.
            await asyncio.sleep(max(_MIN_CHECK_INTERVAL_S, self._limits.worker_wait_left_s(0.0)))
        left_s = self._limits.worker_wait_left_s(age_s)
        self.limit.shorten(time.monotonic() + left_s)
        log.info(
            "another call of the step has a result, so the worker waits less; the deadline is brought forward",
            extra={"action": "turn.shortened", "left_s": round(left_s, 3)} | ids(self._identity),
        )

    async def _last_result_age_s(self) -> float | None:
        """Return the seconds since another call of the step got a result, None if none did or it is unknown."""
        identity = self._identity
        try:
            return await self._kernel.last_result_age_s(
                identity.project_id, identity.agent_turn_id, identity.step_id or ""
            )
        except Unavailable as outage:
            log.debug("cannot read other results of the step: %s", outage, extra={"action": "turn.unknown"})
            return None
