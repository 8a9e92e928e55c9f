"""What a cancellation of a task may interrupt, and what not.

A call is cancelled if the process stops or the time of the call is over. Work that must not be left half done, such as
a commit with its doorbell, is `shielded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_AGAIN_S = 1.0


async def shielded(work: Coroutine[Any, Any, T], grace_s: float) -> T:
    """Run `work` in its own task; return its result or raise its exception, however often the caller is cancelled.

    If the caller is cancelled, it still waits for the work, and its next `await` raises the cancellation. With
    `asyncio.shield` alone it would go on at once, and hand back a command that the work still acknowledges.

    Work that still runs `grace_s` seconds after the cancellation is cancelled, too, which raises CancelledError.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _wait_for_end(task, grace_s)
    caller = asyncio.current_task()
    if caller is not None and not task.cancelled():
        caller.cancel()  # takes effect at its next `await`
    return task.result()


async def _wait_for_end(task: asyncio.Task[Any], grace_s: float) -> None:
    """Wait until a task has ended, cancelling it after `grace_s` seconds; swallow cancellations of the caller."""
    loop = asyncio.get_running_loop()
    give_up_at: float | None = loop.time() + grace_s  # None once the task has been cancelled
    while not task.done():
        left_s = None if give_up_at is None else max(0.0, give_up_at - loop.time())
        with suppress(asyncio.CancelledError):  # of the caller: the wait goes on with what is left of the time
            await asyncio.wait([task], timeout=left_s)
            task.cancel()  # the time is over, or the task has ended: then this has no effect
            give_up_at = None


async def cancel_until_ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task until it has ended: once is not enough, as libraries may drop a cancellation (`interruptible`)."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled with the caller.

    Call functions of nats-py and asyncpg in this way. They use `asyncio.wait_for`, which before Python 3.12 drops a
    cancellation that arrives in the same iteration of the loop as the result. In a task of its own, `work` cannot drop
    the cancellation of the caller.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
        return task.result()
    finally:
        task.cancel()


def raise_if_cancelled(cause: Exception) -> None:
    """Raise CancelledError from `cause` if the current task was cancelled.

    An exception group, or an exception in a `finally` block, can replace the CancelledError. The call would seem to
    have failed, and the failure would be committed as its result, although its command must be handed back.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from cause
