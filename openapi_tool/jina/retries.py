"""Retries of upstream requests: search and reader requests are idempotent, so they may be repeated."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from tenacity import RetryCallState, wait_exponential_jitter

from openapi_tool.concurrency.retries import retried
from openapi_tool.jina.options import RetryOptions
from openapi_tool.protocol.errors import ToolError
from openapi_tool.telemetry import metrics
from openapi_tool.tools.deadlines import Deadline

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
    """Return the result of `attempt`, retried as its ToolErrors and the deadline allow.

    Retries wait for Retry-After, else by exponential back-off, both with jitter; there is none if less than `min_s`
    seconds would be left for it.
    """

    def should_stop(state: RetryCallState) -> bool:
        error = _error(state)
        return (
            state.attempt_number > min(error.max_retries, options.max_retries)
            or (state.upcoming_sleep or 0.0) + min_s >= deadline.remaining()
        )

    def wait(state: RetryCallState) -> float:
        asked_for, backoff_s = _error(state).retry_after, options.initial_backoff_s
        if asked_for is not None:
            return asked_for + random.uniform(0, backoff_s)  # noqa: S311 - no secret
        return wait_exponential_jitter(multiplier=backoff_s, max=options.max_backoff_s, jitter=backoff_s)(state)

    return await retried(attempt, on=ToolError, wait=wait, stop=should_stop, before_sleep=_log_retry, sleep=sleep)


def _error(state: RetryCallState) -> ToolError:
    """Only ToolErrors are retried."""
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
