"""Check connection and durable once a second, and restore the durable's settings."""

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
from openapi_tool.kernel.jetstream.streams import UNLIMITED, Durable, change_durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import DurableOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.health import CONSUMER, NATS, Health

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
_START_INTERVAL_S = 0.1  # until the durable is found or created

_FAILURES_BEFORE_RECONNECT = 3
"""Failed checks before a reconnect; the next ones follow after 2, 4, 8, … times as many."""

_MAX_SILENCE_S = 15.0  # after 12.5 s PullConsumer has sent another request
_MIN_ACK_WAIT_S = 1.0  # a shorter AckWait redelivers most commands while they run, and heartbeats use up the CPU
_MAX_ACK_WAIT_S = 60.0  # with a longer AckWait the commands of a replica that died wait for longer
_RESTORE_RETRY_S = 60.0  # until the next attempt to restore settings that are still wrong
_SAVE_FLOOR_INTERVAL_S = 10.0


class DurableMonitor:
    """Records in `health` whether commands can arrive, and restores the durable's settings."""

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
        self._replicas = replicas
        self._filters = (options.filter_subject,)
        self._consumer = consumer
        self._clock = clock
        self._health = health
        self._unanswered = 0
        self._had_problem = False
        self._leader = ""
        self._last_state: DurableState | None = None
        self._checked_settings_at = 0.0
        self._capacity = DurableCapacity(client, options.nats.max_ack_pending)
        self._saved_floor = 0
        self._saved_at = -math.inf
        self._valid_floor = 0  # ack floor when the filter was last right

    async def run(self) -> None:
        """Check until cancelled, more often until the durable is found or created."""
        while True:
            began = time.monotonic()
            await self.check()
            every_s = _START_INTERVAL_S if self._consumer.durable is None else CHECK_INTERVAL_S
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))

    async def check(self) -> None:
        """Check once."""
        if not self._client.is_connected:
            self._unanswered = 0
            why = ": ".join(filter(None, ("no connection", self._client.outage)))
            self._record(connection=why, consumer="no connection")
            return
        durable, reason = self._consumer.durable, self._consumer.durable_error
        if durable is None:
            if reason or self._last_state:
                self._record(connection="", consumer=reason or "the durable is not found or created yet")
            else:
                self._health.record(NATS, ok=True)  # still starting: a missing durable is no problem yet
            return
        try:
            state = await observe(self._client, durable, self._clock)
            _export(state)
            self._unanswered = 0
            self._record(connection="", consumer=self._problem(state))
            await self._follow_up(durable, state)
        except DurableMissing as error:
            self._saved_floor = 0  # a new durable has its own
            self._record(connection="", consumer=f"the durable {durable.name} is missing")
            self._consumer.ensure_durable_again(str(error))
        except (ErrorReply, nats.errors.NoRespondersError) as error:
            self._record(connection="", consumer=f"JetStream cannot answer: {error}")
        except (nats.errors.Error, OSError) as error:
            await self._no_answer(error)
        self._health.clock_offset_s = self._clock.local_offset_s
        metrics.CLOCK_OFFSET.set(self._clock.local_offset_s or 0.0)

    def _problem(self, state: DurableState) -> str:
        """Return why no command can arrive, empty if one can."""
        if state.paused_until:
            return f"the durable is paused until {state.paused_until}; `nats consumer resume` ends that"
        if not state.quorum:
            return "the durable has no quorum: most of its servers are unavailable"
        if wrong := self._wrong_settings(state):
            return wrong
        if self._consumer.silence_s > _MAX_SILENCE_S:
            return "the server does not answer the pull request"
        return ""

    def _wrong_settings(self, state: DurableState) -> str:
        if state.unusable:
            return (
                f"the durable was created with {', '.join(state.unusable)}, which cannot be changed: remove it with "
                f"`nats consumer rm STREAM {self._options.name}`; replicas create it again"
            )
        if state.filters != self._filters:
            return f"the durable has the wrong filter: {', '.join(state.filters)}"
        if hindrances := self._hindrances(state):
            return f"the durable has settings that stop, delay or repeat deliveries: {', '.join(hindrances)}"
        return ""

    def _hindrances(self, state: DurableState) -> tuple[str, ...]:
        own, found = self._options.nats.ack_wait_s, list(state.hindrances)
        is_usable = min(_MIN_ACK_WAIT_S, own) <= state.ack_wait_s <= max(_MAX_ACK_WAIT_S, own)
        if state.ack_wait_s and not is_usable:
            found.append("ack_wait")
        if 0 < state.replicas < self._replicas:  # the failure of one server would stop it
            found.append("num_replicas")
        return tuple(found)

    def _record(self, connection: str, consumer: str) -> None:
        """Record the problems of connection and consumer, empty if there is none."""
        self._health.record(NATS, ok=not connection, reason=connection)
        self._health.record(CONSUMER, ok=not consumer, reason=consumer)
        self._had_problem |= bool(consumer)

    async def _no_answer(self, error: Exception) -> None:
        """Reconnect after several checks: TCP detects a half-open connection only after minutes."""
        self._unanswered += 1
        reason = f"no answer to a request: {type(error).__name__}"
        self._record(connection=reason, consumer=reason)
        rounds, rest = divmod(self._unanswered, _FAILURES_BEFORE_RECONNECT)
        if rest == 0 and rounds.bit_count() == 1:  # a power of two
            log.warning(
                "NATS does not answer; reconnecting",
                extra={"action": "nats.silent", "unanswered": self._unanswered},
            )
            await self._client.start_over()

    async def _follow_up(self, durable: Durable, state: DurableState) -> None:
        if self._had_problem or state.leader != self._leader:  # a new leader does not know open requests
            self._consumer.renew_pull()
        self._had_problem, self._leader = False, state.leader
        await self._capacity.adapt(durable, state)
        await self._save_floor(durable, state)
        hindrances = self._hindrances(state)
        if state.ack_wait_s > 0 and "ack_wait" not in hindrances:
            self._consumer.use_ack_wait(state.ack_wait_s)
        previous, self._last_state = self._last_state, state
        changed = previous is None or _settings(previous) != _settings(state)
        if changed:
            self._log_differences(state)
        is_due = time.monotonic() - self._checked_settings_at >= _RESTORE_RETRY_S
        if changed or is_due or "headers_only" in hindrances:  # with which no command can be read
            self._checked_settings_at = time.monotonic()
            if state.max_deliver != UNLIMITED or state.filters != self._filters or hindrances:
                await self._restore(durable, state)

    async def _save_floor(self, durable: Durable, state: DurableState) -> None:
        if state.filters != self._filters:
            return  # with a wrong filter the floor may be past commands that were never delivered
        self._valid_floor = state.ack_floor
        now = time.monotonic()
        saved_lately = now - self._saved_at < _SAVE_FLOOR_INTERVAL_S
        if not durable.stream_created or state.ack_floor <= self._saved_floor or saved_lately:
            return
        self._saved_at = now
        floor = AckFloor(durable.stream, durable.stream_created, self._options.filter_subject, state.ack_floor)
        try:
            await save_ack_floor(self._client, durable.name, floor)
        except Unavailable as error:
            log.info("cannot store the durable's ack floor: %s", error, extra={"action": "ack_floor.not_stored"})
        else:
            self._saved_floor = state.ack_floor

    def _log_differences(self, state: DurableState) -> None:
        """Log other settings than ours; but replicas raise `max_ack_pending` during a backlog."""
        lower = state.max_ack_pending < self._options.nats.max_ack_pending
        if lower or state.ack_wait_s != self._options.nats.ack_wait_s:
            log.warning(
                "the durable's AckWait or max_ack_pending was changed; heartbeats adapt to it",
                extra={
                    "action": "durable.differs",
                    "ack_wait_s": state.ack_wait_s,
                    "max_ack_pending": state.max_ack_pending,
                },
            )
        if state.in_memory:
            log.warning(
                "the durable is stored in memory, which cannot be changed: a restart of its servers delivers commands "
                "again; remove it while nothing is unacknowledged, and replicas create it on disk",
                extra={"action": "durable.in_memory"},
            )

    async def _restore(self, durable: Durable, state: DurableState) -> None:
        """Restore the settings without which calls are lost: filter, unlimited deliveries, no HINDRANCES.

        A usable AckWait, `max_ack_pending` and a pause stay: another executor or an operator may have set them.
        """
        hindrances = self._hindrances(state)
        log.warning(
            "the durable was changed so that calls would be lost; restoring its settings",
            extra={
                "action": "durable.restored",
                "filters": state.filters,
                "max_deliver": state.max_deliver,
                "hindrances": hindrances,
            },
        )
        try:
            await change_durable(
                self._client,
                durable,
                max_deliver=UNLIMITED,
                filter_subject=self._options.filter_subject,
                filter_subjects=None,
                ack_wait=self._options.nats.ack_wait_s if {"ack_wait", "backoff"} & {*hindrances} else state.ack_wait_s,
                backoff=None,
                inactive_threshold=None,
                num_replicas=None if "num_replicas" in hindrances else state.replicas or None,
                headers_only=None,  # nats-py leaves out the other hindrances, which resets them
            )
            if state.filters != self._filters:
                await self._redeliver_skipped(durable)
        except (nats.errors.Error, OSError) as error:
            log.warning("cannot restore the durable's settings: %s", error, extra={"action": "durable.not_restored"})

    async def _redeliver_skipped(self, durable: Durable) -> None:
        """Redeliver everything since the filter was last right; commands that have a result are only acknowledged."""
        try:  # needs nats-server 2.14 (NATS ADR-60)
            await self._client.jetstream().reset_consumer(durable.stream, durable.name, seq=self._valid_floor + 1)
        except (nats.errors.Error, OSError) as error:
            log.warning(
                "cannot redeliver commands that arrived while the filter was wrong: %s; "
                "`openapi-tool deadletters list --abandoned` finds them",
                error,
                extra={"action": "durable.passed_over"},
            )


def _export(state: DurableState) -> None:
    metrics.PENDING.set(state.pending)
    metrics.UNACKNOWLEDGED.set(state.ack_pending)
    metrics.MAX_UNACKNOWLEDGED.set(state.max_ack_pending)


def _settings(state: DurableState) -> tuple[object, ...]:
    hindrances = state.hindrances, state.replicas, state.in_memory
    return state.filters, state.max_deliver, state.ack_wait_s, state.max_ack_pending, hindrances
