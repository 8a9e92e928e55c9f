"""Heartbeats of held commands: received, and not yet settled.

Without heartbeats the server would redeliver a command after AckWait, a setting of the durable (`nats.ack_wait_s`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import nats.errors

from openapi_tool.kernel.jetstream.claimed_ids import ids_of
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.leases import Leases
from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)

# Fractions of AckWait. A heartbeat is due 0.45 of it after the last one, and a failed one is retried at the next check.
# So even if the first attempt fails as late as possible, the second one is in time: 0.45 + 2 * (1/12 until a check +
# 1/10 until the timeout) = 0.82 < 1.
_DUE_SHARE = 0.45  # from the last heartbeat until the next one is due
_CHECK_SHARE = 1 / 12  # between two checks which heartbeats are due
_TIMEOUT_SHARE = 1 / 10  # timeout of one heartbeat

_MAX_CONCURRENT = 64
"""Heartbeats that are sent at once. After a stall hundreds are due together; sent one by one, the last would be too
late.
"""


class Heartbeats:
    """Sends heartbeats: tells the server that a command is in progress, and renews its lease if it has one."""

    def __init__(self, leases: Leases, ack_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ack_wait_s = ack_wait_s
        self._leases = leases
        self._clock = clock

    @property
    def check_every_s(self) -> float:
        """Seconds between two calls of `send`."""
        return self.ack_wait_s * _CHECK_SHARE

    async def send(self, commands: Iterable[HeldCommand]) -> None:
        """Send the heartbeats that are due, longest overdue first."""
        due_if_before = self._clock() - self.ack_wait_s * _DUE_SHARE
        due = [held for held in commands if held.heartbeat_at <= due_if_before and not held.message.is_acked]
        due.sort(key=lambda held: held.heartbeat_at)
        permits = asyncio.Semaphore(_MAX_CONCURRENT)
        await asyncio.gather(*(self._beat(held, permits) for held in due))

    async def _beat(self, held: HeldCommand, permits: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self.ack_wait_s * _TIMEOUT_SHARE), permits:
                sent_at = self._clock()
                await held.message.in_progress()
                if held.lease is not None:
                    await self._leases.renew(held.lease)
                held.heartbeat_at = sent_at  # only on success: a failed heartbeat must stay due
        except (nats.errors.Error, OSError, Unavailable) as error:
            log.warning(
                "cannot send a heartbeat; retrying",
                extra={"action": "heartbeat.failed", "error": f"{type(error).__name__}: {error}"}
                | ids_of(held.delivery),
            )
