"""Interfaces (ports) of the pipeline, which other packages implement: database, NATS, slots, tracing.

A *card* is a JSON document in the kernel's database, such as a result. A *report* (inbox row and edge) announces a
result to the agent whose *turn* waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from openapi_tool.engine.ports import Artifacts
from openapi_tool.protocol.cards import ArtifactCard, ResultCard
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.report import Doorbell, Report, TurnCondition
from openapi_tool.protocol.tracing import TraceLink
from openapi_tool.quotas.permits import Slot
from openapi_tool.telemetry.spans import CallSpan

Clock = Callable[[], float]
"""Returns the time of the server that timestamps commands, in seconds since the epoch."""


class Kernel(Artifacts, Protocol):
    """The kernel's tables, behind the circuit breaker of `GuardedStore`. Every method raises Unavailable in an outage.

    The breaker stops fetching commands while the database fails.
    """

    async def load(self, command: Command) -> CallRecords:
        """Load all records of a call in one round trip."""

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Return the age of the step's newest result in seconds, None without one."""

    async def commit(
        self,
        card: ResultCard,
        report: Report,
        artifact: ArtifactCard | None,
        condition: TurnCondition | None,
        *,
        retry: bool = False,
    ) -> bool:
        """Write all rows of a result in one transaction; return False if nothing was written.

        Nothing is written if the call has a result, or its turn no longer waits. `retry` means that an earlier attempt
        failed; the breaker treats such a commit as a test of the database. Raises TurnBusy if a `condition` is given
        and does not hold.
        """

    async def report(self, card_id: str, report: Report, condition: TurnCondition | None) -> bool:
        """Write inbox row and edge for an existing result card; return and raise as `commit` does."""

    async def is_turn_busy(self, report: Report, quiet_s: float) -> bool:
        """Return whether a commit would raise TurnBusy now.

        Other commands of the step count while they are younger than `quiet_s` seconds.
        """


class ResultStore(Protocol):
    """Temporary records that all executors share, by name. Every method raises Unavailable."""

    async def put(self, name: str, record: bytes) -> None:
        """Store a record."""

    async def get(self, name: str) -> bytes | None:
        """Return a record, None if there is none."""

    async def delete(self, name: str) -> None:
        """Delete a record."""


class Publisher(Protocol):
    """Publisher of doorbells."""

    async def publish(self, doorbell: Doorbell) -> bool:
        """Publish a doorbell; return False if NATS refuses it for good. Raises Unavailable if a retry may work."""


class CallSlot(Slot, Protocol):
    """Slot of a running call, its place among those that may run at once.

    `requests` counts its upstream requests, for the fair share of its project.
    """

    requests: int

    def release(self) -> None:
        """Give up the slot for good; the call continues."""


class Tracer(Protocol):
    """Creates the span of a call, also if none is exported: report and doorbell continue its trace."""

    def span(
        self, name: str, link: TraceLink, attributes: Mapping[str, str], began: float | None = None
    ) -> AbstractContextManager[CallSpan]:
        """Start a child span of the link's parent, at `began` on the monotonic clock, by default now."""
