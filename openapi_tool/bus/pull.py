"""A standing pull from a durable consumer that never asks for more than there is room for.

One request covers all free room and stays open; when room frees up another one tops it up. So a
single message is delivered at once, a burst in one go, and nothing is fetched that would have to
wait here (NATS ADR-13, pull consumers).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header, StatusCode

log = logging.getLogger(__name__)

EXPIRES_S = 30.0
HEARTBEAT_S = 5.0
_GOODBYE_S = 2.0
_SILENCE_S = 2.5 * HEARTBEAT_S
_NANOSECONDS = 1_000_000_000
_HEARTBEAT = "100"
_PENDING = "Nats-Pending-Messages"
_NUMBER = re.compile(r"[0-9]{1,18}")
_TOP_UP = 4
"""A request that is still open is topped up once this part of all room is not yet asked for."""


class ConsumerGone(Exception):
    """The server says that the durable is not there (any more)."""


class StandingPull:
    """Keeps requests open for `room()` messages; `receive` gets each one and refuses what was not asked for."""

    def __init__(
        self,
        client: Client,
        stream: str,
        durable: str,
        room: Callable[[], int],
        receive: Callable[[Msg], bool],
    ) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._room = room
        self._receive = receive
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._asked = 0
        self._largest = 1
        self._heard = time.monotonic()
        self._wake = asyncio.Event()
        self._gone: str | None = None
        self._reconnects = 0

    @property
    def last_heard(self) -> float:
        """When the server last said anything, on the monotonic clock (seconds)."""
        return self._heard

    def wake(self) -> None:
        """Look at the room again: some of it has become free."""
        self._wake.set()

    async def run(self) -> None:
        """Pull until cancelled. Raises ConsumerGone; connection losses are waited out."""
        self._gone = None
        await self._subscribe()
        try:
            while self._gone is None:
                self._wake.clear()
                await self._top_up()
                await self._rest()
            raise ConsumerGone(self._gone)
        finally:
            await self._unsubscribe()

    async def _subscribe(self) -> None:
        self._reconnects = self._client.stats["reconnects"]
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)
        self._forget_requests()

    async def _unsubscribe(self) -> None:
        """Ask for nothing more; what the server has already sent is still received.

        The server drops a request whose inbox nobody listens to.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is None or not self._client.is_connected:
            return
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await subscription.drain()  # type: ignore[no-untyped-call]
        except (nats.errors.Error, OSError) as error:
            log.info(
                "the pull was not ended properly; what was on its way comes again after AckWait",
                extra={"action": "pull.broken_off", "error": f"{type(error).__name__}: {error}"},
            )

    async def _top_up(self) -> None:
        if self._reconnects != self._client.stats["reconnects"]:
            self._reconnects = self._client.stats["reconnects"]
            self._forget_requests()
        room = self._room()
        self._largest = max(self._largest, room)
        missing = room - self._asked
        if missing <= 0 or not self._client.is_connected:
            return
        if self._asked and missing * _TOP_UP < self._largest:
            return
        request = {
            "batch": missing,
            "expires": int(EXPIRES_S * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_S * _NANOSECONDS),
        }
        self._asked += missing
        await self._client.publish(self._subject, orjson.dumps(request), self._inbox)

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._wake.wait()
        except TimeoutError:
            if time.monotonic() - self._heard > _SILENCE_S:
                self._forget_requests()

    def _forget_requests(self) -> None:
        """After silence or a reconnect the server may know of no request; ask for everything again."""
        self._asked = 0
        self._heard = time.monotonic()

    async def _on_message(self, message: Msg) -> None:
        self._heard = time.monotonic()
        status = message.headers.get(Header.STATUS) if message.headers and not message.reply else None
        if status is None:
            self._asked = max(0, self._asked - self._receive(message))
        elif status != _HEARTBEAT:
            self._request_ended(status, message.headers or {})
        if self._room() > self._asked:
            self._wake.set()

    def _request_ended(self, status: str, headers: dict[str, str]) -> None:
        """A request expired or was refused; what it still asked for is no longer asked for."""
        description = headers.get(Header.DESCRIPTION, "")
        remaining = headers.get(_PENDING, "")
        self._asked = max(0, self._asked - int(remaining)) if _NUMBER.fullmatch(remaining) else 0
        if status == StatusCode.SERVICE_UNAVAILABLE or "consumer deleted" in description.lower():
            self._gone = description or "no responders"
        elif status not in (StatusCode.REQUEST_TIMEOUT, StatusCode.NO_MESSAGES):
            log.warning(
                "the server ended a pull request",
                extra={"action": "pull.ended", "status": status, "description": description},
            )
