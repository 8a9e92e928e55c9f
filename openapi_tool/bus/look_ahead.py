"""Look-ahead: fetch commands while all slots are busy, so that the scheduler can choose among projects.

Without it the backlog of one project blocks the commands of others (head-of-line blocking). The requests use `no_wait`,
so they take no command from an executor with a free slot: the server serves its open pull request first (NATS ADR-13).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

import orjson
from nats.aio.msg import Msg
from nats.js.api import Header

from openapi_tool.bus.client import BusClient
from openapi_tool.bus.pull_consumer import unsubscribe

PAUSE_S = 0.05
"""Mean pause in seconds after a request that found fewer commands than it asked for."""

JITTER = 0.5, 1.5
"""Bounds of the random factor of PAUSE_S. With a fixed pause the replicas would always ask in the same order,
and the one that asks after the longest gap would get most of the new commands."""

_REPLY_TIMEOUT_S = 1.0
"""Seconds until the next request if the server does not answer."""

_MAX_RECEIVE_S = 0.01
"""Seconds of receiving messages before other tasks run."""

_MAX_BYTES = 8 * 2**20
"""Byte limit of one request: nats-py buffers its messages until they are received."""

_CONFLICT = "409"  # status: `max_bytes` is reached


class LookAhead:
    """Fetches `batch()` commands at a time while that is positive, and passes each to `receive`."""

    def __init__(
        self,
        client: BusClient,
        stream: str,
        durable: str,
        batch: Callable[[], int],
        receive: Callable[[Msg], None],
    ) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._batch = batch
        self._receive = receive
        self._outstanding = 0
        self._yielded_at = 0.0
        self._batch_ended = asyncio.Event()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Start fetching: all slots are busy."""
        self._wake.set()

    async def run(self) -> None:
        """Fetch until cancelled; messages already sent by the server are still received."""
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=self._on_message)
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while batch := self._batch():
                    await self._fetch(batch, inbox)
        finally:
            await unsubscribe(self._client, subscription)

    async def _fetch(self, batch: int, inbox: str) -> None:
        self._outstanding = batch
        self._batch_ended.clear()
        if self._client.is_connected:
            request = {"batch": batch, "no_wait": True, "max_bytes": _MAX_BYTES}
            await self._client.publish(self._subject, orjson.dumps(request), inbox)
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPLY_TIMEOUT_S):
                    await self._batch_ended.wait()
        if self._outstanding:
            await asyncio.sleep(PAUSE_S * random.uniform(*JITTER))  # noqa: S311 - no secret depends on it

    async def _on_message(self, message: Msg) -> None:
        # A stored message has a reply subject; its publisher may have set a header `Status`, which is not the server's.
        status = message.headers.get(Header.STATUS) if message.headers and not message.reply else None
        if status is None:
            self._receive(message)
            self._outstanding = max(0, self._outstanding - 1)
        elif status == _CONFLICT:
            self._outstanding = 0  # more commands are there, so fetch again without a pause
        if status is not None or not self._outstanding:
            self._batch_ended.set()
        await self._yield()

    async def _yield(self) -> None:
        now = time.monotonic()
        if now - self._yielded_at > _MAX_RECEIVE_S:
            await asyncio.sleep(0)
            self._yielded_at = time.monotonic()
