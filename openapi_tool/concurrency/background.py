"""Tasks of asyncio that belong to no single call, such as one that watches a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


def in_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that belongs to no single call.

    It gets an empty context. In that of the call that happens to start it, its log lines would have the ids of that
    call.
    """
    return asyncio.create_task(work, name=name, context=Context())


async def repeat(step: Callable[[], Awaitable[object]], every_s: float, name: str) -> None:
    """Run `step` again and again until cancelled, with pauses of `every_s` seconds.

    After an exception, which is a defect, it goes on: otherwise nobody would notice that the steps have stopped. The
    exception is logged; further ones are not, until a step succeeds.
    """
    failed_before = False
    while True:
        try:
            await step()
            failed_before = False
        except Exception:
            if not failed_before:
                log.exception(
                    "internal error in %s; trying again", name, extra={"action": "background.failed", "task": name}
                )
            failed_before = True
        await asyncio.sleep(every_s)
