"""The calls that run in this process, one task each, and how many more may begin.

A *slot* is one of a fixed number of places for running calls. A call that only waits gives up its slot (`slots.py`), so
more calls may run than there are slots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from openapi_tool.kernel.jetstream.claimed_ids import ids_of
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.slots import Slots

log = logging.getLogger(__name__)

Run = Callable[[HeldCommand], Coroutine[Any, Any, None]]
"""Runs and settles a command."""

OnEnd = Callable[[HeldCommand, int], None]
"""Called when the run of a command has ended in any way, with the number of its upstream requests."""


class RunningCalls:
    """Calls that run in at most `limit` slots, apart from those that have given up theirs (`Slots`)."""

    def __init__(self, run: Run, slots: Slots, limit: int, on_end: OnEnd) -> None:
        self._run = run
        self._slots = slots
        self._limit = limit
        self._on_end = on_end
        self.held_by_task: dict[asyncio.Task[None], HeldCommand] = {}

    def __len__(self) -> int:
        return len(self.held_by_task)

    @property
    def sequences(self) -> set[int]:
        """Stream sequences of the commands."""
        return {held.delivery.stream_sequence for held in self.held_by_task.values()}

    @property
    def free(self) -> int:
        """Number of free slots; negative once calls that had given up their slots took them again, free or not.

        For example, of 8 slots 8 calls hold one, and a ninth call, which had paused, resumes: -1.
        """
        return self._limit - len(self.held_by_task) + self._slots.without_slot

    @property
    def may_begin(self) -> bool:
        """A call may begin: a slot is free, or a project holds more slots than one project may keep (7/8, `Slots`).

        Calls of other projects then begin without a slot, as many as the project holds too many (ADR 6). For example,
        a project that holds all of 16 slots may keep 14, so two calls of other projects may begin.
        """
        return self.free + self._slots.excess > 0

    @property
    def may_probe(self) -> bool:
        """A call may begin as a test of the database: one at a time."""
        return self.free > 0 and not any(held.probe for held in self.held_by_task.values())

    def oldest_s(self) -> float:
        """Return for how many seconds the oldest call has run, 0 without one."""
        now = time.monotonic()
        ages_s = [now - held.started_at for held in self.held_by_task.values()]
        return round(max(ages_s, default=0.0), 3)

    def begin(self, held: HeldCommand) -> None:
        """Run a command in a task of its own."""
        held.started_at = time.monotonic()
        self._slots.begin(held.delivery.stream_sequence, held.claimed_agent.project)
        task = asyncio.create_task(self._run(held))
        self.held_by_task[task] = held
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        held = self.held_by_task.pop(task)
        requests = self._slots.ended(held.delivery.stream_sequence)
        self._on_end(held, requests)
        defect = None if task.cancelled() else task.exception()
        if defect is not None:
            log.error(
                "an internal error prevented settling a command; the server redelivers it",
                exc_info=defect,
                extra={"action": "call.broken"} | ids_of(held.delivery),
            )

    def cancel_overdue(self, max_run_s: float) -> None:
        """Cancel calls that run for longer than `max_run_s`, which is a defect; their runs count as lost."""
        for task, held in self.held_by_task.items():
            if not held.overdue and time.monotonic() - held.started_at > max_run_s:
                log.error(
                    "a call exceeded every time limit and is cancelled",
                    extra={"action": "call.overdue"} | ids_of(held.delivery),
                )
                held.overdue = True
                held.forgive_on_hand_back = False
                task.cancel()

    def cancel_unsent(self) -> None:
        """Cancel calls that wait for a permit and have sent no request, so that their commands are handed back."""
        unsent = self._slots.unsent()
        for task, held in self.held_by_task.items():
            if held.delivery.stream_sequence in unsent:
                task.cancel()

    async def wait_for_end(self, within_s: float, unless_ended: asyncio.Task[None]) -> None:
        """Wait until all calls have ended, but at most `within_s` seconds, and not after the task `unless_ended`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.held_by_task and not unless_ended.done():
                    await asyncio.wait([*self.held_by_task, unless_ended], return_when=asyncio.FIRST_COMPLETED)

    async def cancel_all(self, within_s: float) -> None:
        """Cancel all calls, and wait for their ends; log those that still run after `within_s` seconds."""
        running = list(self.held_by_task)
        await asyncio.sleep(0)  # a task that is cancelled before its first step cannot hand its command back
        for task in running:
            task.cancel()
        if self.held_by_task:
            await asyncio.wait(self.held_by_task, timeout=within_s)
        for held in self.held_by_task.values():
            log.error(
                "a cancelled call does not end; the server redelivers its command after AckWait",
                extra={"action": "call.stuck"} | ids_of(held.delivery),
            )
