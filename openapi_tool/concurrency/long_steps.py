"""Steps that occupy the event loop for milliseconds: at most one runs in an iteration of the loop.

Such a step cannot be divided: to decode, encode or send 10 MB of text, or to read a response that a page's author has
made costly. If several ran in the same iteration, everything else would wait for all of them.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

LONG_BYTES = 1_000_000
"""A step that copies or sends bytes takes some 3 ms per million, three times as long on a busy machine."""

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def without_other_long_steps(size: int, long: int = LONG_BYTES) -> None:
    """Wait until a step on `size` bytes may begin; the caller begins it at once, without an `await` in between.

    Steps on up to `long` bytes are short, and do not wait.
    """
    if size <= long:
        return
    loop = asyncio.get_running_loop()
    lock = _locks.setdefault(loop, asyncio.Lock())
    await lock.acquire()
    loop.call_soon(lock.release)  # in the next iteration, after the caller's step
