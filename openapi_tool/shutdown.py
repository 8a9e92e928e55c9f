"""The end of `serve`: requested by a signal or a failure, with one deadline for all its steps.

The setting `executor.drain_timeout_s` is the time from the first signal to the end of the process, whatever blocks. Its
last part (`ExecutorOptions.hand_back_s`: 3 s, or half of a shorter time) is for what follows the calls. Each third of
that part has a purpose; the first one is `commit_grace_s`:

    first signal                                                                                     end of the process
    | running calls may finish | commits may finish | results are parked,  | spans and metrics are exported, |
    |                          |                    | commands handed back | connections closed              |

A step that is done early leaves its time to the next ones. What does not end in time is cut off: a transaction is
committed or not, and a command that was not acknowledged is redelivered after AckWait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.signals import hung_up

log = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_LINES_S = 1.0  # for a reader of the log that is slow or blocked


def end_process(code: int, log_last: Callable[[], None] = lambda: None) -> NoReturn:
    """Call `log_last`, flush the log, both for at most a second, and end the process at once.

    A normal end would wait for the threads that resolve names, which neither asyncio nor uvloop can cancel: minutes, if
    the resolver does not answer.
    """

    def write() -> None:
        log_last()
        logging.shutdown()

    with suppress(RuntimeError):  # no more threads
        writing = threading.Thread(target=write, name="last log lines", daemon=True)
        writing.start()
        writing.join(_LAST_LINES_S)
    os._exit(code)


class Shutdown:
    """Whether and when the process must end. `running` returns the number of running calls, for the log."""

    def __init__(self, options: ExecutorOptions, running: Callable[[], int]) -> None:
        self._options = options
        self._running = running
        self._requested = asyncio.Event()
        self._begun = threading.Event()  # the same for the thread
        self._signalled = False
        self._code = 0  # with which the process ends if it is cut off
        self._ends_at = float("inf")  # on the monotonic clock
        self._steps: dict[str, float] = {}  # unfinished ones, with the times at which they began
        # A thread, as a computation may block the loop; started now, as no thread may be left when the end begins.
        threading.Thread(target=self._cut_off_in_time, name="end of the drain", daemon=True).start()

    def handle_signals(self, reload: asyncio.Event) -> None:
        """Begin at the first SIGTERM, SIGINT or SIGQUIT, end the process at the second; set `reload` at SIGHUP.

        No signal is lost between the handlers of `signals.py` and these: the loop first sets the descriptor to which
        every signal is written, and Python runs the old handler for a pending signal before it sets a new one.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        if hung_up():
            reload.set()

    def _on_signal(self, number: int) -> None:
        def warn() -> None:
            log.warning("stopping now", extra={"action": "service.killed", "signal": number})

        if self._signalled:
            end_process(128 + number, warn)  # as in shells
        self._signalled = True
        self.begin(number)

    def begin(self, number: int | None = None) -> None:
        """Begin to end the process, if that has not begun: after a signal with this number, or a failure of a part."""
        if self._requested.is_set():
            return
        within_s = self._options.drain_timeout_s
        self._ends_at = time.monotonic() + within_s
        self._requested.set()
        self._code = 1 if number is None else 0
        self._begun.set()
        log.info("stopping", extra={"action": "service.stopping", "signal": number, "within_s": within_s})

    def _cut_off_in_time(self) -> None:
        """Wait until the time is over, and end the process (in the thread)."""
        self._begun.wait()
        time.sleep(self.left_s)

        def warn() -> None:
            log.warning(
                "the time for the end is over; cutting off unfinished steps",
                extra={"action": "service.cut_off", "steps": list(self._steps), "running": self._running()},
            )

        end_process(self._code, warn)

    @property
    def left_s(self) -> float:
        """Seconds until the process ends."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def calls_left_s(self) -> float:
        """Seconds that running calls have to finish."""
        return max(0.0, self.left_s - self._options.hand_back_s)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Log the end of a step with its duration; if the process is cut off before, its last line names the step."""
        began = time.monotonic()
        self._steps[name] = began
        try:
            yield
        finally:
            del self._steps[name]
        seconds = round(time.monotonic() - began, 3)
        log.info("done: %s", name, extra={"action": "service.step_done", "step": name, "seconds": seconds})

    async def unless_requested(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`; if the end is requested first, cancel it and return None."""
        working = asyncio.ensure_future(work)
        try:
            await self.requested_or_done(working)
            return working.result() if working.done() else None
        finally:
            await cancel_until_ended(working)

    async def requested_or_done(self, working: asyncio.Future[Any]) -> None:
        """Wait until the end is requested or a task has ended."""
        requested = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait([working, requested], return_when=asyncio.FIRST_COMPLETED)
        finally:
            requested.cancel()
