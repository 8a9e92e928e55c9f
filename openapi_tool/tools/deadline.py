"""Deadline of a call, so that its result arrives before the agent's worker stops waiting (section 7)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from openapi_tool.frozen import frozen
from openapi_tool.options import ExecutorOptions, ToolOptions
from openapi_tool.tools.policy import Authorizer

_OTHER_STEPS_S = 30.0
"""Seconds for all other steps, which have limits of a few seconds each: lease, rendering, doorbell."""


class TurnLimit:
    """Limit that is set while a call runs, because its turn may end before the call's own deadline.

    `at` is in seconds on the monotonic clock, infinite until `shorten` is called.
    """

    def __init__(self) -> None:
        self.at = float("inf")
        self._running: set[asyncio.Timeout] = set()

    def shorten(self, at: float) -> None:
        """Bring the limit forward to `at`, also for waits that are in progress."""
        self.at = min(self.at, at)
        loop = asyncio.get_running_loop()
        when = loop.time() + self.at - time.monotonic()
        for timeout in self._running:
            before = timeout.when()
            if not timeout.expired() and (before is None or before > when):
                timeout.reschedule(when)

    def enter(self, timeout: asyncio.Timeout) -> None:
        """Register a wait that `shorten` must reschedule."""
        self._running.add(timeout)

    def leave(self, timeout: asyncio.Timeout) -> None:
        """Unregister a wait that has ended."""
        self._running.discard(timeout)


class _Wait:
    """`asyncio.timeout` whose deadline `TurnLimit.shorten` can bring forward."""

    __slots__ = ("_limit", "_timeout")

    def __init__(self, limit: TurnLimit, remaining_s: float) -> None:
        self._limit = limit
        self._timeout = asyncio.timeout(remaining_s)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._limit.enter(self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._limit.leave(self._timeout)
        await self._timeout.__aexit__(kind, error, traceback)


@frozen
class Deadline:
    """Deadline of a call in seconds on the monotonic clock; `turn` may bring it forward while the call runs."""

    at: float
    turn: TurnLimit | None = None

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        at = self.at if self.turn is None else min(self.at, self.turn.at)
        return max(0.0, at - time.monotonic())

    def limit(self) -> asyncio.Timeout | _Wait:
        """Return a context that raises TimeoutError at the deadline."""
        return asyncio.timeout(self.remaining()) if self.turn is None else _Wait(self.turn, self.remaining())

    def shortened(self, seconds: float | None) -> Deadline:
        """Return the earlier of this deadline and `seconds` from now."""
        return self if seconds is None else Deadline(min(self.at, time.monotonic() + seconds), self.turn)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a call, computed from the settings sections `executor` and `tools`."""

    executor: ExecutorOptions
    tools: ToolOptions

    def worker_waits_s(self, suspend_timeout_s: float | None) -> float:
        """Return the seconds from a command's arrival in the stream until its worker stops waiting."""
        return max(self.executor.worker_timeout_s, suspend_timeout_s or 0.0)

    def outlasts_default(self, suspend_timeout_s: float | None) -> bool:
        """Return whether a call may run on when the worker's default wait ends."""
        return suspend_timeout_s is not None and suspend_timeout_s > self.executor.worker_timeout_s

    def default_left_s(self, age_s: float) -> float:
        """Return the seconds left of the worker's default wait that began `age_s` ago, minus `commit_margin_s`."""
        return self.executor.worker_timeout_s - self.executor.commit_margin_s - age_s

    def deadline(self, age_s: float, suspend_timeout_s: float | None, timeout_s: float | None = None) -> Deadline:
        """Return the deadline of a call whose command arrived in the stream `age_s` seconds ago.

        `suspend_timeout_s` and `timeout_s` are those of the definition. `tools.default_timeout_s` applies if it has
        neither. The deadline may be in the past; then the runner does not run the call.
        """
        patience_s = self.worker_waits_s(suspend_timeout_s) - self.executor.commit_margin_s
        left_s = min(patience_s, self.tools.max_timeout_s) - max(0.0, age_s)
        unlimited = suspend_timeout_s is None and timeout_s is None
        return Deadline.after(left_s).shortened(self.tools.default_timeout_s if unlimited else None)


def longest_call_s(limits: TimeLimits, authorizer: Authorizer, statement_s: float) -> float:
    """Return the seconds after which a call that still runs is a defect: the sum of the limits of its steps.

    `statement_s` limits each wait for a database connection or statement. A call has at most eight of them: load,
    commit, last retry of the commit, and reload after a commit that wrote nothing, each with its connection.
    """
    hooks_s = len(authorizer.hooks) * authorizer.policy.hook_timeout_s
    commit_s = limits.executor.commit_retry_timeout_s
    return hooks_s + limits.tools.max_timeout_s + commit_s + 8 * statement_s + _OTHER_STEPS_S
