"""Kernel store that reports the outcome of every load and commit to the circuit breaker."""

from __future__ import annotations

from openapi_tool.kernel.breaker import CircuitBreaker
from openapi_tool.kernel.store import KernelStore
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report


class GuardedStore:
    """KernelStore with a circuit breaker; same methods, same errors."""

    def __init__(self, store: KernelStore, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker

    async def load(self, command: Command) -> CallRecords:
        """Load the records of a call; report the outcome to the breaker."""
        with self._breaker.attempt("load") as succeeded:
            records = await self._store.load(command)
            succeeded()
        return records

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Return the age of the step's newest result. A failure is not reported to the breaker: the call continues."""
        return await self._store.last_result_age_s(project_id, agent_turn_id, step_id)

    async def commit(
        self, card: Card, report: Report, artifact: ArtifactCard | None = None, *, retry: bool = False
    ) -> bool:
        """Commit a result; report the outcome to the breaker.

        A commit that wrote nothing is not reported as a success: it would succeed with a full disk, too.
        """
        with self._breaker.attempt("commit", retry=retry) as succeeded:
            written = await self._store.commit(card, report, artifact)
            if written:
                succeeded()
        return written

    async def report(self, card_id: str, report: Report) -> bool:
        """Report an existing result card. Only a failure is reported to the breaker: it writes less than a commit."""
        with self._breaker.attempt("commit"):
            return await self._store.report(card_id, report)

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return a part of a stored text; report a failure to the breaker."""
        with self._breaker.attempt("load"):
            return await self._store.artifact(project_id, agent_id, card_id, start, chars)
