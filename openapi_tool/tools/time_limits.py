"""Time limits that the settings set to calls of the kernel door.

The *worker* is the kernel's process that sent the call's command and waits for its result. It waits from the command's
arrival in the stream on; then it goes on without the result. So a call must end before that, with time left to commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.policy import Authorizer

_DATABASE_STEPS = 8
"""Connections and statements of a call, at most: one of each to load, to commit, to retry the commit for the last time,
and to reload after a commit that wrote nothing."""
_OTHER_STEPS_S = 30.0  # lease, rendering, doorbell, …; their limits are a few seconds each


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a call, from the settings.

    Several methods take `suspend_timeout_s` of the tool's definition: how long the worker waits for this tool. None if
    the definition does not say.
    """

    executor: ExecutorOptions
    tools: ToolOptions

    def worker_waits_s(self, suspend_timeout_s: float | None) -> float:
        """Return for how long a worker waits for the result, from the arrival of the call's command on."""
        return max(self.executor.worker_timeout_s, suspend_timeout_s or 0.0)

    def may_outlast_worker_timeout(self, suspend_timeout_s: float | None) -> bool:
        """Return whether a call may outlast `executor.worker_timeout_s`, the worker's least wait."""
        return suspend_timeout_s is not None and suspend_timeout_s > self.executor.worker_timeout_s

    def worker_timeout_left_s(self, age_s: float) -> float:
        """Return what is left of `worker_timeout_s`, which began `age_s` ago, minus `commit_margin_s`."""
        return self.executor.worker_timeout_s - self.executor.commit_margin_s - age_s

    def deadline(self, age_s: float, suspend_timeout_s: float | None, timeout_s: float | None = None) -> Deadline:
        """Return the deadline of a call whose command arrived in the stream `age_s` seconds ago; it may have passed.

        If the definition has neither `suspend_timeout_s` nor `timeout_s`, `tools.default_timeout_s` applies. The limit
        `timeout_s` itself is not part of this deadline: it begins later, with the upstream's part of the call.
        """
        wait_s = self.worker_waits_s(suspend_timeout_s) - self.executor.commit_margin_s
        left_s = min(wait_s, self.tools.max_timeout_s) - max(0.0, age_s)
        deadline = Deadline.after(left_s)
        if suspend_timeout_s is None and timeout_s is None:
            return deadline.shortened(self.tools.default_timeout_s)
        return deadline


def longest_call_s(limits: TimeLimits, authorizer: Authorizer, statement_s: float) -> float:
    """Return the seconds after which a call that still runs is a defect: the sum of the limits of its steps.

    `statement_s` limits each database connection and each statement.
    """
    hooks_s = len(authorizer.hooks) * authorizer.policy.hook_timeout_s
    commit_s = limits.executor.commit_retry_timeout_s
    database_s = _DATABASE_STEPS * statement_s
    return hooks_s + limits.tools.max_timeout_s + commit_s + database_s + _OTHER_STEPS_S
