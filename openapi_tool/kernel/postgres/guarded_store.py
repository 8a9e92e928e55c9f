"""The kernel's database behind the circuit breaker: each load or commit tells the breaker whether it succeeded.

While the breaker is open, no command is fetched (`breaker.py`). The pipeline uses the database by this class.
"""

from __future__ import annotations

from openapi_tool.kernel.postgres.breaker import CircuitBreaker
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.protocol.cards import ArtifactCard, ResultCard
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report, TurnCondition


class GuardedStore:
    """KernelStore with a circuit breaker: same methods, same errors. The docstrings say what the breaker hears."""

    def __init__(self, store: KernelStore, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker

    async def load(self, command: Command) -> CallRecords:
        """Load; report success and failure to the breaker."""
        with self._breaker.attempt("load", command.identity.project_id) as succeeded:
            records = await self._store.load(command)
            succeeded()
            return records

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Look up; report nothing to the breaker, as the call continues after a failure."""
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
        """Commit; report success and failure to the breaker.

        A commit that wrote nothing is not reported as a success: the disk may be full.
        """
        with self._breaker.attempt("commit", report.project_id, retry=retry) as succeeded:
            written = await self._store.commit(card, report, artifact, condition)
            if written:
                succeeded()
            return written

    async def report(self, card_id: str, report: Report, condition: TurnCondition | None) -> bool:
        """Write a report; report only failure to the breaker, as this writes less than a commit."""
        with self._breaker.attempt("commit", report.project_id):
            return await self._store.report(card_id, report, condition)

    async def is_turn_busy(self, report: Report, quiet_s: float) -> bool:
        """Look up; report only failure to the breaker, as this reads less than a load."""
        with self._breaker.attempt("load", report.project_id):
            return await self._store.is_turn_busy(report, quiet_s)

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Read an artifact; report only failure to the breaker, as this reads less than a load."""
        with self._breaker.attempt("load", project_id):
            return await self._store.artifact(project_id, agent_id, card_id, start, chars)
