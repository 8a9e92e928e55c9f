"""Commit results with retries; park those that cannot be committed."""

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
"""Seconds of failed commits until the result is parked for another executor; workers wait at least 30 s."""

_BACKOFF = wait_exponential_jitter(multiplier=0.1, max=2.0, jitter=0.1)


@dataclass(frozen=True, slots=True)
class ResultCommitter:
    """Commits results in their turn's order; retries for `retry_timeout_s` seconds in an outage of the database."""

    kernel: Kernel
    parked: ParkedResults
    order: ResultOrder
    retry_timeout_s: float

    async def store_or_park(self, wait: CommitWait, result: ResultToCommit, card: ResultCard, report: Report) -> bool:
        """Commit the result; return whether it was written. If that fails, park it and raise the failure.

        It is parked after `_PARK_AFTER_S`, for an executor that reaches the database; if it is too large, retry here
        instead.
        """
        failed_before = False

        async def commit() -> bool:
            nonlocal failed_before
            if failed_before:
                self.order.restart(wait)
            write = partial(self.kernel.commit, card, report, result.artifact, retry=failed_before)
            try:
                return await self.order.write(wait, write, partial(self.kernel.is_turn_busy, report))
            except Unavailable:
                failed_before = True
                raise

        commit_with_retries = partial(retried, commit, on=Unavailable, wait=_BACKOFF, before_sleep=_log_retry)
        park_after_s = min(_PARK_AFTER_S, self.retry_timeout_s)
        try:
            return await commit_with_retries(stop=stop_after_delay(park_after_s))
        except (Exception, asyncio.CancelledError) as failure:
            parked = result.was_parked or await self.parked.park(wait.identity, result)
            if parked or not isinstance(failure, Unavailable) or self.retry_timeout_s <= park_after_s:
                raise
        try:
            return await commit_with_retries(stop=stop_after_delay(self.retry_timeout_s - park_after_s))
        except (Exception, asyncio.CancelledError):
            await self.parked.park(wait.identity, result)  # NATS may have been unavailable at the first attempt
            raise


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.debug("commit failed; retrying: %s", outage, extra={"action": "commit.retried"})
