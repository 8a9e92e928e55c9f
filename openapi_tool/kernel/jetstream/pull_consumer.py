"""Pull consumer with an open request for as many messages as there are free slots (places for running calls).

A pull request asks the server for a number of messages. It stays open until that many have come, it expires, or it is
withdrawn. One request covers all free slots, a further one those that become free. So a single message is delivered at
once, a burst in one batch, and no message is fetched without a free slot (NATS ADR-13, pull consumers; our ADR 2).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header, StatusCode

from openapi_tool.kernel.jetstream.pull_requests import next_subject, server_status, unsubscribe
from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.nats_client.client import BusClient

log = logging.getLogger(__name__)

EXPIRES_S = 30.0  # of a request; the server then ends it, and another one is sent
HEARTBEAT_S = 5.0  # between two heartbeats with which the server shows that a request is still open
_MAX_SILENCE_S = 2.5 * HEARTBEAT_S
"""Silence after which the server has probably lost the open request."""

_MAX_BYTES = 4 * 2**20
"""Byte limit of one request, which the server then ends with 409. A larger burst would delay acknowledgements of our
publications on the same connection: 64 large commands by 0.2 s."""

_COMPLETED = ("batch completed", "message size exceeds maxbytes")
"""Descriptions, in lower case, of status 409 with which the server ends a request as expected."""

_EXPECTED_STATUSES = (StatusCode.REQUEST_TIMEOUT, StatusCode.NO_MESSAGES)  # other expected ends of a request
_NANOSECONDS = 1_000_000_000  # in a second
_UNDELIVERED = "Nats-Pending-Messages"  # header with the number of messages of the ended request that do not come
_NUMBER = re.compile(r"[0-9]{1,18}")  # value of that header, such as `12`
_FIRST_PAUSE_S = 0.05  # after a request that the server ended unexpectedly; each further one doubles it
_MAX_PAUSE_S = 2.0
_MAX_REFUSALS = 10  # unexpected ends that are counted; by then the pause has reached its maximum
_TOP_UP_DIVISOR = 4
"""A further request is sent only if it is for at least a quarter of the most messages wanted so far. For example, if 64
slots were free once, the next request waits until 16 are free: fewer, larger requests."""


class ConsumerGone(Exception):
    """The durable does not exist."""


class PullConsumer:
    """Keeps requests open for as many messages as `wanted` returns, and passes each message to `receive`.

    `receive` returns False for a message that JetStream did not send; it does not count as requested.
    """

    def __init__(
        self,
        client: BusClient,
        durable: Durable,
        wanted: Callable[[], int],
        receive: Callable[[Msg], bool],
    ) -> None:
        self._client = client
        self._subject = next_subject(durable)
        self._wanted = wanted
        self._receive = receive
        # The subscription on which messages arrive, and the number of reconnects when it was made.
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._reconnects = 0
        self._requested = 0  # messages of open requests that have not arrived
        self._max_wanted = 1  # most messages wanted at a time so far
        self._requested_at = time.monotonic()  # when the latest request was sent
        # Since when the server owes an answer to the open requests: since its last answer, or if there was none, since
        # the first of these requests. None without an open request.
        self._unanswered_since: float | None = None
        # What the next round of `run` does.
        self._wake = asyncio.Event()
        self._renew_requested = False
        self._gone_reason: str | None = None  # set once the durable is gone
        self._refusals = 0  # requests that the server ended unexpectedly, one after the other
        self._paused_until = 0.0  # no request is sent before this moment

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
        """Return whether the open requests must be withdrawn.

        They may be lost, or be for more messages than are wanted: a request cannot be reduced.
        """
        return self._renew_requested or self._reconnected or self._requested > self._wanted()

    @property
    def _reconnected(self) -> bool:
        """The client has reconnected since the subscription, so the server has dropped the requests."""
        return self._reconnects != self._client.stats["reconnects"]

    async def _subscribe(self) -> None:
        self._reconnects = self._client.stats["reconnects"]
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)

    async def _resubscribe(self) -> None:
        """Subscribe to a new inbox, so that the server drops the open requests for the old one.

        If a new request were sent for the same inbox, the server would serve old and new ones, which exceeds the free
        slots. Messages already sent to the old inbox are received first and take their slots.
        """
        self._renew_requested = False
        await self._unsubscribe()
        self._requested = 0
        # If requests were open on this connection and are sent again now, the server still owes an answer: the time
        # stays, so that `silence_s` grows over all renewals until the server answers.
        if self._reconnected or not self._wanted():
            self._unanswered_since = None
        await self._subscribe()

    async def _unsubscribe(self) -> None:
        """Withdraw the open request: the server drops one whose inbox has no subscriber."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await unsubscribe(self._client, subscription)

    async def _top_up(self) -> None:
        """Request what is wanted and not yet requested. Few messages are requested only if no request is open."""
        wanted = self._wanted()
        self._max_wanted = max(self._max_wanted, wanted)
        missing = wanted - self._requested
        may_send = self._client.is_connected and time.monotonic() >= self._paused_until
        if missing <= 0 or not may_send:
            return
        is_large_enough = missing * _TOP_UP_DIVISOR >= self._max_wanted
        if self._requested and not is_large_enough:
            return
        request = {
            "batch": missing,
            "expires": int(EXPIRES_S * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_S * _NANOSECONDS),
            "max_bytes": max(_MAX_BYTES, 2 * self._client.max_payload),  # at least so large that any message fits
        }
        self._requested += missing
        self._requested_at = time.monotonic()
        self._unanswered_since = self._unanswered_since or self._requested_at
        await self._client.publish(self._subject, orjson.dumps(request), self._inbox)

    async def _wait(self) -> None:
        """Wait until woken, at most for HEARTBEAT_S."""
        timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _renew_if_silent(self) -> None:
        """Have the requests sent again if the server, which sends heartbeats, has been silent for too long."""
        last_answer_or_request = max(self._unanswered_since or 0.0, self._requested_at)
        if self._requested and time.monotonic() - last_answer_or_request > _MAX_SILENCE_S:
            self._renew_requested = True

    async def _on_message(self, message: Msg) -> None:
        status = server_status(message)
        if status is None:  # a command
            self._refusals = 0
            if self._receive(message):
                self._requested = max(0, self._requested - 1)
        elif status != StatusCode.CONTROL_MESSAGE:  # a control message is a heartbeat
            self._request_ended(status, message.headers or {})
        self._unanswered_since = time.monotonic() if self._requested else None
        if self._wanted() > self._requested:
            self._wake.set()

    def _request_ended(self, status: str, headers: dict[str, str]) -> None:
        """Handle the end of one request; its status and headers say why, and how many messages do not come."""
        description = headers.get(Header.DESCRIPTION, "")
        undelivered = headers.get(_UNDELIVERED, "")
        if _NUMBER.fullmatch(undelivered):
            self._requested = max(0, self._requested - int(undelivered))
        else:  # unknown: take all requests for ended
            self._requested = 0
        is_gone = status == StatusCode.SERVICE_UNAVAILABLE or "consumer deleted" in description.lower()
        is_expected = status in _EXPECTED_STATUSES or description.lower() in _COMPLETED
        if is_gone:
            self._gone_reason = description or "no responders"
        elif not is_expected:
            log.warning(
                "the server ended a pull request",
                extra={"action": "pull.ended", "status": status, "description": description},
            )
            self._pause()

    def _pause(self) -> None:
        """Let the next request wait: the server may end each at once, for example because of the durable's settings."""
        pause_s = min(_FIRST_PAUSE_S * 2**self._refusals, _MAX_PAUSE_S)
        self._refusals = min(self._refusals + 1, _MAX_REFUSALS)
        self._paused_until = time.monotonic() + pause_s
        asyncio.get_running_loop().call_later(pause_s, self._wake.set)
