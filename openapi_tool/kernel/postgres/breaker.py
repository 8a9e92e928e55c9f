"""Circuit breaker: no command is fetched while loads or commits fail.

- It is open while the latest load or the latest commit failed. The latest is the attempt that began last: one that hung
  through an outage does not show the state after it.
- While it is open, retried commits serve as probes. Without any, a command may be fetched as a probe, with back-off.
- Contention: a statement that failed at a lock or its timeout (StatementContended) may have failed because of its
  project's rows only. So such calls open the breaker only if those of two projects fail in a row. While only contention
  keeps it open, retried commits neither count as failures nor delay the next probe: a project that locks its own rows
  must not stop all fetching.
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
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.protocol.cards import ArtifactCard, ResultCard
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.errors import NeedsOperator, Unavailable
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report, TurnCondition

StoreOperation = Literal["load", "commit"]
Cause = Literal["outage", "operator", "contention"]

MAX_PROBE_INTERVAL_S = 5.0
_FIRST_PROBE_S = 0.2
_QUIET_S = 2 * MAX_PROBE_INTERVAL_S
"""Time without an attempt until the breaker closes: by then any waiting command was fetched as a probe."""

_MAX_DOUBLINGS = 10  # a larger exponent would overflow a float after a long outage


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Outcome of an attempt; `reason` is empty if it does not count as a failure.

    `contended_project` is the project that met contention, empty if none did.
    """

    number: int = 0
    reason: str = ""
    cause: Cause = "outage"
    contended_project: str = ""


class CircuitBreaker:
    """Open while `reason` is not empty; calls `changed` when it opens or closes, and when a probe is due.

    `clock` returns monotonic seconds.
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = changed
        self._clock = clock
        self._latest: dict[StoreOperation, _Outcome] = {"load": _Outcome(), "commit": _Outcome()}
        self._last_number = 0
        self._in_progress = 0
        self._retries = 0
        self._failures = 0
        self._failed_at = 0.0
        self._probe: asyncio.TimerHandle | None = None
        self.reason = ""

    @property
    def may_probe(self) -> bool:
        """Return whether a command may be fetched as a probe (half-open state)."""
        probes_in_progress = self._in_progress
        if self._is_contended:
            probes_in_progress -= self._retries
        return not probes_in_progress and self._clock() >= self._failed_at + self._backoff_s()

    @property
    def _is_contended(self) -> bool:
        """Only contention keeps the breaker open. A retry meets the same lock again, so it is no probe."""
        return all(outcome.cause == "contention" for outcome in self._latest.values() if outcome.reason)

    @contextmanager
    def attempt(
        self, operation: StoreOperation, project_id: str, *, retry: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Yield a function to call on success; an attempt that raises Unavailable has failed.

        A defect of the call, a cancellation, or a project that has used up its share of the connections does not show
        the state of the database.
        """
        self._last_number += 1
        number = self._last_number
        self._in_progress += 1
        self._retries += retry
        try:
            yield partial(self._record, operation, _Outcome(number))
        except PoolShareUsed:
            raise
        except StatementContended as failure:
            if not retry:
                self._record_contention(operation, _Outcome(number, str(failure), "contention", project_id))
            raise
        except Unavailable as failure:
            cause: Cause = "operator" if isinstance(failure, NeedsOperator) else "outage"
            self._record(operation, _Outcome(number, str(failure), cause))
            raise
        finally:
            self._in_progress -= 1
            self._retries -= retry
            if self.reason and self.may_probe:
                # The last probe ended without a result: let the consumer fetch another one.
                self._changed()

    def probe_soon(self) -> None:
        """Reset the back-off, because the health check succeeds again after it failed, or the tables have changed."""
        self._failures = 0

    def close_if_quiet(self) -> None:
        """Close the breaker after _QUIET_S without an attempt: without commands to probe with it would stay open."""
        if self.reason and not self._in_progress and self._clock() >= self._failed_at + _QUIET_S:
            self._latest = {operation: _Outcome(outcome.number) for operation, outcome in self._latest.items()}
            self.reason = ""
            self._failures = 0
            self._changed()

    def _record_contention(self, operation: StoreOperation, outcome: _Outcome) -> None:
        """Record contention as a failure if another project met it just before; else remember the project."""
        latest = self._latest[operation]
        project = outcome.contended_project
        if latest.reason or latest.contended_project not in ("", project):  # already open, or the second project
            self._record(operation, outcome)
        elif outcome.number > latest.number:
            self._latest[operation] = _Outcome(outcome.number, contended_project=project)

    def _record(self, operation: StoreOperation, outcome: _Outcome) -> None:
        """Let an outcome decide whether the breaker is open, unless an attempt that began later has ended."""
        latest, reason_before = self._latest[operation], self.reason
        if outcome.number < latest.number:
            return
        if outcome.reason:
            self._failures += 1
            self._failed_at = self._clock()
            self._schedule_probe()
            # Keep the first reason: the errors of one outage vary, and each new reason would be logged as a change.
            # Contention is a consequence of an outage, so it does not replace the cause.
            if latest.reason and outcome.cause in (latest.cause, "contention"):
                outcome = _Outcome(outcome.number, latest.reason, latest.cause)
        self._latest[operation] = outcome
        self.reason = self._latest["load"].reason or self._latest["commit"].reason
        if not self.reason:
            self._failures = 0
        if self.reason != reason_before:
            self._changed()

    def _backoff_s(self) -> float:
        doublings = min(max(0, self._failures - 1), _MAX_DOUBLINGS)  # no failures: after `probe_soon`
        return min(MAX_PROBE_INTERVAL_S, _FIRST_PROBE_S * 2.0**doublings)

    def _schedule_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        self._probe = asyncio.get_running_loop().call_later(self._backoff_s(), self._changed)


class GuardedStore:
    """KernelStore with a circuit breaker; same methods, same errors."""

    def __init__(self, store: KernelStore, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker

    async def load(self, command: Command) -> CallRecords:
        """Report the outcome to the breaker."""
        with self._breaker.attempt("load", command.identity.project_id) as succeeded:
            records = await self._store.load(command)
            succeeded()
            return records

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Report nothing to the breaker: after a failure the call continues."""
        return await self._store.last_result_age_s(project_id, agent_turn_id, step_id)

    async def commit(
        self,
        card: ResultCard,
        report: Report,
        artifact: ArtifactCard | None,
        condition: TurnCondition | None,
        *,
        retry: bool = False,
    ) -> bool:
        """Report the outcome to the breaker, but no success of a commit that wrote nothing: the disk may be full."""
        with self._breaker.attempt("commit", report.project_id, retry=retry) as succeeded:
            written = await self._store.commit(card, report, artifact, condition)
            if written:
                succeeded()
            return written

    async def report(self, card_id: str, report: Report, condition: TurnCondition | None) -> bool:
        """Report only a failure to the breaker: this writes less than a commit."""
        with self._breaker.attempt("commit", report.project_id):
            return await self._store.report(card_id, report, condition)

    async def is_turn_busy(self, report: Report, quiet_s: float) -> bool:
        """Report only a failure to the breaker: this reads less than a load."""
        with self._breaker.attempt("load", report.project_id):
            return await self._store.is_turn_busy(report, quiet_s)

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Report only a failure to the breaker: this reads less than a load."""
        with self._breaker.attempt("load", project_id):
            return await self._store.artifact(project_id, agent_id, card_id, start, chars)
