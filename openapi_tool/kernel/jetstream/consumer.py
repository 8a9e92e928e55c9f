"""Consume commands by a durable of JetStream: pull, hold, run, send heartbeats, drain."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import nats.errors
from nats.aio.msg import Msg

from openapi_tool.kernel.jetstream.claimed_ids import ids_of
from openapi_tool.kernel.jetstream.command_runner import CommandRunner, Handler
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.deliveries import ForeignMessage
from openapi_tool.kernel.jetstream.durable import observe
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.jetstream.heartbeats import Heartbeats
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.intake import Intake
from openapi_tool.kernel.jetstream.leases import Leases
from openapi_tool.kernel.jetstream.pull_consumer import ConsumerGone, LookAhead, PullConsumer
from openapi_tool.kernel.jetstream.scheduler import new_scheduler
from openapi_tool.kernel.jetstream.slots import Slots
from openapi_tool.kernel.jetstream.streams import Durable, ensure_durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import ConsumerOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # between attempts to look up or create the durable
_STALL_SHARE = 1 / 3  # of AckWait: after a longer stall, held commands may have been redelivered elsewhere
_AFTER_STALL_S = 1.0  # a message that is received within this time may have been sent during the stall
_HAND_BACK_TIMEOUT_S = 5.0  # on shutdown; the remaining commands are redelivered after AckWait


class BackgroundTaskEnded(Exception):
    """The task that pulls or sends heartbeats ended, which is a defect; the process must end, too."""


class CommandConsumer:
    """Fetches commands, holds them until a slot is free, and sends heartbeats until they are settled.

    `fetch_mode` limits fetching. `clock` is set to the server's time.
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
        self._client = client
        self._options = options
        self._concurrency = options.executor.concurrency
        self._dead_letters = dead_letters
        self._fetch_mode = fetch_mode
        self._clock = clock
        self.leases = Leases(client, options.durable.nats.ack_wait_s, options.replicas, clock.time)
        self._command_runner = CommandRunner(self.leases, dead_letters, handle, options.executor)
        self._heartbeats = Heartbeats(self.leases, options.durable.nats.ack_wait_s)
        self._intake = Intake(options.executor, new_scheduler(options.fairness), client.publish)
        self._stale_until = 0.0  # a message that is received before that is held as stale
        self._draining = False
        self._slots = slots or Slots(self._concurrency)
        self._slots.wake = self.wake
        self._running: dict[asyncio.Task[None], HeldCommand] = {}
        self._pull: PullConsumer | None = None
        self._look_ahead: LookAhead | None = None
        self.durable: Durable | None = None
        self.durable_error = ""
        self._background_tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> int:
        """Number of running calls."""
        return len(self._running)

    def sequences(self) -> dict[str, list[int]]:
        """Return the stream sequences of the commands that run here (`running`), and of those that wait (`waiting`)."""
        running = {held.delivery.stream_sequence for held in self._running.values()}
        waiting = [sequence for sequence in self._intake.commands if sequence not in running]
        return {"running": sorted(running), "waiting": waiting}

    @property
    def _free(self) -> int:
        """Number of free slots; negative once calls that had given up their slots took them again, free or not.

        For example, of 8 slots 8 calls hold one, and a ninth call, which had paused, resumes: -1.
        """
        return self._concurrency - len(self._running) + self._slots.without_slot

    @property
    def silence_s(self) -> float:
        """Seconds since the server last answered the open pull request, infinite before the first one."""
        return self._pull.silence_s if self._pull is not None else math.inf

    def stalled(self, seconds: float) -> None:
        """Handle a stall of the event loop: held commands may have been redelivered elsewhere."""
        if seconds > self._heartbeats.ack_wait_s * _STALL_SHARE:
            self._stale_until = time.monotonic() + _AFTER_STALL_S
            self._intake.mark_stale()

    def start(self) -> None:
        """Start consuming in the background; retry after connection losses and while the durable is missing."""
        intake = self._intake
        metrics.SLOTS.set_function(lambda: self._concurrency)
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
        _raise_if_ended(self._background_tasks)

    async def stop(self, grace_s: float, hand_back_s: float = _HAND_BACK_TIMEOUT_S) -> None:
        """Stop fetching, hand back waiting commands, let calls finish, hand back the others.

        Calls get `grace_s` seconds from now on to finish, and `hand_back_s` from their cancellation on; commands that
        are not handed back by then are redelivered after AckWait. Calls that wait for a permit and have sent no request
        are handed back at once. If the heartbeat task fails, the grace period ends early, as the server would redeliver
        running calls, and BackgroundTaskEnded is raised at the end.
        """
        pulling, handing_back, heartbeat = self._background_tasks  # in the order of `start`
        give_up_at = time.monotonic() + grace_s
        self._draining = True
        await _cancel(pulling)
        await _cancel(handing_back)  # it would take from the same queue as `flush` below
        self._intake.hand_back_waiting()
        with suppress(TimeoutError):
            async with asyncio.timeout(hand_back_s):
                await self._intake.hand_backs.flush()
        fields = {"running": self.running, "oldest_s": self._oldest_running_s(), "grace_s": round(grace_s, 3)}
        log.info("draining", extra={"action": "drain.started", **fields})
        self._hand_back_unsent()
        await self._wait_for_calls(heartbeat, give_up_at - time.monotonic())
        handed_back, oldest_s = self.running, self._oldest_running_s()
        await self._cancel_all(hand_back_s)
        ended_early = [heartbeat] if heartbeat.done() else []
        await _cancel(heartbeat)
        log.info("drained", extra={"action": "drain.finished", "handed_back": handed_back, "oldest_s": oldest_s})
        _raise_if_ended(ended_early)

    def _hand_back_unsent(self) -> None:
        unsent = self._slots.unsent()
        for task, held in self._running.items():
            if held.delivery.stream_sequence in unsent:
                task.cancel()  # `CommandRunner.run` then hands the command back

    async def _wait_for_calls(self, heartbeat: asyncio.Task[None], grace_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._running and not heartbeat.done():
                    await asyncio.wait([*self._running, heartbeat], return_when=asyncio.FIRST_COMPLETED)

    async def _cancel_all(self, within_s: float) -> None:
        running = list(self._running)
        await asyncio.sleep(0)  # a task that is cancelled before its first step cannot hand its command back
        for task in running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)
        for held in self._running.values():
            log.error(
                "a cancelled call does not end; the server redelivers its command after AckWait",
                extra={"action": "call.stuck"} | ids_of(held.delivery),
            )

    def _oldest_running_s(self) -> float:
        now = time.monotonic()
        return round(max((now - held.started_at for held in self._running.values()), default=0.0), 3)

    async def _keep_pulling(self) -> None:
        while True:
            try:
                durable = await ensure_durable(self._client, self._options.durable)
                # Sets `_clock` to the time of the server; deadlines and leases use it.
                await observe(self._client, durable, self._clock)
                await self._dead_letters.inspect()
                self._report_new_stream(durable)
                self.durable = durable
                self._pull = PullConsumer(self._client, durable, self._wanted, self._receive)
                self._look_ahead = LookAhead(self._client, durable, self._look_ahead_batch, self._receive_ahead)
                log.info(
                    "consuming",
                    extra={"action": "consumer.started", "stream": durable.stream, "durable": durable.name},
                )
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pull.run())
                    group.create_task(self._look_ahead.run())
                    group.create_task(self._intake.hand_backs.follow(self._client, durable.stream, durable.name))
            except* (ConsumerGone, nats.errors.Error, OSError, Unavailable) as errors:
                error = errors.exceptions[0]
                self.durable_error = str(error)
                log.warning(
                    "cannot consume commands: %s; looking up or creating the durable again",
                    self.durable_error or type(error).__name__,
                    extra={"action": "consumer.lost", "error": f"{type(error).__name__}: {error}"},
                )
                await asyncio.sleep(_RETRY_S)

    def _report_new_stream(self, durable: Durable) -> None:
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
            self._hand_back_unsent()
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
        self._heartbeats.ack_wait_s = self.leases.duration_s = seconds

    def _wanted(self) -> int:
        """Return the number of commands to fetch for free slots."""
        mode = self._fetch_mode()
        if mode is FetchMode.UNLIMITED:
            return max(0, self._free - self._intake.waiting)
        return 1 if mode is FetchMode.PROBE and self._may_probe else 0

    def _look_ahead_batch(self) -> int:
        return self._intake.look_ahead if self._busy and self._fetch_mode() is FetchMode.UNLIMITED else 0

    @property
    def _busy(self) -> bool:
        return self._free <= 0 or self._intake.waiting > 0

    @property
    def _may_run(self) -> bool:
        """A command may run: a slot is free, or a project holds more slots than one project may keep (7/8, `Slots`).

        As many calls of other projects as it holds slots beyond that may run without one (ADR 6). For example, one
        that holds all of 16 slots may keep 14, so two calls of other projects may begin.
        """
        return self._free + self._slots.excess > 0

    @property
    def _may_probe(self) -> bool:
        """A command may run as a test of the database: one at a time."""
        return self._free > 0 and not any(held.probe for held in self._running.values())

    def _receive(self, message: Msg) -> bool:
        """Hold a message until a slot is free. Return False if JetStream did not send it."""
        try:
            held = self._intake.take(message, stale=time.monotonic() < self._stale_until)
        except ForeignMessage:
            log.warning("ignored a message that JetStream did not send", extra={"action": "pull.foreign"})
            return False
        if held is None:
            return True
        mode = self._fetch_mode()
        if self._draining or mode is FetchMode.NONE:
            self._intake.hand_back(held)  # it was sent before fetching stopped
        elif mode is FetchMode.UNLIMITED:
            self._intake.enqueue(held)
            self._run_next()
        elif self._may_probe:
            held.probe = True
            self._run(held)
        else:
            self._intake.hand_back(held)
        return True

    def _receive_ahead(self, message: Msg) -> None:
        """Receive a message of the look-ahead: hand it back at once if too many wait, else hold it.

        Right after a stall it is held in any case. It may run elsewhere, and the notice of the hand-back would say
        that it never ran.
        """
        if time.monotonic() >= self._stale_until:
            with suppress(ForeignMessage):  # `_receive` logs it
                if self._intake.hand_back_surplus(message):
                    return
        self._receive(message)

    def _run_next(self) -> None:
        if self._fetch_mode() is not FetchMode.UNLIMITED:
            self._intake.hand_back_waiting()
        while self._may_run and not self._draining and (held := self._intake.next(self._slots.may_begin)):
            self._run(held)
        if self._look_ahead is not None and self._busy:
            self._look_ahead.wake()

    def _run(self, held: HeldCommand) -> None:
        held.started_at = time.monotonic()
        self._slots.begin(held.delivery.stream_sequence, held.claimed_agent.project)
        task = asyncio.create_task(self._command_runner.run(held))
        self._running[task] = held
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        held = self._running.pop(task)
        requests = self._slots.ended(held.delivery.stream_sequence)
        self._intake.finished(held, time.monotonic() - held.started_at, requests)
        self.wake()
        if not task.cancelled() and (defect := task.exception()):
            log.error(
                "an internal error prevented settling a command; the server redelivers it",
                exc_info=defect,
                extra={"action": "call.broken"} | ids_of(held.delivery),
            )

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeats.check_every_s)
            if not self._client.is_connected:
                self._intake.mark_stale()  # heartbeats do not arrive, so the server may redeliver waiting commands
            self._cancel_overdue()
            await self._heartbeats.send(list(self._intake.commands.values()))

    def _cancel_overdue(self) -> None:
        """Cancel calls that run longer than all time limits, which is a defect; a run that began counts as lost."""
        for task, held in self._running.items():
            if not held.overdue and time.monotonic() - held.started_at > self._options.max_run_s:
                log.error(
                    "a call exceeded every time limit and is cancelled",
                    extra={"action": "call.overdue"} | ids_of(held.delivery),
                )
                held.overdue = True
                held.forgive_on_hand_back = False
                task.cancel()


def _raise_if_ended(background_tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in background_tasks:
        if task.done():
            raise BackgroundTaskEnded(task.get_name()) from (None if task.cancelled() else task.exception())


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
