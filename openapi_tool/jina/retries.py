"""Retries of upstream requests: whether, and after which wait.

A search or read changes nothing at the upstream, so a request may be sent again.
"""

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
    """Return the seconds to wait before the next attempt; None if there must be none. Log and count a retry.

    `error` ended the attempt with the number `attempt`; the first has number 1. The wait is what the upstream asks for
    in Retry-After, else a back-off that doubles with each attempt. Both get jitter. There is no retry if the wait would
    take `left_s` seconds or more.
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
