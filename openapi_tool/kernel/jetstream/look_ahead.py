"""Look-ahead: fetch some commands while all slots are busy.

Projects take turns, but only with the commands that the executor has received. Without the look-ahead the backlog of
one project would block the commands of others behind it in the stream (head-of-line blocking).

The pull requests use `no_wait`, so that the server answers at once with what is there. It serves open requests first,
which are those of executors with a free slot (NATS ADR-13).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

import orjson
from nats.aio.msg import Msg
from nats.js.api import StatusCode

from openapi_tool.kernel.jetstream.pull_requests import next_subject, server_status, unsubscribe
from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.nats_client.client import BusClient

PAUSE_S = 0.05
"""Mean pause after a request that found fewer commands than it asked for."""

JITTER = 0.5, 1.5
"""Bounds of the random factor of PAUSE_S. With a fixed pause replicas would always ask in the same order, and the one
after the longest gap would get most of the new commands."""

_REPLY_TIMEOUT_S = 1.0  # after this time without an answer another request is sent
_MAX_RECEIVE_S = 0.01  # of receiving messages without a break; then other tasks run
_MAX_BYTES = 8 * 2**20  # of the messages of one request, which nats-py buffers


class LookAhead:
    """Fetches commands once `wake` was called, until `wanted` returns 0.

    `wanted` returns how many to fetch at a time. `receive` gets each message.
    """

    def __init__(
        self,
        client: BusClient,
        durable: Durable,
        wanted: Callable[[], int],
        receive: Callable[[Msg], None],
    ) -> None:
        self._client = client
        self._subject = next_subject(durable)
        self._wanted = wanted
        self._receive = receive
        self._outstanding = 0  # messages of the current request that have not arrived
        self._yielded_at = 0.0  # when other tasks last ran, on the monotonic clock
        self._request_ended = asyncio.Event()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Start fetching: all slots are busy."""
        self._wake.set()

    async def run(self) -> None:
        """Fetch until cancelled; messages already sent are still received."""
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=self._on_message)
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while batch := self._wanted():
                    await self._fetch(batch, inbox)
        finally:
            await unsubscribe(self._client, subscription)

    async def _fetch(self, batch: int, inbox: str) -> None:
        """Send one request and wait for its messages; pause if there were fewer than `batch`."""
        self._outstanding = batch
        self._request_ended.clear()
        if self._client.is_connected:
            request = {"batch": batch, "no_wait": True, "max_bytes": _MAX_BYTES}
            await self._client.publish(self._subject, orjson.dumps(request), inbox)
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPLY_TIMEOUT_S):
                    await self._request_ended.wait()
        if self._outstanding:
            await asyncio.sleep(PAUSE_S * random.uniform(*JITTER))  # noqa: S311 - no secret depends on it

    async def _on_message(self, message: Msg) -> None:
        status = server_status(message)
        if status is None:  # a command
            self._receive(message)
            self._outstanding = max(0, self._outstanding - 1)
        elif status == StatusCode.CONFLICT:  # `max_bytes` is reached: more commands are pending
            self._outstanding = 0  # so fetch again without a pause
        has_status = status is not None  # any status ends the request, usually as there are no more messages
        if has_status or not self._outstanding:
            self._request_ended.set()
        # nats-py calls this for one buffered message after the other, without giving other tasks a turn.
        if time.monotonic() - self._yielded_at > _MAX_RECEIVE_S:
            await asyncio.sleep(0)
            self._yielded_at = time.monotonic()
