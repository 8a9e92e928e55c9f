"""Signals until the event loop handles them; imports almost nothing, so that it takes effect at once.

Importing the service takes a second. A process that runs as PID 1 of a container ignores every signal for which it has
no handler, so without these handlers it would ignore SIGTERM in that second.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_IGNORED = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""Signals that mean nothing to a server: each would end it without a drain, or stop it at a write to its terminal.

Python ignores SIGPIPE itself."""

_hung_up = False


def guard_service() -> None:
    """Until `service.run` handles signals, end with 0 at SIGTERM and SIGQUIT, and remember SIGHUP; ignore others.

    There is no call yet that a drain could finish, and a stop that was asked for is no failure.
    """
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, _end_at_once)
    signal.signal(signal.SIGHUP, _remember_hang_up)
    ignore_meaningless()


def ignore_meaningless() -> None:
    """Ignore the signals that mean nothing to a server."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def guard_command() -> None:
    """End any other command at SIGTERM with 143, as the default action does except for PID 1; it may replace this."""
    signal.signal(signal.SIGTERM, _end_as_killed)


def hung_up() -> bool:
    """Return whether SIGHUP came before the event loop handled it: the settings may have been read before."""
    return _hung_up


# os._exit, not an exception: code that is being imported may catch every exception.


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _end_as_killed(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _remember_hang_up(_number: int, _frame: FrameType | None) -> None:
    global _hung_up  # noqa: PLW0603 - a signal handler has no other state
    _hung_up = True
