"""Adapt the durable's `max_ack_pending` to a backlog of commands.

This setting of JetStream limits how many commands may be delivered and not yet acknowledged, over all executors.
"""

from __future__ import annotations

import logging
import math
import time

import nats.errors

from openapi_tool.kernel.jetstream.durable import DurableState
from openapi_tool.kernel.jetstream.streams import Durable, change_durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import MAX_ACK_PENDING

log = logging.getLogger(__name__)

_WARN_FULL_EVERY_S = 60.0


class DurableCapacity:
    """Adapts the durable's `max_ack_pending` to the backlog: at least `minimum`, at most MAX_ACK_PENDING.

    At the limit the server delivers no further command. Commands that were handed back with a delay count, too. So with
    a fixed limit the backlog of one project would block the commands of all others behind it (ADR 6).
    """

    def __init__(self, client: BusClient, minimum: int) -> None:
        self._client = client
        self._minimum = minimum
        self._warned_at = -math.inf

    async def adapt(self, durable: Durable, state: DurableState) -> None:
        """Raise a limit that is reached to twice the backlog; lower it to `minimum` once that is enough again."""
        backlog = state.ack_pending + state.pending
        is_reached = 0 < state.max_ack_pending <= state.ack_pending
        if is_reached and state.pending > 0:
            raised = min(2 * backlog, MAX_ACK_PENDING)
            can_raise = raised > state.max_ack_pending
            if not can_raise or not await self._change(durable, state, raised):
                self._warn(state)
        elif state.max_ack_pending > self._minimum >= 2 * backlog:
            await self._change(durable, state, self._minimum)

    async def _change(self, durable: Durable, state: DurableState, limit: int) -> bool:
        try:
            await change_durable(self._client, durable, max_ack_pending=limit)
        except (nats.errors.Error, OSError) as error:
            log.warning(
                "cannot change the durable's max_ack_pending: %s", error, extra={"action": "durable.capacity_refused"}
            )
            return False
        log.info(
            "changed the durable's max_ack_pending to fit the backlog",
            extra={
                "action": "durable.capacity",
                "before": state.max_ack_pending,
                "max_ack_pending": limit,
                "pending": state.pending,
                "unacknowledged": state.ack_pending,
            },
        )
        return True

    def _warn(self, state: DurableState) -> None:
        """Log once a minute that the limit is reached: nothing else would show that delivery has stopped."""
        if time.monotonic() - self._warned_at < _WARN_FULL_EVERY_S:
            return
        self._warned_at = time.monotonic()
        log.warning(
            "the durable has %s unacknowledged commands, its max_ack_pending, which cannot be raised: no further "
            "command is delivered, of any project",
            state.ack_pending,
            extra={"action": "durable.full", "pending": state.pending, "max_ack_pending": state.max_ack_pending},
        )
