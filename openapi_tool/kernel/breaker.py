"""Circuit breaker: no command is fetched while loads or commits fail.

Loads and commits have a state each; the breaker is open while the latest attempt of either failed. While it is open,
retried commits serve as probes. Without any, a command may be fetched as a probe: first after 0.2 s, then with
back-off up to every PROBE_EVERY_S seconds.

Attempts may end in another order than they began. The one that began last decides: an attempt that hung through an
outage says nothing about the time after it.

A statement that met a lock or its time limit (Contended) may have done so because of its own rows. So the first such
call does not open the breaker, and the second in a row does. While the breaker is open for contention alone, retried
commits do not count as probes: they neither open the breaker nor delay the next probe. Otherwise one locked row would
keep all other calls from being fetched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

from openapi_tool.frozen import frozen
from openapi_tool.kernel.failures import Contended
from openapi_tool.protocol.errors import NeedsOperator, Unavailable

Operation = Literal["load", "commit"]
Cause = Literal["outage", "operator", "contention"]

PROBE_EVERY_S = 5.0
_FIRST_PROBE_S = 0.2
_QUIET_S = 2 * PROBE_EVERY_S
"""Seconds without an attempt until the breaker closes: by then any waiting command was fetched as a probe."""

_MAX_DOUBLINGS = 10
"""Limit of the back-off's exponent: a larger one would overflow a float after a long outage."""


@frozen
class _Outcome:
    """Outcome of the latest attempt; `reason` is empty if it succeeded.

    `number` orders attempts by their begin. `suspected`: the latest call met contention; the next one that does opens
    the breaker.
    """

    number: int = 0
    reason: str = ""
    cause: Cause = "outage"
    suspected: bool = False


class CircuitBreaker:
    """Open while commands should not be fetched. `changed` is called when it opens or closes, and when a probe is due.

    `reason` says why it is open, and is empty while it is closed. `clock` returns monotonic seconds.
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = changed
        self._clock = clock
        self._latest: dict[Operation, _Outcome] = {"load": _Outcome(), "commit": _Outcome()}
        self._begun = 0
        self._in_progress = 0
        self._retries = 0
        self._failures = 0
        self._failed_at = 0.0
        self._probe: asyncio.TimerHandle | None = None
        self.reason = ""

    @property
    def may_probe(self) -> bool:
        """Return whether a command may be fetched as a probe (half-open state)."""
        # Attempts in progress whose success would close the breaker.
        pending_probes = self._in_progress - (self._retries if self._is_contended else 0)
        return not pending_probes and self._clock() >= self._failed_at + self._pause_s()

    @property
    def _is_contended(self) -> bool:
        """Return whether the breaker is open for contention alone; a retry meets the same lock and proves nothing."""
        return all(outcome.cause == "contention" for outcome in self._latest.values() if outcome.reason)

    @contextmanager
    def attempt(self, operation: Operation, *, retry: bool = False) -> Iterator[Callable[[], None]]:
        """Yield a function to call when an attempt, or a `retry` of a failed one, has succeeded.

        An attempt that raises Unavailable has failed. One that ends in any other way changes nothing: a defect of the
        call or a cancellation says nothing about the database.
        """
        self._begun += 1
        number = self._begun
        self._in_progress += 1
        self._retries += retry
        try:
            yield partial(self._record, operation, _Outcome(number))
        except Contended as failure:
            if not retry:
                self._suspect(operation, _Outcome(number, str(failure), "contention"))
            raise
        except Unavailable as failure:
            cause: Cause = "operator" if isinstance(failure, NeedsOperator) else "outage"
            self._record(operation, _Outcome(number, str(failure), cause))
            raise
        finally:
            self._in_progress -= 1
            self._retries -= retry
            if self.reason and self.may_probe:
                # The last probe in progress ended without a result: let the consumer fetch another one.
                self._changed()

    def probe_soon(self) -> None:
        """Reset the back-off, because the health check succeeds again after it failed."""
        self._failures = 0

    def close_if_quiet(self) -> None:
        """Close the breaker if nothing was attempted for 10 s: without a command to probe with it would stay open."""
        if self.reason and not self._in_progress and self._clock() >= self._failed_at + _QUIET_S:
            self._latest = {operation: _Outcome(outcome.number) for operation, outcome in self._latest.items()}
            self.reason = ""
            self._failures = 0
            self._changed()

    def _suspect(self, operation: Operation, outcome: _Outcome) -> None:
        """Record contention as a failure only if the call before met it, too."""
        known = self._latest[operation]
        if known.reason or known.suspected:
            self._record(operation, outcome)
        elif outcome.number > known.number:
            self._latest[operation] = _Outcome(outcome.number, suspected=True)

    def _record(self, operation: Operation, outcome: _Outcome) -> None:
        known, before = self._latest[operation], self.reason
        if outcome.number < known.number:
            return
        if outcome.reason:
            self._failures += 1
            self._failed_at = self._clock()
            self._wake_for_probe()
            # Keep the first reason: the errors of one outage vary, and each new reason would be logged as a change.
            # Contention during an outage is a consequence of it, so it does not replace the cause.
            if known.reason and outcome.cause in (known.cause, "contention"):
                outcome = _Outcome(outcome.number, known.reason, known.cause)
        self._latest[operation] = outcome
        self.reason = self._latest["load"].reason or self._latest["commit"].reason
        if not self.reason:
            self._failures = 0
        if self.reason != before:
            self._changed()

    def _pause_s(self) -> float:
        # `_failures` is 0 after `probe_soon`.
        doublings = min(max(0, self._failures - 1), _MAX_DOUBLINGS)
        return min(PROBE_EVERY_S, _FIRST_PROBE_S * 2.0**doublings)

    def _wake_for_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        self._probe = asyncio.get_running_loop().call_later(self._pause_s(), self._changed)
