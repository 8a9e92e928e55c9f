"""Commit results with retries; park those that cannot be committed.

To park a result is to store it in NATS, so that another executor can commit it when the command is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from tenacity import RetryCallState, stop_after_delay, wait_exponential_jitter

from openapi_tool.concurrency.retries import retried
from openapi_tool.kernel.pipeline.parked_results import ParkedResults
from openapi_tool.kernel.pipeline.ports import Kernel
from openapi_tool.kernel.pipeline.result_order import CommitWait, ResultOrder
from openapi_tool.kernel.pipeline.result_to_commit import ResultToCommit
from openapi_tool.protocol.cards import ResultCard
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.report import Report

log = logging.getLogger(__name__)

_PARK_AFTER_S = 10.0
"""Seconds of failed commits until the result is parked. Workers wait at least 30 s for a result, so another executor
has 20 s to commit it in time."""

_BACKOFF = wait_exponential_jitter(multiplier=0.1, max=2.0, jitter=0.1)  # 0.1 s, 0.2 s, … 2 s, each up to 0.1 s longer


@dataclass(frozen=True, slots=True)
class ResultCommitter:
    """Commits results in their turn's order; retries for `retry_timeout_s` seconds in an outage of the database."""

    kernel: Kernel
    parked: ParkedResults
    order: ResultOrder
    retry_timeout_s: float

    async def store_or_park(self, wait: CommitWait, result: ResultToCommit, card: ResultCard, report: Report) -> bool:
        """Commit the result; return whether it was written. If that fails, park it and raise the failure.

        Another executor may reach the database when this one does not, so the result is parked after `_PARK_AFTER_S`.
        If it cannot be parked, for example as it is too large, only this executor has it, and retries for longer.
        """
        attempts = _Attempts(self.kernel, self.order, wait, result, card, report)
        commit_with_retries = partial(retried, attempts.next, on=Unavailable, wait=_BACKOFF, before_sleep=_log_retry)
        park_after_s = min(_PARK_AFTER_S, self.retry_timeout_s)
        # First stage: retry until it is time to park the result for another executor.
        try:
            return await commit_with_retries(stop=stop_after_delay(park_after_s))
        except (Exception, asyncio.CancelledError) as failure:
            is_parked = result.was_parked or await self.parked.park(wait.identity, result)
            may_retry = isinstance(failure, Unavailable) and self.retry_timeout_s > park_after_s
            if is_parked or not may_retry:
                raise
        # Second stage: the result could not be parked, so retry here for the rest of the time.
        try:
            return await commit_with_retries(stop=stop_after_delay(self.retry_timeout_s - park_after_s))
        except (Exception, asyncio.CancelledError):
            await self.parked.park(wait.identity, result)  # NATS may have been unavailable at the first attempt
            raise


@dataclass(slots=True)
class _Attempts:
    """Attempts to commit one result. Those after a failed one are marked as retries, and begin a new wait."""

    kernel: Kernel
    order: ResultOrder
    wait: CommitWait
    result: ResultToCommit
    card: ResultCard
    report: Report
    failed_before: bool = False

    async def next(self) -> bool:
        """Make one attempt; return whether the result was written. Raises Unavailable."""
        if self.failed_before:
            self.order.restart(self.wait)
        # `order.write` passes the condition on which the rows may be written, and to the other one an age.
        write_rows = partial(self.kernel.commit, self.card, self.report, self.result.artifact, retry=self.failed_before)
        is_turn_busy = partial(self.kernel.is_turn_busy, self.report)
        try:
            return await self.order.write(self.wait, write_rows, is_turn_busy)
        except Unavailable:
            self.failed_before = True
            raise


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.debug("commit failed; retrying: %s", outage, extra={"action": "commit.retried"})
