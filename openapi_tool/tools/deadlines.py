"""Deadlines of calls."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.tools.policy import Authorizer

_OTHER_PHASES_S = 30.0  # lease, rendering, doorbell, …; their limits are a few seconds each


class TurnLimit:
    """Limit of a running call by its turn, on the monotonic clock; infinite until `shorten`.

    `kernel/pipeline/turn_deadline.py` shortens it once it finds that the turn ends before the call's deadline.
    """

    def __init__(self) -> None:
        self.at = float("inf")
        self._waits: list[asyncio.Timeout] = []

    def shorten(self, at: float) -> None:
        """Bring the limit forward to `at`, also for waits in progress."""
        self.at = min(self.at, at)
        loop = asyncio.get_running_loop()
        when = loop.time() + self.at - time.monotonic()  # on the loop's clock
        for timeout in self._waits:
            before = timeout.when()
            if before is None or before > when:
                with suppress(RuntimeError):  # the timeout has ended
                    timeout.reschedule(when)

    def watch(self, timeout: asyncio.Timeout) -> None:
        """Register a timeout for `shorten` to reschedule. It stays registered after its end; a call has few."""
        self._waits.append(timeout)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline of a call on the monotonic clock; `turn` may bring it forward while the call runs."""

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

    def limit(self) -> asyncio.Timeout:
        """Return a context that raises TimeoutError at the deadline."""
        timeout = asyncio.timeout(self.remaining())
        if self.turn is not None:
            self.turn.watch(timeout)
        return timeout

    def shortened(self, seconds: float | None) -> Deadline:
        """Return the earlier of this deadline and `seconds` from now."""
        return self if seconds is None else Deadline(min(self.at, time.monotonic() + seconds), self.turn)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a call by the settings."""

    executor: ExecutorOptions
    tools: ToolOptions

    def worker_waits_s(self, suspend_timeout_s: float | None) -> float:
        """Return for how long a worker waits from the command's arrival on."""
        return max(self.executor.worker_timeout_s, suspend_timeout_s or 0.0)

    def may_outlast_worker_timeout(self, suspend_timeout_s: float | None) -> bool:
        """Return whether a call may outlast `executor.worker_timeout_s`, the worker's least wait."""
        return suspend_timeout_s is not None and suspend_timeout_s > self.executor.worker_timeout_s

    def worker_timeout_left_s(self, age_s: float) -> float:
        """Return what is left of `worker_timeout_s`, which began `age_s` ago, minus `commit_margin_s`."""
        return self.executor.worker_timeout_s - self.executor.commit_margin_s - age_s

    def deadline(self, age_s: float, suspend_timeout_s: float | None, timeout_s: float | None = None) -> Deadline:
        """Return the deadline, perhaps passed, of a call whose command arrived in the stream `age_s` seconds ago.

        `suspend_timeout_s` and `timeout_s` are the definition's; without both `tools.default_timeout_s` applies. The
        limit `timeout_s` itself is not part of this deadline: it begins with the upstream's part
        (`jina/prepared_item.py`).
        """
        wait_s = self.worker_waits_s(suspend_timeout_s) - self.executor.commit_margin_s
        left_s = min(wait_s, self.tools.max_timeout_s) - max(0.0, age_s)
        unlimited = suspend_timeout_s is None and timeout_s is None
        return Deadline.after(left_s).shortened(self.tools.default_timeout_s if unlimited else None)


def longest_call_s(limits: TimeLimits, authorizer: Authorizer, statement_s: float) -> float:
    """Return the seconds after which a call that still runs is a defect: the sum of the limits of its steps.

    `statement_s` limits each database connection and statement. A call has at most eight: two each for load, commit,
    last retry of the commit, and reload after a commit that wrote nothing.
    """
    hooks_s = len(authorizer.hooks) * authorizer.policy.hook_timeout_s
    commit_s = limits.executor.commit_retry_timeout_s
    return hooks_s + limits.tools.max_timeout_s + commit_s + 8 * statement_s + _OTHER_PHASES_S
