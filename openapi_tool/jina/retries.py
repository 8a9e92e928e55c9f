"""Retries of upstream requests: search and reader requests are idempotent, so they may be repeated."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable

from openapi_tool.jina.options import RetryOptions
from openapi_tool.protocol.errors import ToolError
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


def retry_wait_s(error: ToolError, attempt: int, options: RetryOptions, left_s: float) -> float | None:
    """Return the seconds to wait before the next attempt, and log it; None if there is none.

    `error` ended the attempt of this number, from 1 on. The wait is Retry-After, else exponential back-off, both with
    jitter, and must be shorter than `left_s`.
    """
    if attempt > min(error.max_retries, options.max_retries):
        return None
    jitter_s = random.uniform(0, options.initial_backoff_s)  # noqa: S311 - no secret
    if error.retry_after is not None:
        wait_s = error.retry_after + jitter_s
    else:
        wait_s = min(options.initial_backoff_s * 2 ** (attempt - 1) + jitter_s, options.max_backoff_s)
    if wait_s >= left_s:
        return None
    metrics.UPSTREAM_RETRIES.labels(error.code).inc()
    log.info(
        "retrying an upstream request",
        extra={
            "action": "upstream.retry",
            "attempt": attempt,
            "error_code": error.code,
            "http_status": error.http_status,
            "wait_s": round(wait_s, 3),
        },
    )
    return wait_s
