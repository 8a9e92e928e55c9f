"""Kernel store that reports the outcome of every load and commit to the circuit breaker."""

from __future__ import annotations

from openapi_tool.kernel.breaker import CircuitBreaker
from openapi_tool.kernel.store import KernelStore
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report


class GuardedStore:
    """KernelStore whose loads and commits pass a circuit breaker; same methods, same errors."""

    def __init__(self, store: KernelStore, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker

    async def load(self, command: Command) -> CallRecords:
        """As in KernelStore."""
        with self._breaker.attempt("load") as succeeded:
            records = await self._store.load(command)
            succeeded()
        return records

    async def last_answer_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """As in KernelStore, without the breaker: a failure stops no call (`executor/turn_deadline.py`)."""
        return await self._store.last_answer_s(project_id, agent_turn_id, step_id)

    async def commit(
        self, card: Card, report: Report, artifact: ArtifactCard | None = None, *, retry: bool = False
    ) -> bool:
        """As in KernelStore. A commit that wrote nothing is no success: with a full disk it works, too."""
        with self._breaker.attempt("commit", retry=retry) as succeeded:
            written = await self._store.commit(card, report, artifact)
            if written:
                succeeded()
        return written

    async def report(self, card_id: str, report: Report) -> bool:
        """As in KernelStore. It writes less than a commit, so its success is not recorded."""
        with self._breaker.attempt("commit"):
            return await self._store.report(card_id, report)

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """As in KernelStore."""
        with self._breaker.attempt("load"):
            return await self._store.artifact(project_id, agent_id, card_id, start, chars)
