"""Retry of upstream requests, if the error is retryable and the deadline allows (jina-api section 4).

Search and reader requests are idempotent.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from tenacity import RetryCallState, wait_exception, wait_exponential_jitter, wait_random

from openapi_tool.options import RetryOptions
from openapi_tool.protocol.errors import ToolError
from openapi_tool.retrying import retried
from openapi_tool.telemetry import metrics
from openapi_tool.tools.deadline import Deadline

log = logging.getLogger(__name__)

T = TypeVar("T")

Sleep = Callable[[float], Awaitable[None]]


async def with_retries(
    attempt: Callable[[], Awaitable[T]],
    options: RetryOptions,
    deadline: Deadline,
    min_s: float = 0.0,
    sleep: Sleep = asyncio.sleep,
) -> T:
    """Return the result of `attempt`, retried as its ToolErrors and the deadline allow; else raise the last error.

    Nothing is retried with less than `min_s` seconds left.
    """

    def should_stop(state: RetryCallState) -> bool:
        error = _error(state)
        return (
            state.attempt_number > min(error.max_retries, options.max_retries)
            or (state.upcoming_sleep or 0.0) + min_s >= deadline.remaining()
        )

    wait = _wait(options)
    return await retried(attempt, on=ToolError, wait=wait, stop=should_stop, before_sleep=_log_retry, sleep=sleep)


@functools.lru_cache(maxsize=4)  # a service has one set of options
def _wait(options: RetryOptions) -> Callable[[RetryCallState], float]:
    """Return the wait before a repeat: Retry-After, else exponential back-off; both with jitter."""
    initial_s = options.initial_backoff_s
    backoff = wait_exponential_jitter(multiplier=initial_s, max=options.max_backoff_s, jitter=initial_s)
    retry_after = wait_exception(_retry_after) + wait_random(0, initial_s)
    return lambda state: (backoff if _error(state).retry_after is None else retry_after)(state)


def _retry_after(error: BaseException) -> float:
    return cast("ToolError", error).retry_after or 0.0


def _error(state: RetryCallState) -> ToolError:
    """Return the error of the attempt; only ToolErrors are retried."""
    return cast("ToolError", state.outcome and state.outcome.exception())


def _log_retry(state: RetryCallState) -> None:
    error = _error(state)
    metrics.UPSTREAM_RETRIES.labels(error.code).inc()
    log.info(
        "retrying an upstream request",
        extra={
            "action": "upstream.retry",
            "attempt": state.attempt_number,
            "error_code": error.code,
            "http_status": error.http_status,
            "wait_s": round(state.upcoming_sleep or 0.0, 3),
        },
    )
