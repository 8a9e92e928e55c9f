"""Lag of the event loop: how late a timer is, because a computation has blocked the loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_TICK_S = 0.25  # between two measurements
_LAG_WARNING_S = 0.5  # a longer lag is logged


async def monitor_loop_lag(on_lag: Callable[[float], None]) -> None:
    """Call `on_lag` with each lag of the event loop of more than half a second."""
    loop = asyncio.get_running_loop()
    metrics.EVENT_LOOP_TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    while True:
        before = time.monotonic()
        await asyncio.sleep(_TICK_S)
        lag_s = max(0.0, time.monotonic() - before - _TICK_S)
        metrics.EVENT_LOOP_LAG.observe(lag_s)
        if lag_s > _LAG_WARNING_S:
            on_lag(lag_s)
            log.warning("the event loop was blocked", extra={"action": "event_loop.lagged", "lag_s": round(lag_s, 3)})
