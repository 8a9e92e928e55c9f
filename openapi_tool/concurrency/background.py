"""Tasks that serve many calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


def in_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that serves many calls; in its caller's context it would log that call's ids for other projects."""
    return asyncio.create_task(work, name=name, context=Context())


async def repeat(step: Callable[[], Awaitable[object]], every_s: float, name: str) -> None:
    """Run `step` until cancelled, `every_s` seconds after its last end.

    A defect does not end it, or what it is for would silently happen no more. It is logged once, until a step succeeds.
    """
    failed = False
    while True:
        try:
            await step()
            failed = False
        except Exception:
            if not failed:
                log.exception(
                    "internal error in %s; trying again", name, extra={"action": "background.failed", "task": name}
                )
            failed = True
        await asyncio.sleep(every_s)
