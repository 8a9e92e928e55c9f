"""The settings of the durable: which are wrong, which hinder deliveries, and how they are restored.

All replicas share one durable with executors of other versions and with operators, who may have changed it.
"""

from __future__ import annotations

import logging
import math
import time

import nats.errors

from openapi_tool.kernel.jetstream.durable import DurableState
from openapi_tool.kernel.jetstream.streams import UNLIMITED, Durable, change_durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import DurableOptions

log = logging.getLogger(__name__)

_MIN_ACK_WAIT_S = 1.0  # a shorter AckWait redelivers most commands while they run, and heartbeats use up the CPU
_MAX_ACK_WAIT_S = 60.0  # with a longer AckWait the commands of a replica that died wait for longer
_RESTORE_RETRY_S = 60.0  # until the next attempt to restore settings that are still wrong


class DurableSettings:
    """Compares the settings of the durable with ours, and restores those without which calls are lost.

    The durable must have at least `replicas` replicas.
    """

    def __init__(self, client: BusClient, options: DurableOptions, replicas: int) -> None:
        self._client = client
        self._options = options
        self._replicas = replicas
        self._filters = (options.filter_subject,)
        self._last_state: DurableState | None = None
        self._restored_at = -math.inf  # when wrong settings were last looked for, on the monotonic clock
        self._valid_floor = 0  # ack floor (sequence up to which all is acknowledged) when the filter was last right

    def problem(self, state: DurableState) -> str:
        """Return which wrong settings stop, delay or repeat deliveries; empty without one."""
        if state.unusable:
            return (
                f"the durable was created with {', '.join(state.unusable)}, which cannot be changed: remove it with "
                f"`nats consumer rm STREAM {self._options.name}`; replicas create it again"
            )
        if not self.is_filter_right(state):
            return f"the durable has the wrong filter: {', '.join(state.filters)}"
        if hindrances := self._hindrances(state):
            return f"the durable has settings that stop, delay or repeat deliveries: {', '.join(hindrances)}"
        return ""

    def is_filter_right(self, state: DurableState) -> bool:
        """Return whether the durable gets our commands, and no others."""
        return state.filters == self._filters

    def is_ack_wait_usable(self, state: DurableState) -> bool:
        """Return whether heartbeats can adapt to the durable's AckWait; the configured one is always usable."""
        configured_s = self._options.nats.ack_wait_s
        shortest_s, longest_s = min(_MIN_ACK_WAIT_S, configured_s), max(_MAX_ACK_WAIT_S, configured_s)
        return shortest_s <= state.ack_wait_s <= longest_s

    def _hindrances(self, state: DurableState) -> tuple[str, ...]:
        """Return the names of settings that stop, delay or repeat deliveries."""
        found = list(state.hindrances)
        if state.ack_wait_s and not self.is_ack_wait_usable(state):
            found.append("ack_wait")
        if 0 < state.replicas < self._replicas:  # the failure of one server would stop the durable
            found.append("num_replicas")
        return tuple(found)

    async def restore_if_wrong(self, durable: Durable, state: DurableState) -> None:
        """Restore wrong settings, and log others that differ from ours; to be called after each look at the durable.

        If the settings are still wrong afterwards, the next attempt follows after _RESTORE_RETRY_S: another program may
        set them again and again.
        """
        is_filter_right = self.is_filter_right(state)
        if is_filter_right:
            self._valid_floor = state.ack_floor
        hindrances = self._hindrances(state)
        changed = self._last_state is None or _watched_settings(self._last_state) != _watched_settings(state)
        self._last_state = state
        if changed:
            self._log_differences(state)
        is_due = time.monotonic() - self._restored_at >= _RESTORE_RETRY_S
        is_urgent = "headers_only" in hindrances  # no command can be read
        if not (changed or is_due or is_urgent):
            return
        self._restored_at = time.monotonic()
        if state.max_deliver != UNLIMITED or not is_filter_right or hindrances:
            await self._restore(durable, state, hindrances)

    def _log_differences(self, state: DurableState) -> None:
        """Log settings that differ from ours and that we leave as they are."""
        # A higher limit is no difference: replicas raise it during a backlog.
        is_limit_lower = state.max_ack_pending < self._options.nats.max_ack_pending
        if is_limit_lower or state.ack_wait_s != self._options.nats.ack_wait_s:
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

    async def _restore(self, durable: Durable, state: DurableState, hindrances: tuple[str, ...]) -> None:
        """Restore the settings without which calls are lost: filter, unlimited deliveries, no hindrances.

        A usable AckWait, `max_ack_pending` and a pause stay: another executor or an operator may have set them.
        """
        must_reset_ack_wait = "ack_wait" in hindrances or "backoff" in hindrances
        replicas: int | None = state.replicas
        if "num_replicas" in hindrances or state.replicas == 0:
            replicas = None  # as many as the stream has
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
                ack_wait=self._options.nats.ack_wait_s if must_reset_ack_wait else state.ack_wait_s,
                backoff=None,
                inactive_threshold=None,
                num_replicas=replicas,
                headers_only=None,  # nats-py leaves out the other hindrances, which resets them
            )
            if not self.is_filter_right(state):
                await self._redeliver_skipped(durable)
        except (nats.errors.Error, OSError) as error:
            log.warning("cannot restore the durable's settings: %s", error, extra={"action": "durable.not_restored"})

    async def _redeliver_skipped(self, durable: Durable) -> None:
        """Have all commands redelivered that arrived since the filter was last right.

        Of these, commands that have a result are only acknowledged.
        """
        try:  # needs nats-server 2.14 (NATS ADR-60)
            await self._client.jetstream().reset_consumer(durable.stream, durable.name, seq=self._valid_floor + 1)
        except (nats.errors.Error, OSError) as error:
            log.warning(
                "cannot redeliver commands that arrived while the filter was wrong: %s; "
                "`openapi-tool deadletters list --abandoned` finds them",
                error,
                extra={"action": "durable.passed_over"},
            )


def _watched_settings(state: DurableState) -> tuple[object, ...]:
    """Return the settings of which a change is noticed, for a comparison."""
    return (
        state.filters,
        state.max_deliver,
        state.ack_wait_s,
        state.max_ack_pending,
        state.hindrances,
        state.replicas,
        state.in_memory,
    )
