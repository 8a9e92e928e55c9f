"""Cooperative multitasking for long computations, so that they do not block the event loop.

A computation is a generator that yields after every few milliseconds of work and returns its result. A thread would not
help: JSON parsing, searching and copying hold the GIL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

SMALL = 64 * 1024
"""Bytes or characters that are processed without a pause, which takes a fraction of a millisecond."""

_SLICE_S = 0.004
_ITERATIONS_BETWEEN = 2
"""Iterations of the event loop between slices. In the first the loop only polls sockets and timers that became ready
during the slice; their callbacks run in the second."""


def at_once(steps: Steps[T]) -> T:
    """Run all steps without a pause and return the result."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        result: T = done.value
        return result


def each(computations: Iterable[Steps[T]]) -> Steps[list[T]]:
    """Run several computations one after the other and return their results."""
    results = []
    for steps in computations:
        results.append((yield from steps))  # noqa: PERF401 - no comprehension can yield
    return results


class TimeSlicer:
    """Runs one large computation at a time, and yields to the event loop every 4 ms.

    Without the lock, 64 concurrent computations would take 64 slices in each iteration.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, steps: Steps[T], size: int) -> T:
        """Run `steps`, which process `size` bytes or characters; return their result. No pauses up to SMALL."""
        if size <= SMALL:
            return at_once(steps)
        async with self._lock:
            return await _with_pauses(steps)


async def _with_pauses(steps: Steps[T]) -> T:
    try:
        while True:
            for _ in range(_ITERATIONS_BETWEEN):
                await asyncio.sleep(0)
            pause_at = time.perf_counter() + _SLICE_S
            while time.perf_counter() < pause_at:
                next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
