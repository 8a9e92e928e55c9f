"""Asking the upstream again, where the failure says that it is worth it and the deadline allows (jina-api section 4).

Search and reader requests change nothing at the upstream, so repeating one is safe.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential_jitter
from tenacity.wait import wait_base, wait_random

from openapi_tool.protocol.errors import ToolError
from openapi_tool.telemetry import metrics
from openapi_tool.tools.deadline import Deadline

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """At most so many repeats; waits in seconds, the first and the longest, where the upstream names none."""

    max_repeats: int
    first_wait_s: float
    max_wait_s: float


async def with_retries(ask: Callable[[], Awaitable[T]], options: RetryOptions, deadline: Deadline) -> T:
    """The answer of `ask`, repeated as its ToolErrors say; never waits past the deadline, but raises the last error."""
    try:
        return await ask()
    except ToolError as error:
        failed = [error]

    async def again() -> T:
        if failed:
            raise failed.pop()
        return await ask()

    def hopeless(state: RetryCallState) -> bool:
        error = _error(state)
        return (
            state.attempt_number > min(error.repeats, options.max_repeats)
            or (state.upcoming_sleep or 0.0) >= deadline.remaining()
        )

    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(ToolError),
        wait=_Wait(options),
        stop=hopeless,
        before_sleep=_log_retry,
        reraise=True,
    ):
        with attempt:
            return await again()
    raise AssertionError("retrying never ends without a result")


class _Wait(wait_base):
    """What the upstream asks for, else exponential; jittered both, so that callers do not come back together."""

    def __init__(self, options: RetryOptions) -> None:
        first = options.first_wait_s
        self._backoff = wait_exponential_jitter(multiplier=first, max=options.max_wait_s, jitter=first)
        self._spread = wait_random(0, first)

    def __call__(self, retry_state: RetryCallState) -> float:
        asked = _error(retry_state).retry_after
        return self._backoff(retry_state) if asked is None else asked + self._spread(retry_state)


def _error(state: RetryCallState) -> ToolError:
    """What made the attempt fail; nothing but a ToolError is retried."""
    return cast("ToolError", state.outcome and state.outcome.exception())


def _log_retry(state: RetryCallState) -> None:
    error = _error(state)
    metrics.UPSTREAM_RETRIES.labels(error.code).inc()
    log.info(
        "asking the upstream again",
        extra={
            "action": "upstream.retry",
            "attempt": state.attempt_number,
            "error_code": error.code,
            "http_status": error.http_status,
            "wait_s": round(state.upcoming_sleep or 0.0, 3),
        },
    )
