"""Steps that occupy the event loop for tens of milliseconds, one in an iteration, so that they do not add up.

Nothing can divide them: decoding, encoding or sending 10 MB of text.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

_LONG_BYTES = 1_000_000
"""A step takes some 3 ms per million bytes, three times as long on a busy machine."""

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def without_other_long_steps(size: int) -> None:
    """Wait until a step on `size` bytes may follow at once, without an `await` in between; small ones do not wait."""
    if size <= _LONG_BYTES:
        return
    loop = asyncio.get_running_loop()
    lock = _locks.setdefault(loop, asyncio.Lock())
    await lock.acquire()
    loop.call_soon(lock.release)  # in the next iteration
