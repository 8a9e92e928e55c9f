"""Steps that occupy the event loop for milliseconds, one in an iteration, so that they do not add up.

Nothing can divide them: decoding, encoding or sending 10 MB of text; reading a response of a page's author's choice.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

LONG_BYTES = 1_000_000
"""A step that copies or sends bytes takes some 3 ms per million, three times as long on a busy machine."""

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def without_other_long_steps(size: int, long: int = LONG_BYTES) -> None:
    """Wait until a step on `size` bytes may follow at once, without an `await` in between; up to `long` none waits."""
    if size <= long:
        return
    loop = asyncio.get_running_loop()
    lock = _locks.setdefault(loop, asyncio.Lock())
    await lock.acquire()
    loop.call_soon(lock.release)  # in the next iteration
