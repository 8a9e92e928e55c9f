"""Intake: holds received commands from delivery to settlement, and hands back those that did not run.

To hand a command back is to tell JetStream that it was not run, so that it is delivered again, to any replica.

More commands are fetched than can be held, so that the backlog of one project does not block the projects behind it in
the stream. Of the commands that then wait for a slot, the scheduler *evicts* the surplus: commands of the project whose
commands take the most memory for its weight. These are handed back with a delay. Without the delay, a whole backlog
would be received again and again, which would cost more CPU than its calls. The other replicas are told which commands
were handed back unrun, since these need no lease when they are redelivered (ADR 6).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from nats.aio.msg import Msg

from openapi_tool.kernel.jetstream.claimed_ids import ids_of, project_of
from openapi_tool.kernel.jetstream.deliveries import delivery_of, metadata_of
from openapi_tool.kernel.jetstream.hand_back import HandBackQueue, Publish
from openapi_tool.kernel.jetstream.hand_back_delays import HandBackDelays
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.scheduler import FairScheduler
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.protocol.command import Delivery
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 16 * 2**20  # memory of all waiting commands together
MIN_LOOK_AHEAD = 512
"""Commands to fetch at a time even if no more can wait, to find those of other projects behind a backlog."""

_LOG_EVERY_S = 60.0  # least time between two log lines about a full intake


class Intake:
    """Holds commands, in `commands` by stream sequence; `scheduler` orders those that wait for a slot.

    `publish` sends hand-backs, and notices of them to the other replicas.
    """

    def __init__(self, options: ExecutorOptions, scheduler: FairScheduler, publish: Publish) -> None:
        self._options = options
        self._scheduler = scheduler
        self.commands: dict[int, HeldCommand] = {}
        self.hand_backs = HandBackQueue(publish, self.release)
        self._delays = HandBackDelays(options.concurrency)
        self._logged_at = -math.inf  # when a full intake was logged last, on the monotonic clock

    @property
    def waiting(self) -> int:
        """Number of waiting commands."""
        return len(self._scheduler)

    @property
    def look_ahead(self) -> int:
        """Number of commands to fetch at a time while all slots are busy."""
        return max(self._options.max_held - self.waiting, MIN_LOOK_AHEAD)

    @property
    def full(self) -> bool:
        """No further command can wait."""
        return self.waiting >= self._options.max_held or self._scheduler.memory_bytes >= _MAX_WAITING_BYTES

    def oldest_s(self, now: float) -> float:
        """Return the age in seconds of the oldest held command, 0 without one; `now` is the server's time."""
        if not self.commands:
            return 0.0
        oldest = min(held.delivery.published_at for held in self.commands.values())
        return max(0.0, now - oldest.timestamp())

    def hand_back_surplus(self, message: Msg) -> bool:
        """Hand back a message that the scheduler would evict at once; return False if it may be held.

        There may be tens of thousands of such messages, so bodies are not read. Raises ForeignMessage.
        """
        project = project_of(message.subject)
        if not self.full or not self._scheduler.would_evict(project):
            return False
        if metadata_of(message).sequence.stream in self.commands:  # a redelivery, which `take` ignores
            return False
        self._hand_back_delayed(message, project, held=None)
        return True

    def take(self, message: Msg, *, stale: bool) -> HeldCommand | None:
        """Hold the command of a message; return None if it is already held. Raises ForeignMessage."""
        delivery = delivery_of(message)
        sequence = delivery.stream_sequence
        if sequence in self.commands:
            log.info(
                "received a redelivery of a command that is held here; ignored",
                extra={"action": "call.overlapping"} | ids_of(delivery),
            )
            return None
        if delivery.number > 1 and self.hand_backs.take_never_run(message.metadata):
            _log_unrun_redelivery(delivery)
            # All earlier deliveries were handed back unrun. So no run can be lost, and this one is like the first.
            delivery = replace(delivery, number=1)
        now = time.monotonic()
        held = HeldCommand(message, delivery, started_at=now, heartbeat_at=now, stale=stale)
        self.commands[sequence] = held
        return held

    def enqueue(self, held: HeldCommand) -> None:
        """Let a command wait for a slot. If the queue was full, evict one and hand it back."""
        was_full = self.full
        self._scheduler.offer(held)
        if was_full:
            surplus = self._scheduler.evict()  # perhaps the command itself
            self._hand_back_delayed(surplus.message, surplus.claimed_agent.project, surplus)

    def next(self, may_begin: Callable[[str], bool]) -> HeldCommand | None:
        """Return the waiting command that runs next, None without one.

        `may_begin` tells whether a project may begin a call.
        """
        return self._scheduler.next(may_begin)

    def finished(self, held: HeldCommand, duration_s: float, requests: int) -> None:
        """Release a command that has run, and charge its project with its upstream `requests`."""
        project = held.claimed_agent.project
        self.release(held)
        self._delays.finished(project, duration_s)
        self._scheduler.finished(held, requests)

    def release(self, held: HeldCommand) -> None:
        """Stop holding a command."""
        self.commands.pop(held.delivery.stream_sequence, None)

    def mark_stale(self) -> None:
        """Mark held commands as stale, that is, possibly redelivered elsewhere: waiting ones then need a lease."""
        for held in self.commands.values():
            held.stale = True

    def hand_back_waiting(self) -> None:
        """Hand back all waiting commands for immediate redelivery."""
        for held in self._scheduler.withdraw():
            self.hand_back(held)

    def hand_back(self, held: HeldCommand) -> None:
        """Hand back a command unrun, for immediate redelivery."""
        self.hand_backs.add(held.message, held)

    def _hand_back_delayed(self, message: Msg, project: str, held: HeldCommand | None) -> None:
        """Hand back a surplus command with a delay, so that it returns when a slot should be free for it.

        `held` is None if the command was never held (`hand_back_surplus`).
        """
        metrics.EVICTED.inc()
        if time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning(
                "more commands wait than executor.max_held allows; the largest project's are handed back with a delay",
                extra={"action": "intake.full", "project_id": project},
            )
        delay_s = self._delays.next(project, self._scheduler.ahead_of(project))
        self.hand_backs.add(message, held, delay_s)


def _log_unrun_redelivery(delivery: Delivery) -> None:
    if log.isEnabledFor(logging.DEBUG):  # else the ids would be read for nothing
        log.debug(
            "command redelivered that was handed back here",
            extra={"action": "call.redelivered", "attempt": delivery.number} | ids_of(delivery),
        )
