"""Connections of the service, which are tried again until their servers are available."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TypeVar

from tenacity import wait_exponential_jitter

from openapi_tool.concurrency.retries import retried
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.protocol.errors import Unavailable

T = TypeVar("T")


async def connect_to_nats(
    stack: AsyncExitStack, options: BusOptions, on_unavailable: Callable[[Unavailable], None]
) -> BusClient:
    """Connect, again and again until NATS is available; `stack` closes the connection.

    `on_unavailable` is called with the reason of each failed attempt.
    """
    bus = replace(options, on_trouble=lambda reason: on_unavailable(Unavailable(reason)))
    return await until_available(lambda: stack.enter_async_context(connected(bus)), on_unavailable)


async def until_available(attempt: Callable[[], Awaitable[T]], on_unavailable: Callable[[Unavailable], None]) -> T:
    """Return the result of `attempt`, repeated while it raises Unavailable, which is passed to `on_unavailable`."""

    async def reported_attempt() -> T:
        try:
            return await attempt()
        except Unavailable as error:
            on_unavailable(error)
            raise

    return await retried(
        reported_attempt, on=Unavailable, wait=wait_exponential_jitter(multiplier=0.2, max=5, jitter=0.2)
    )
