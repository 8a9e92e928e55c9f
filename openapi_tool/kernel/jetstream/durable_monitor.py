"""Check connection and durable once a second, and record in the health report whether commands can arrive.

The durable is the consumer that all executors share, JetStream's record of which commands are delivered and
acknowledged. Operators and executors of other versions may change it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

import nats.errors

from openapi_tool.kernel.jetstream.ack_floor import AckFloor, save_ack_floor
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.durable import DurableMissing, DurableState, ErrorReply, observe
from openapi_tool.kernel.jetstream.durable_capacity import DurableCapacity
from openapi_tool.kernel.jetstream.durable_settings import DurableSettings
from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import DurableOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.health import CONSUMER, NATS, Health

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
_START_INTERVAL_S = 0.1  # between checks until the durable is found or created

_CHECKS_BEFORE_RECONNECT = 3
"""Checks without an answer before a reconnect. Further ones follow after 6, 12, 24, … checks without an answer."""

_MAX_SILENCE_S = 15.0  # of the server at the pull request; after 12.5 s PullConsumer has sent another request
_SAVE_FLOOR_INTERVAL_S = 10.0


class DurableMonitor:
    """Records in `health` whether commands can arrive; has the durable's settings restored and its ack floor stored."""

    def __init__(
        self,
        client: BusClient,
        options: DurableOptions,
        consumer: CommandConsumer,
        clock: ServerClock,
        health: Health,
        replicas: int = 1,
    ) -> None:
        self._client = client
        self._options = options
        self._consumer = consumer
        self._clock = clock
        self._health = health
        self._capacity = DurableCapacity(client, options.nats.max_ack_pending)
        self._settings = DurableSettings(client, options, replicas)
        # What the checks so far have found.
        self._unanswered = 0  # checks in a row without an answer
        self._had_problem = False  # whether a check found a problem since the open pull request was last replaced
        self._was_found = False  # whether the durable was ever found
        self._leader = ""  # of the durable, at the last check with an answer
        # The ack floor that was stored last, and when, on the monotonic clock.
        self._saved_floor = 0
        self._saved_at = -math.inf

    async def run(self) -> None:
        """Check until cancelled, more often until the durable is found or created."""
        while True:
            began = time.monotonic()
            await self.check()
            every_s = _START_INTERVAL_S if self._consumer.durable is None else CHECK_INTERVAL_S
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))

    async def check(self) -> None:
        """Check once: the connection, whether the durable is found, then its state."""
        if not self._client.is_connected:
            self._unanswered = 0
            why = ": ".join(filter(None, ("no connection", self._client.outage)))
            self._record(connection=why, consumer="no connection")
            return
        durable = self._consumer.durable
        if durable is None:
            self._record_missing()
            return
        await self._check_durable(durable)
        self._health.clock_offset_s = self._clock.local_offset_s
        metrics.CLOCK_OFFSET.set(self._clock.local_offset_s or 0.0)

    def _record_missing(self) -> None:
        """Record that the durable is not found or created yet, which is no problem while the process starts."""
        reason = self._consumer.durable_error
        if reason or self._was_found:
            self._record(connection="", consumer=reason or "the durable is not found or created yet")
        else:
            self._health.record(NATS, ok=True)

    async def _check_durable(self, durable: Durable) -> None:
        """Ask the server for the state of the durable, and record what the answer, or its lack, shows."""
        try:
            state = await observe(self._client, durable, self._clock)
            _export(state)
            self._unanswered = 0
            self._record(connection="", consumer=self._problem(state))
            await self._follow_up(durable, state)
        except DurableMissing as error:
            self._saved_floor = 0  # a new durable has a floor of its own
            self._record(connection="", consumer=f"the durable {durable.name} is missing")
            self._consumer.ensure_durable_again(str(error))
        except (ErrorReply, nats.errors.NoRespondersError) as error:
            self._record(connection="", consumer=f"JetStream cannot answer: {error}")
        except (nats.errors.Error, OSError) as error:
            await self._no_answer(error)

    def _problem(self, state: DurableState) -> str:
        """Return why no command can arrive, empty if one can."""
        if state.paused_until:
            return f"the durable is paused until {state.paused_until}; `nats consumer resume` ends that"
        if not state.quorum:
            return "the durable has no quorum: most of its servers are unavailable"
        if wrong := self._settings.problem(state):
            return wrong
        if self._consumer.silence_s > _MAX_SILENCE_S:
            return "the server does not answer the pull request"
        return ""

    def _record(self, connection: str, consumer: str) -> None:
        """Record the problems of connection and consumer, empty if there is none."""
        self._health.record(NATS, ok=not connection, reason=connection)
        self._health.record(CONSUMER, ok=not consumer, reason=consumer)
        self._had_problem |= bool(consumer)

    async def _no_answer(self, error: Exception) -> None:
        """Reconnect after several checks without an answer: TCP detects a half-open connection only after minutes."""
        self._unanswered += 1
        reason = f"no answer to a request: {type(error).__name__}"
        self._record(connection=reason, consumer=reason)
        multiple, remainder = divmod(self._unanswered, _CHECKS_BEFORE_RECONNECT)
        is_power_of_two = multiple.bit_count() == 1
        if remainder == 0 and is_power_of_two:
            log.warning(
                "NATS does not answer; reconnecting",
                extra={"action": "nats.silent", "unanswered": self._unanswered},
            )
            await self._client.start_over()

    async def _follow_up(self, durable: Durable, state: DurableState) -> None:
        """Do what the state of the durable asks for, after a check that the server answered."""
        has_new_leader = state.leader != self._leader  # which does not know the open pull requests
        if self._had_problem or has_new_leader:
            self._consumer.renew_pull()
        self._had_problem = False
        self._was_found = True
        self._leader = state.leader
        await self._capacity.adapt(durable, state)
        await self._save_floor(durable, state)
        if self._settings.is_ack_wait_usable(state):
            self._consumer.use_ack_wait(state.ack_wait_s)
        await self._settings.restore_if_wrong(durable, state)

    async def _save_floor(self, durable: Durable, state: DurableState) -> None:
        """Store the ack floor now and then, so that a durable which is created again resumes there."""
        if not self._settings.is_filter_right(state):
            return  # with a wrong filter the floor may be past commands that were never delivered
        now = time.monotonic()
        is_known_stream = bool(durable.stream_created)  # else the floor could be taken for one of another stream
        has_advanced = state.ack_floor > self._saved_floor
        was_saved_lately = now - self._saved_at < _SAVE_FLOOR_INTERVAL_S
        if not is_known_stream or not has_advanced or was_saved_lately:
            return
        self._saved_at = now
        floor = AckFloor(durable.stream, durable.stream_created, self._options.filter_subject, state.ack_floor)
        try:
            await save_ack_floor(self._client, durable.name, floor)
        except Unavailable as error:
            log.info("cannot store the durable's ack floor: %s", error, extra={"action": "ack_floor.not_stored"})
        else:
            self._saved_floor = state.ack_floor


def _export(state: DurableState) -> None:
    metrics.PENDING.set(state.pending)
    metrics.UNACKNOWLEDGED.set(state.ack_pending)
    metrics.MAX_UNACKNOWLEDGED.set(state.max_ack_pending)
