"""Consume commands from the kernel's stream: pull, hold, run, send heartbeats, drain.

A command is one tool call, and runs in a *slot*, one of a fixed number of places for running calls. The pull consumer
fetches commands for free slots; while all slots are busy, the look-ahead fetches some more. `Intake` holds them until a
slot is free, `RunningCalls` runs them. All executors (*replicas*) share one *durable*, JetStream's record of which
commands are delivered and settled.

A command is *held* from its delivery until it is *settled*: acknowledged, handed back to the server for another
delivery, or kept as a dead letter. Meanwhile heartbeats tell the server not to deliver it again. It is *stale* if its
heartbeats did not reach the server in time, so that the server may have redelivered it to another replica. A stale
command needs a lease before it runs (`leases.py`). To *drain* is to stop without losing a command.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import nats.errors
from nats.aio.msg import Msg

from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.kernel.jetstream.command_runner import CommandRunner, Handler
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.deliveries import ForeignMessage
from openapi_tool.kernel.jetstream.durable import observe
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.jetstream.heartbeats import Heartbeats
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.intake import Intake
from openapi_tool.kernel.jetstream.leases import Leases
from openapi_tool.kernel.jetstream.look_ahead import LookAhead
from openapi_tool.kernel.jetstream.pull_consumer import ConsumerGone, PullConsumer
from openapi_tool.kernel.jetstream.running_calls import RunningCalls
from openapi_tool.kernel.jetstream.scheduler import FairScheduler
from openapi_tool.kernel.jetstream.slots import Slots
from openapi_tool.kernel.jetstream.streams import Durable, ensure_durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import ConsumerOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # between attempts to look up or create the durable
_STALL_SHARE = 1 / 3  # of AckWait: a longer stall of the event loop makes held commands stale
_AFTER_STALL_S = 1.0  # a message that is received within this time after a stall may have been sent during the stall
_HAND_BACK_TIMEOUT_S = 5.0  # for hand-backs on shutdown; what is left then is redelivered after AckWait


class BackgroundTaskEnded(Exception):
    """The task that pulls or sends heartbeats ended, which is a defect; the process must end, too."""


class CommandConsumer:
    """Fetches commands, holds them until a slot is free, and sends heartbeats until they are settled.

    - `handle`: the pipeline, which runs the call of a command, and returns how the command is to be settled.
    - `fetch_mode`: returns how many commands may be fetched. If the database fails, that is none, or one as a probe
      (a test whether it works again).
    - `clock`: is set to the server's time here, which leases use.
    """

    def __init__(
        self,
        client: BusClient,
        options: ConsumerOptions,
        dead_letters: DeadLetters,
        handle: Handler,
        fetch_mode: Callable[[], FetchMode] = lambda: FetchMode.UNLIMITED,
        clock: ServerClock | None = None,
        slots: Slots | None = None,
    ) -> None:
        clock = clock or ServerClock()
        slots = slots or Slots(options.executor.concurrency)
        slots.wake = self.wake  # called when a slot becomes free although its call has not ended
        ack_wait_s = options.durable.nats.ack_wait_s
        self._client = client
        self._options = options
        self._dead_letters = dead_letters
        self._fetch_mode = fetch_mode
        self._clock = clock
        self._slots = slots
        # A command is held by the intake, and runs by the command runner, under a lease if it may have run elsewhere.
        self.leases = Leases(client, ack_wait_s, options.replicas, clock.time)
        self._intake = Intake(options.executor, FairScheduler(options.fairness.weights), client.publish)
        self._command_runner = CommandRunner(self.leases, dead_letters, handle, options.executor)
        self._running = RunningCalls(self._command_runner.run, slots, options.executor.concurrency, self._ended)
        self._heartbeats = Heartbeats(self.leases, ack_wait_s)
        self._stale_until = 0.0  # monotonic: a message that is received before this moment is held as stale
        # From where commands are fetched; None until the durable is found or created.
        self.durable: Durable | None = None
        self._pull: PullConsumer | None = None
        self._look_ahead: LookAhead | None = None
        self.durable_error = ""  # why the last attempt to find or create the durable, or to pull from it, failed
        self._background_tasks: list[asyncio.Task[None]] = []  # those that `start` creates
        self._draining = False

    @property
    def running(self) -> int:
        """Number of running calls."""
        return len(self._running)

    def sequences(self) -> dict[str, list[int]]:
        """Return the stream sequences of the commands that run here (`running`), and of those that wait (`waiting`)."""
        running = self._running.sequences
        waiting = [sequence for sequence in self._intake.commands if sequence not in running]
        return {"running": sorted(running), "waiting": waiting}

    @property
    def silence_s(self) -> float:
        """Seconds since the server last answered the open pull request, infinite before the first one."""
        return self._pull.silence_s if self._pull is not None else math.inf

    def stalled(self, seconds: float) -> None:
        """Handle a stall of the event loop, in which no heartbeats were sent: held commands may be stale."""
        if seconds > self._heartbeats.ack_wait_s * _STALL_SHARE:
            self._stale_until = time.monotonic() + _AFTER_STALL_S
            self._intake.mark_stale()

    def start(self) -> None:
        """Start consuming in the background; retry after connection losses and while the durable is missing."""
        intake = self._intake
        metrics.SLOTS.set_function(lambda: self._options.executor.concurrency)
        metrics.RUNNING.set_function(lambda: self.running)
        metrics.HELD.set_function(lambda: len(intake.commands))
        metrics.WAITING.set_function(lambda: intake.waiting)
        metrics.OLDEST_HELD.set_function(lambda: intake.oldest_s(self._clock.time()))
        self._background_tasks = [
            asyncio.create_task(self._keep_pulling(), name="pull"),
            asyncio.create_task(self._intake.hand_backs.run(), name="hand-backs"),
            asyncio.create_task(self._send_heartbeats(), name="heartbeat"),
        ]

    async def wait_for_failure(self) -> None:
        """Wait until a background task ends, which none should. Raises BackgroundTaskEnded with the cause."""
        await asyncio.wait(self._background_tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._background_tasks:
            if task.done():
                _raise_ended(task)

    async def stop(self, grace_s: float, hand_back_s: float = _HAND_BACK_TIMEOUT_S) -> None:
        """Drain: stop fetching, hand back waiting commands, let calls finish, hand back the others.

        1. At once: commands that wait for a slot, and calls that have sent no request because the rate limit made them
           wait.
        2. After `grace_s` seconds: calls that have not finished; they are cancelled, which hands their commands back.
        3. `hand_back_s` seconds later: what is not handed back by then is redelivered after AckWait.

        If the heartbeat task fails, the server would redeliver running calls. Then the grace period ends early, and
        BackgroundTaskEnded is raised at the end.
        """
        pulling, handing_back, heartbeat = self._background_tasks  # as `start` lists them
        grace_ends_at = time.monotonic() + grace_s
        self._draining = True
        await cancel_until_ended(pulling)
        await cancel_until_ended(handing_back)  # it would take from the same queue as `flush` below
        self._intake.hand_back_waiting()
        with suppress(TimeoutError):
            async with asyncio.timeout(hand_back_s):
                await self._intake.hand_backs.flush()
        fields = {"running": self.running, "oldest_s": self._running.oldest_s(), "grace_s": round(grace_s, 3)}
        log.info("draining", extra={"action": "drain.started", **fields})
        self._running.cancel_unsent()
        await self._running.wait_for_end(grace_ends_at - time.monotonic(), unless_ended=heartbeat)
        handed_back, oldest_s = self.running, self._running.oldest_s()  # of the calls that are cancelled now
        await self._running.cancel_all(hand_back_s)
        heartbeat_failed = heartbeat.done()  # on its own, not by the next line
        await cancel_until_ended(heartbeat)
        log.info("drained", extra={"action": "drain.finished", "handed_back": handed_back, "oldest_s": oldest_s})
        if heartbeat_failed:
            _raise_ended(heartbeat)

    async def _keep_pulling(self) -> None:
        """Pull until cancelled; look up or create the durable again whenever that ends."""
        while True:
            try:
                durable = await ensure_durable(self._client, self._options.durable)
                await observe(self._client, durable, self._clock)  # sets the clock to the server's time
                await self._dead_letters.inspect()
                self._report_new_stream(durable)
                await self._pull_from(durable)
            except* (ConsumerGone, nats.errors.Error, OSError, Unavailable) as errors:
                error = errors.exceptions[0]  # of several tasks that failed together, one is enough to name the cause
                self.durable_error = str(error)
                log.warning(
                    "cannot consume commands: %s; looking up or creating the durable again",
                    self.durable_error or type(error).__name__,
                    extra={"action": "consumer.lost", "error": f"{type(error).__name__}: {error}"},
                )
                await asyncio.sleep(_RETRY_S)

    async def _pull_from(self, durable: Durable) -> None:
        """Pull until cancelled. Raises ConsumerGone and other errors in an exception group."""
        self.durable = durable
        self._pull = PullConsumer(self._client, durable, self._wanted, self._receive)
        self._look_ahead = LookAhead(self._client, durable, self._wanted_ahead, self._receive_ahead)
        log.info(
            "consuming",
            extra={"action": "consumer.started", "stream": durable.stream, "durable": durable.name},
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pull.run())
            group.create_task(self._look_ahead.run())
            group.create_task(self._intake.hand_backs.follow(self._client, durable.stream, durable.name))

    def _report_new_stream(self, durable: Durable) -> None:
        """Log if this stream is another one than before, by its creation time."""
        before = self.durable.stream_created if self.durable else ""
        if before and durable.stream_created and before != durable.stream_created:
            log.warning(
                "the stream %s was deleted and created again: the commands that it held are lost",
                durable.stream,
                extra={"action": "stream.replaced", "stream": durable.stream},
            )

    def wake(self) -> None:
        """Run or fetch commands after a call ended or paused, or the fetch mode changed."""
        if self._draining:
            self._running.cancel_unsent()  # a call that began to wait for a permit is handed back, too
        self._run_next()
        if self._pull is not None:
            self._pull.wake()

    def renew_pull(self) -> None:
        """Replace the open pull request: the server may have lost it."""
        if self._pull is not None:
            self._pull.renew()

    def ensure_durable_again(self, reason: str) -> None:
        """Look up or create the durable again; `reason` is for the log."""
        if self._pull is not None:
            self._pull.give_up(reason)

    def use_ack_wait(self, seconds: float) -> None:
        """Use the durable's AckWait for heartbeats and leases."""
        self._heartbeats.ack_wait_s = seconds
        self.leases.duration_s = seconds

    def _wanted(self) -> int:
        """Return the number of commands to fetch for free slots."""
        mode = self._fetch_mode()
        if mode is FetchMode.UNLIMITED:
            return max(0, self._running.free - self._intake.waiting)
        if mode is FetchMode.PROBE and self._running.may_probe:
            return 1
        return 0

    def _wanted_ahead(self) -> int:
        """Return the number of commands to fetch while all slots are busy, 0 to fetch none."""
        if self._is_busy and self._fetch_mode() is FetchMode.UNLIMITED:
            return self._intake.look_ahead
        return 0

    @property
    def _is_busy(self) -> bool:
        """A further command would have to wait: for a slot, or behind others that wait."""
        return self._running.free <= 0 or self._intake.waiting > 0

    @property
    def _has_stalled(self) -> bool:
        """The event loop stalled lately, so a message that is received now may have been redelivered elsewhere."""
        return time.monotonic() < self._stale_until

    def _receive(self, message: Msg) -> bool:
        """Hold the command of a message, and run it once a slot is free. Return False if JetStream did not send it."""
        try:
            held = self._intake.take(message, stale=self._has_stalled)
        except ForeignMessage:
            log.warning("ignored a message that JetStream did not send", extra={"action": "pull.foreign"})
            return False
        if held is not None:  # else the command is held already
            self._enqueue_or_hand_back(held)
        return True

    def _enqueue_or_hand_back(self, held: HeldCommand) -> None:
        """Let a received command wait for a slot, or run as a probe; hand it back if it may not run now."""
        mode = self._fetch_mode()
        if self._draining or mode is FetchMode.NONE:
            self._intake.hand_back(held)  # it was sent before fetching stopped
        elif mode is FetchMode.UNLIMITED:
            self._intake.enqueue(held)
            self._run_next()
        elif self._running.may_probe:
            held.probe = True
            self._running.begin(held)
        else:  # another probe is running
            self._intake.hand_back(held)

    def _receive_ahead(self, message: Msg) -> None:
        """Receive a message of the look-ahead: hand it back at once if too many wait, else hold it.

        Right after a stall it is held in any case: the command may run elsewhere. To hand it back would tell the other
        replicas that it never ran, so that they would run it without a lease.
        """
        if self._has_stalled:
            self._receive(message)
            return
        try:
            handed_back = self._intake.hand_back_surplus(message)
        except ForeignMessage:
            handed_back = False  # `_receive` logs it
        if not handed_back:
            self._receive(message)

    def _run_next(self) -> None:
        """Run waiting commands while calls may begin; hand them back if the fetch mode allows no more calls."""
        if self._fetch_mode() is not FetchMode.UNLIMITED:
            self._intake.hand_back_waiting()
        while self._running.may_begin and not self._draining:
            held = self._intake.next(self._slots.may_begin)
            if held is None:
                break
            self._running.begin(held)
        if self._look_ahead is not None and self._is_busy:
            self._look_ahead.wake()

    def _ended(self, held: HeldCommand, requests: int) -> None:
        """Release a command whose run has ended, and run the next one."""
        self._intake.finished(held, time.monotonic() - held.started_at, requests)
        self.wake()

    async def _send_heartbeats(self) -> None:
        """Until cancelled, send heartbeats of held commands, and cancel calls that run for too long."""
        while True:
            await asyncio.sleep(self._heartbeats.check_every_s)
            if not self._client.is_connected:
                self._intake.mark_stale()  # heartbeats do not arrive, so the server may redeliver waiting commands
            self._running.cancel_overdue(self._options.max_run_s)
            await self._heartbeats.send(list(self._intake.commands.values()))


def _raise_ended(task: asyncio.Task[None]) -> NoReturn:
    """Raise BackgroundTaskEnded for a task that has ended, with the exception that ended it as cause."""
    cause = None if task.cancelled() else task.exception()
    raise BackgroundTaskEnded(task.get_name()) from cause
