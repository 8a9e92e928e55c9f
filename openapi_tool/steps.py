"""Long computations in steps, so that the event loop never waits for a whole one.

A computation is a generator that yields after every few milliseconds of work and returns its result. A thread would not
help: JSON parsers, searches and copies hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

SMALL = 64 * 1024
"""Bytes or characters that are worked on at once: a fraction of a millisecond."""

_TURN_S = 0.004


def at_once(steps: Steps[T]) -> T:
    """Run every step without a pause and return the result."""
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


class Turns:
    """Runs one large computation at a time, and lets the event loop do its other work every 4 ms.

    Without the lock, 64 computations would put 64 steps into each iteration of the loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, steps: Steps[T], size: int) -> T:
        """Run `steps` that work on `size` bytes or characters; up to SMALL of them at once."""
        if size <= SMALL:
            return at_once(steps)
        async with self._lock:
            return await _with_pauses(steps)


async def _with_pauses(steps: Steps[T]) -> T:
    try:
        while True:
            await asyncio.sleep(0)
            pause_at = time.perf_counter() + _TURN_S
            while time.perf_counter() < pause_at:
                next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
