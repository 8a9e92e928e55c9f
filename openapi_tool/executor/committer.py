"""Commit a result with retries; park it if the commit fails."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from tenacity import RetryCallState, stop_after_delay, wait_exponential_jitter

from openapi_tool.executor.parking import CallResult, ParkedResults
from openapi_tool.executor.ports import Kernel
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.report import Report
from openapi_tool.retrying import retried

log = logging.getLogger(__name__)

_PARK_AFTER_S = 10.0
"""Seconds of failed commits until the result is parked for another executor; workers wait at least 30 s."""

_BACKOFF = wait_exponential_jitter(multiplier=0.1, max=2.0, jitter=0.1)


@dataclass(frozen=True, slots=True)
class ResultCommitter:
    """Commits results; retries for `retry_timeout_s` seconds while the database is unavailable."""

    kernel: Kernel
    parked: ParkedResults
    retry_timeout_s: float

    async def commit(self, identity: CallIdentity, result: CallResult, card: Card, report: Report) -> bool:
        """Commit the result; return whether it was written. If that fails, park it and raise the failure.

        Parked after `_PARK_AFTER_S` of failed commits: another executor may still reach the database. A result that is
        too large to park is retried here for all of `retry_timeout_s`.
        """
        early_s = min(_PARK_AFTER_S, self.retry_timeout_s)
        try:
            return await self._commit(card, report, result.artifact, early_s)
        except (Exception, asyncio.CancelledError) as failure:
            parked = result.parked or await self.parked.park(identity, result)
            if parked or not isinstance(failure, Unavailable) or self.retry_timeout_s <= early_s:
                raise
        try:
            return await self._commit(card, report, result.artifact, self.retry_timeout_s - early_s, retry=True)
        except (Exception, asyncio.CancelledError):
            await self.parked.park(identity, result)
            raise

    async def _commit(
        self, card: Card, report: Report, artifact: ArtifactCard | None, for_s: float, *, retry: bool = False
    ) -> bool:
        """Commit, with retries for `for_s` seconds. `retry` tells the circuit breaker that a commit failed before."""

        async def attempt() -> bool:
            nonlocal retry
            failed_before, retry = retry, True
            return await self.kernel.commit(card, report, artifact, retry=failed_before)

        return await retried(
            attempt, on=Unavailable, wait=_BACKOFF, stop=stop_after_delay(for_s), before_sleep=_log_retry
        )


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.debug("commit failed; retrying: %s", outage, extra={"action": "commit.retried"})
