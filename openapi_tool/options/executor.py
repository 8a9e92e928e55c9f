"""Section `executor` of the settings: how many calls run at the same time, and how long the steps around them take.

A call runs in a *slot*. It is *paused*, and gives up its slot, while it waits for a permit or a retry. A *worker* is
the kernel's process that waits for the result. A *drain* is the end of the process after SIGTERM (`shutdown.py`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.options.section import Options, Seconds

_MAX_HAND_BACK_S = 3.0  # enough to cancel the calls that still run, and to hand their commands back


@validated(frozen=True)
class ExecutorOptions(Options):
    """Execution of calls."""

    concurrency: Annotated[
        int,
        Field(ge=1, le=512, description="Maximum concurrent calls (slots); if projects compete, one gets at most 7/8."),
    ] = 64
    max_held: Annotated[
        int, Field(ge=1, le=10_000, description="Maximum commands that wait in one process for a free slot.")
    ] = 512
    max_paused: Annotated[
        int,
        Field(ge=0, le=10_000, description="Maximum paused calls: they wait for a permit or a retry without a slot."),
    ] = 256
    min_result_delay_s: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Minimum seconds from a step's newest command to a result: a worker needs them to suspend the "
            "turn; 0 is off.",
        ),
    ] = 0.06
    worker_timeout_s: Annotated[Seconds, Field(description="Minimum seconds that a worker waits for a result.")] = 30
    commit_margin_s: Annotated[Seconds, Field(description="Seconds of the worker's wait reserved for the commit.")] = 3
    requeue_delay_s: Annotated[Seconds, Field(description="Seconds until a requeued command is delivered again.")] = 2
    commit_retry_timeout_s: Annotated[Seconds, Field(description="Seconds for which a failed commit is retried.")] = 60
    max_lost_runs: Annotated[
        int, Field(ge=1, le=100, description="Lost runs after which a command gets a failed result without a run.")
    ] = 3
    drain_timeout_s: Annotated[
        float,
        Field(
            ge=1,
            le=86_400,
            description="Seconds from SIGTERM to the end of the process, whatever blocks; running calls may finish in "
            "all but the last 3 (or half of a shorter time), in which the others are handed back.",
        ),
    ] = 25

    @property
    def hand_back_s(self) -> float:
        """The last seconds of a drain. When they begin, calls are cancelled, and their commands are handed back."""
        return min(_MAX_HAND_BACK_S, self.drain_timeout_s / 2)

    @property
    def commit_grace_s(self) -> float:
        """The first part of `hand_back_s`: a cancelled call that has a result may commit and announce it."""
        return self.hand_back_s / 3

    @model_validator(mode="after")
    def _leaves_time_to_run(self) -> ExecutorOptions:
        if self.commit_margin_s >= self.worker_timeout_s:
            raise ValueError("commit_margin_s must be less than worker_timeout_s, or no call has time to run")
        return self
