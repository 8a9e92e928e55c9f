"""What a cancellation may interrupt, and what not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T], grace_s: float) -> T:
    """Run `work` in its own task; return its result or raise its exception, however often the caller is cancelled.

    With `asyncio.shield` alone a cancelled caller would hand back a command that the work still acknowledges. Here the
    caller's next await raises the cancellation. Work that still runs `grace_s` seconds later is cancelled, which raises
    CancelledError.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _end(task, grace_s)
    if not task.cancelled() and (caller := asyncio.current_task()):
        caller.cancel()
    return task.result()


async def _end(task: asyncio.Task[Any], grace_s: float) -> None:
    """Wait until a task has ended, cancelling it after `grace_s` seconds; swallow cancellations of the caller."""
    loop = asyncio.get_running_loop()
    give_up_at: float | None = loop.time() + grace_s
    while not task.done():
        left_s = None if give_up_at is None else max(0.0, give_up_at - loop.time())
        with suppress(asyncio.CancelledError):  # of the caller: the wait goes on with what is left of the time
            await asyncio.wait([task], timeout=left_s)
            task.cancel()  # no effect if it has ended
            give_up_at = None


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled with the caller.

    Before Python 3.12 `asyncio.wait_for`, which nats-py and asyncpg use, drops a cancellation that arrives in the same
    iteration as the result. In a task of its own `work` cannot drop that of the caller.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
        return task.result()
    finally:
        task.cancel()


def raise_if_cancelled(cause: Exception) -> None:
    """Raise CancelledError from `cause` if the current task was cancelled.

    An exception group, or an exception in a `finally` block, can replace the CancelledError. It would be committed as
    a failure of the call, although the command must be handed back.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from cause
