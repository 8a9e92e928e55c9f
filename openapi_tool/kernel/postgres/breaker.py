"""Circuit breaker: no command is fetched while loads or commits fail.

A command asks for a tool call. To *load* is to read the rows of its call from the kernel's database, to *commit* is to
write those of its result. The breaker is *open* while the database seems not to work, else *closed*.

1. The breaker is open while the latest load or the latest commit failed. The latest attempt is the one that began last.
   An attempt that began before an outage and hung through it does not show the state after the outage.
2. While the breaker is open, *probes* test the database. A retried commit is a probe. If none is in progress, a command
   may be fetched as a probe, each after a longer pause than the one before.
3. *Contention* means that a statement failed at a lock or its timeout (`StatementContended`), perhaps because of rows
   of its own project only. So contention opens the breaker only if calls of two projects meet it in a row.
4. While nothing but contention keeps the breaker open, retried commits neither count as failures nor delay the next
   probe. Otherwise a project that locks its own rows could stop all fetching.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from openapi_tool.kernel.postgres.failures import PoolShareUsed, StatementContended
from openapi_tool.protocol.errors import NeedsOperator, Unavailable

StoreOperation = Literal["load", "commit"]
"""What the breaker distinguishes: one may fail while the other succeeds."""

Cause = Literal["outage", "operator", "contention"]
"""Cause of a failure; `operator` is an outage that lasts until an operator acts."""

MAX_PROBE_INTERVAL_S = 5.0  # longest pause before a probe
_FIRST_PAUSE_S = 0.2  # before the first probe; each failure doubles it
_QUIET_S = 2 * MAX_PROBE_INTERVAL_S
"""Time without an attempt until the breaker closes: by then any waiting command would have been fetched as a probe."""

_MAX_DOUBLINGS = 10  # more would not change the pause, and would overflow a float after a long outage


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Outcome of an attempt.

    - `number`: attempts are numbered in the order in which they began.
    - `reason`: why it failed, as text; empty if it succeeded, or met contention that does not count as a failure yet.
    - `cause`: of the failure; means nothing without one.
    - `contended_project`: the project that met contention, empty if none did.
    """

    number: int = 0
    reason: str = ""
    cause: Cause = "outage"
    contended_project: str = ""


class CircuitBreaker:
    """The breaker is open while `reason` is not empty.

    It calls `changed` when it opens or closes, and when a probe is due. `clock` returns monotonic seconds.
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = changed
        self._clock = clock
        self.reason = ""  # why the latest load failed, else why the latest commit failed
        self._latest: dict[StoreOperation, _Outcome] = {"load": _Outcome(), "commit": _Outcome()}
        self._last_number = 0  # of the attempt that began last
        self._in_progress = 0  # attempts that have not ended
        self._retries_in_progress = 0  # of these, the retried commits
        # The pause before the next probe follows from the failures in a row, and begins with the last one.
        self._failures = 0
        self._failed_at = 0.0
        self._probe_timer: asyncio.TimerHandle | None = None  # calls `changed` when the next probe is due

    @property
    def may_probe(self) -> bool:
        """Return whether a command may be fetched as a probe (half-open state)."""
        probes_in_progress = self._in_progress
        if self._is_contended:
            probes_in_progress -= self._retries_in_progress  # they meet the same lock again, so they are no probes
        return not probes_in_progress and self._clock() >= self._failed_at + self._backoff_s()

    @property
    def _is_contended(self) -> bool:
        """Nothing but contention keeps the breaker open."""
        return all(outcome.cause == "contention" for outcome in self._latest.values() if outcome.reason)

    @contextmanager
    def attempt(
        self, operation: StoreOperation, project_id: str, *, retry: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Record the outcome of the attempt in this context; yield a function to call on success.

        An attempt that raises Unavailable has failed. What else ends it does not show the state of the database, and
        is not recorded: a defect of the call, a cancellation, a project that has used up its share of the connections.
        """
        self._last_number += 1
        number = self._last_number
        self._in_progress += 1
        self._retries_in_progress += retry
        try:
            yield partial(self._record, operation, _Outcome(number))
        except PoolShareUsed:  # the project has used up its share of the connections
            raise
        except StatementContended as failure:
            if not retry:
                outcome = _Outcome(number, str(failure), "contention", contended_project=project_id)
                self._record_contention(operation, outcome)
            raise
        except Unavailable as failure:
            cause: Cause = "operator" if isinstance(failure, NeedsOperator) else "outage"
            self._record(operation, _Outcome(number, str(failure), cause))
            raise
        finally:
            self._in_progress -= 1
            self._retries_in_progress -= retry
            if self.reason and self.may_probe:  # the last probe ended without an outcome
                self._changed()  # lets the consumer fetch another one

    def probe_soon(self) -> None:
        """Let the next probe follow after the shortest pause.

        To be called when the health check succeeds again after it failed, or when the tables have changed.
        """
        self._failures = 0

    def close_if_quiet(self) -> None:
        """Close the breaker after _QUIET_S without an attempt: if no commands arrive, nothing else would close it."""
        is_quiet = not self._in_progress and self._clock() >= self._failed_at + _QUIET_S
        if self.reason and is_quiet:
            self._latest = {operation: _Outcome(outcome.number) for operation, outcome in self._latest.items()}
            self.reason = ""
            self._failures = 0
            self._changed()

    def _record_contention(self, operation: StoreOperation, outcome: _Outcome) -> None:
        """Record contention as a failure if another project met it just before; else remember the project."""
        latest = self._latest[operation]
        project = outcome.contended_project
        is_open = bool(latest.reason)
        is_second_project = latest.contended_project not in ("", project)
        if is_open or is_second_project:
            self._record(operation, outcome)
        elif outcome.number > latest.number:
            self._latest[operation] = _Outcome(outcome.number, contended_project=project)

    def _record(self, operation: StoreOperation, outcome: _Outcome) -> None:
        """Let an outcome decide whether the breaker is open, unless an attempt that began later has ended."""
        latest = self._latest[operation]
        if outcome.number < latest.number:
            return
        reason_before = self.reason
        if outcome.reason:
            self._failures += 1
            self._failed_at = self._clock()
            self._schedule_probe()
            # Keep the first reason: the errors of one outage vary, and each new reason would be logged as a change. An
            # outage may cause contention, so contention does not replace the first cause either.
            is_same_outage = outcome.cause in (latest.cause, "contention")
            if latest.reason and is_same_outage:
                outcome = _Outcome(outcome.number, latest.reason, latest.cause)
        self._latest[operation] = outcome
        self.reason = self._latest["load"].reason or self._latest["commit"].reason
        if not self.reason:
            self._failures = 0
        if self.reason != reason_before:
            self._changed()

    def _backoff_s(self) -> float:
        """Return the pause before the next probe: 0.2 s after one failure, 0.4 s after two, at most 5 s."""
        doublings = min(max(0, self._failures - 1), _MAX_DOUBLINGS)  # no failures: after `probe_soon`
        return min(MAX_PROBE_INTERVAL_S, _FIRST_PAUSE_S * 2.0**doublings)

    def _schedule_probe(self) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._probe_timer = asyncio.get_running_loop().call_later(self._backoff_s(), self._changed)
