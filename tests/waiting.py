"""How long tests wait for what must come."""

import asyncio
import inspect
from collections.abc import Callable

WAIT_S = 60.0
"""Bound of every wait for something that must become true: long, as the machine may be busy with other tests."""


async def until(holds: Callable[[], object]) -> None:
    """Wait until a function, or what it returns to await, gives something true. Raises TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not await _value(holds):  # noqa: ASYNC110 - not all conditions have an event
            await asyncio.sleep(0.01)


async def _value(holds: Callable[[], object]) -> object:
    value = holds()
    return await value if inspect.isawaitable(value) else value
