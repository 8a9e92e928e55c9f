"""Pull consumer with an open request for as many messages as there are free slots, and look-ahead while there are none.

One request covers all free slots, a further one those that become free. So a single message is delivered at once, a
burst in one batch, and no message is fetched without a free slot (NATS ADR-13, pull consumers; our ADR 2).

Without look-ahead the backlog of one project blocks the commands of others (head-of-line blocking). Its requests use
`no_wait`: the server serves open pull requests, of executors with a free slot, first (NATS ADR-13).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress

import nats.errors
import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header, StatusCode

from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.nats_client.client import BusClient

log = logging.getLogger(__name__)

EXPIRES_S = 30.0
HEARTBEAT_S = 5.0
_UNSUBSCRIBE_TIMEOUT_S = 2.0
_MAX_SILENCE_S = 2.5 * HEARTBEAT_S
"""Silence after which the server has probably lost the open request."""

_MAX_BYTES = 4 * 2**20
"""Byte limit of one request, which the server then ends with 409. A larger burst would delay acknowledgements of our
publications on the same connection: 64 large commands by 0.2 s."""

_COMPLETED = ("batch completed", "message size exceeds maxbytes")  # descriptions of status 409
_EXPECTED_STATUSES = (StatusCode.REQUEST_TIMEOUT, StatusCode.NO_MESSAGES)
_NANOSECONDS = 1_000_000_000
_PENDING = "Nats-Pending-Messages"
_NUMBER = re.compile(r"[0-9]{1,18}")
_FIRST_PAUSE_S = 0.05  # after a request that the server ended unexpectedly; each further one doubles it
_MAX_PAUSE_S = 2.0
_MAX_REFUSALS = 10  # up to which they are counted: a larger exponent has no effect
_TOP_UP_DIVISOR = 4
"""Send a further request once it is for a quarter of the most messages wanted so far: fewer, larger requests."""


class ConsumerGone(Exception):
    """The durable does not exist."""


def _server_status(message: Msg) -> str | None:
    """Return the server's status. A stored message, which has a reply subject, may have such a header of its own."""
    return message.headers.get(Header.STATUS) if message.headers and not message.reply else None


class PullConsumer:
    """Keeps requests open for `wanted()` messages; `receive` returns False for one that is not JetStream's."""

    def __init__(
        self,
        client: BusClient,
        durable: Durable,
        wanted: Callable[[], int],
        receive: Callable[[Msg], bool],
    ) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{durable.stream}.{durable.name}"
        self._wanted = wanted
        self._receive = receive
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._requested = 0  # messages of open requests that have not arrived
        self._max_wanted = 1  # so far
        self._requested_at = time.monotonic()  # when the latest request was sent
        # Since when the server owes an answer to the open requests: the time of its last answer, else of the first
        # request. Further requests do not change it. None without an open request.
        self._unanswered_since: float | None = None
        self._renew_requested = False
        self._wake = asyncio.Event()
        self._gone_reason: str | None = None
        self._reconnects = 0
        self._refusals = 0  # requests that the server ended unexpectedly, one after the other
        self._paused_until = 0.0

    @property
    def silence_s(self) -> float:
        """Seconds since the server answered an open request, also by heartbeat; 0 without one on this connection."""
        if self._unanswered_since is None or self._reconnected:
            return 0.0
        return time.monotonic() - self._unanswered_since

    def wake(self) -> None:
        """Fill slots that became free."""
        self._wake.set()

    def renew(self) -> None:
        """Replace the open request: the server may have lost it."""
        self._renew_requested = True
        self._wake.set()

    def give_up(self, reason: str) -> None:
        """End `run` with ConsumerGone."""
        self._gone_reason = reason
        self._wake.set()

    async def run(self) -> None:
        """Pull until cancelled, across connection losses. Raises ConsumerGone."""
        await self._subscribe()
        try:
            while self._gone_reason is None:
                self._wake.clear()
                if self._must_resubscribe():
                    await self._resubscribe()
                await self._top_up()
                await self._wait()
                self._renew_if_silent()
            raise ConsumerGone(self._gone_reason)
        finally:
            await self._unsubscribe()

    def _must_resubscribe(self) -> bool:
        """Return whether the open request may be lost, or is for more than is wanted: it cannot be reduced."""
        return self._renew_requested or self._reconnected or self._requested > self._wanted()

    @property
    def _reconnected(self) -> bool:
        return self._reconnects != self._client.stats["reconnects"]

    async def _subscribe(self) -> None:
        self._reconnects = self._client.stats["reconnects"]
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)

    async def _resubscribe(self) -> None:
        """Subscribe to a new inbox, so that the server drops the open request for the old one.

        With two requests for one inbox it would serve both, which exceeds the free slots. Messages already sent to the
        old inbox are received first and take their slots.
        """
        self._renew_requested = False
        await self._unsubscribe()
        self._requested = 0
        # Keep `_unanswered_since` if the request is sent again on this connection: `silence_s` grows over all renewals
        # until the server answers.
        if self._reconnected or not self._wanted():
            self._unanswered_since = None
        await self._subscribe()

    async def _unsubscribe(self) -> None:
        """Withdraw the open request: the server drops one whose inbox has no subscriber."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await unsubscribe(self._client, subscription)

    async def _top_up(self) -> None:
        """Request what is wanted and not yet requested; of few messages only if no other request is open."""
        wanted = self._wanted()
        self._max_wanted = max(self._max_wanted, wanted)
        missing = wanted - self._requested
        if missing <= 0 or not self._client.is_connected or time.monotonic() < self._paused_until:
            return
        if self._requested and missing * _TOP_UP_DIVISOR < self._max_wanted:
            return
        request = {
            "batch": missing,
            "expires": int(EXPIRES_S * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_S * _NANOSECONDS),
            "max_bytes": max(_MAX_BYTES, 2 * self._client.max_payload),
        }
        self._requested += missing
        self._requested_at = time.monotonic()
        self._unanswered_since = self._unanswered_since or self._requested_at
        await self._client.publish(self._subject, orjson.dumps(request), self._inbox)

    async def _wait(self) -> None:
        timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _renew_if_silent(self) -> None:
        last_answer_or_request = max(self._unanswered_since or 0.0, self._requested_at)
        if self._requested and time.monotonic() - last_answer_or_request > _MAX_SILENCE_S:
            self._renew_requested = True

    async def _on_message(self, message: Msg) -> None:
        status = _server_status(message)
        if status is None:
            self._refusals = 0
            if self._receive(message):
                self._requested = max(0, self._requested - 1)
        elif status != StatusCode.CONTROL_MESSAGE:  # which is a heartbeat
            self._request_ended(status, message.headers or {})
        self._unanswered_since = time.monotonic() if self._requested else None
        if self._wanted() > self._requested:
            self._wake.set()

    def _request_ended(self, status: str, headers: dict[str, str]) -> None:
        description = headers.get(Header.DESCRIPTION, "")
        # Number of the request's messages that do not come; if that is unknown, take all requests for ended.
        undelivered = headers.get(_PENDING, "")
        self._requested = max(0, self._requested - int(undelivered)) if _NUMBER.fullmatch(undelivered) else 0
        if status == StatusCode.SERVICE_UNAVAILABLE or "consumer deleted" in description.lower():
            self._gone_reason = description or "no responders"
        elif status not in _EXPECTED_STATUSES and description.lower() not in _COMPLETED:
            log.warning(
                "the server ended a pull request",
                extra={"action": "pull.ended", "status": status, "description": description},
            )
            self._pause()

    def _pause(self) -> None:
        """Wait before the next request: the server may refuse each at once, as for settings of the durable."""
        pause_s = min(_FIRST_PAUSE_S * 2**self._refusals, _MAX_PAUSE_S)
        self._refusals = min(self._refusals + 1, _MAX_REFUSALS)
        self._paused_until = time.monotonic() + pause_s
        asyncio.get_running_loop().call_later(pause_s, self._wake.set)


async def unsubscribe(client: BusClient, subscription: Subscription) -> None:
    """End a subscription; messages that the server has already sent are still received."""
    try:
        if client.is_connected:
            async with asyncio.timeout(_UNSUBSCRIBE_TIMEOUT_S):
                await subscription.drain()  # type: ignore[no-untyped-call]
    except (nats.errors.Error, OSError) as error:
        log.info(
            "cannot unsubscribe; messages in transit are redelivered after AckWait",
            extra={"action": "pull.broken_off", "error": f"{type(error).__name__}: {error}"},
        )
    finally:
        client.drop(subscription)


PAUSE_S = 0.05
"""Mean pause after a request that found fewer commands than it asked for."""

JITTER = 0.5, 1.5
"""Bounds of the random factor of PAUSE_S. With a fixed pause replicas would always ask in the same order, and the one
after the longest gap would get most of the new commands."""

_REPLY_TIMEOUT_S = 1.0  # then another request is sent
_MAX_RECEIVE_S = 0.01  # then other tasks run
_LOOK_AHEAD_MAX_BYTES = 8 * 2**20  # nats-py buffers the messages of a request


class LookAhead:
    """Fetches `batch()` commands at a time while that is positive."""

    def __init__(
        self,
        client: BusClient,
        durable: Durable,
        batch: Callable[[], int],
        receive: Callable[[Msg], None],
    ) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{durable.stream}.{durable.name}"
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
        """Fetch until cancelled; messages already sent are still received."""
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
            request = {"batch": batch, "no_wait": True, "max_bytes": _LOOK_AHEAD_MAX_BYTES}
            await self._client.publish(self._subject, orjson.dumps(request), inbox)
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPLY_TIMEOUT_S):
                    await self._batch_ended.wait()
        if self._outstanding:
            await asyncio.sleep(PAUSE_S * random.uniform(*JITTER))  # noqa: S311 - no secret depends on it

    async def _on_message(self, message: Msg) -> None:
        status = _server_status(message)
        if status is None:
            self._receive(message)
            self._outstanding = max(0, self._outstanding - 1)
        elif status == StatusCode.CONFLICT:
            self._outstanding = 0  # `max_bytes` is reached: more commands are pending, so fetch again without a pause
        if status is not None or not self._outstanding:
            self._batch_ended.set()
        if time.monotonic() - self._yielded_at > _MAX_RECEIVE_S:
            await asyncio.sleep(0)
            self._yielded_at = time.monotonic()
