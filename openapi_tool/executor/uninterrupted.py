"""Work that a cancellation must not break off halfway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def uninterrupted(work: Coroutine[Any, Any, T], grace_s: float) -> T:
    """The result of `work`, also where the waiting task is cancelled and `work` ends within `grace_s` seconds.

    Raises CancelledError, and breaks `work` off, only when it does not.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        done, _ = await asyncio.wait([task], timeout=grace_s)
        if done:
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        raise
