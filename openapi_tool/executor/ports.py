"""Interfaces (ports) of the executor, which other packages implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from openapi_tool.call import Call, CallMemory
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.command import Command
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report, TurnCondition, Wakeup
from openapi_tool.protocol.tracing import TraceLink
from openapi_tool.quotas.permits import Slot
from openapi_tool.telemetry.spans import CallSpan
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import ToolOutput

Clock = Callable[[], float]
"""Returns the time of the server that timestamps commands, in seconds since the epoch."""


class Artifacts(Protocol):
    """Whole texts of truncated results."""

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return at most `chars` characters from `start` of an agent's artifact; None if missing or expired."""


class Kernel(Artifacts, Protocol):
    """The kernel's tables. Every method raises Unavailable in an outage."""

    async def load(self, command: Command) -> CallRecords:
        """Load all records of a call in one round trip."""

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Return the age of the step's newest result in seconds, None without one."""

    async def commit(
        self,
        card: Card,
        report: Report,
        artifact: ArtifactCard | None,
        condition: TurnCondition | None,
        *,
        retry: bool = False,
    ) -> bool:
        """Write all rows of a result in one transaction; return False if it was refused.

        `retry` means that an earlier attempt failed. Raises TurnBusy if the `condition` does not hold; None: at once.
        """

    async def report(self, card_id: str, report: Report, condition: TurnCondition | None) -> bool:
        """Write inbox row and edge for an existing result card; otherwise as `commit`."""

    async def is_turn_busy(self, report: Report, quiet_s: float) -> bool:
        """Return whether a commit would raise TurnBusy now."""


class ToolBackend(Protocol):
    """Implementation of the tools. Raises ToolError for every failure."""

    def call_memory(self, project: str) -> CallMemory:
        """Return the memory of a call of a project, without any reserved yet; only this backend's `run` takes it."""

    def without_unknown(self, definition: ToolDefinition, arguments: Arguments) -> Arguments:
        """Drop arguments that the upstream does not know, if the definition allows the model to give any."""

    async def run(self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call) -> ToolOutput:
        """Send the upstream requests and render the responses."""


class ResultStore(Protocol):
    """Temporary records that all executors share. Every method raises Unavailable."""

    async def put(self, name: str, record: bytes) -> None:
        """Store a record."""

    async def get(self, name: str) -> bytes | None:
        """Return a record, None if there is none."""

    async def delete(self, name: str) -> None:
        """Delete a record."""


class Publisher(Protocol):
    """Publisher of doorbells."""

    async def publish(self, wakeup: Wakeup) -> bool:
        """Publish a doorbell; return False if that is impossible. Raises Unavailable if a retry may work."""


class CallSlot(Slot, Protocol):
    """Slot of a running call; `requests` counts its upstream requests, for the fair share of its project."""

    requests: int

    def release(self) -> None:
        """Give up the slot for good; the call continues."""


class Tracer(Protocol):
    """Creates the span of a call, also if none is exported: report and doorbell continue its trace."""

    def span(
        self, name: str, link: TraceLink, attributes: Mapping[str, str], began: float | None = None
    ) -> AbstractContextManager[CallSpan]:
        """Start a child span of the link's parent, at `began` on the monotonic clock, by default now."""
