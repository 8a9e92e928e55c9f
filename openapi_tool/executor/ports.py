"""Interfaces (ports) of the executor, which other packages implement; ids of a call for its log lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from openapi_tool.budgets.budgets import Charge
from openapi_tool.limits.permits import Slot
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.command import Command, Report, Wakeup
from openapi_tool.protocol.identity import CallIdentity, SpanContext, TraceLink
from openapi_tool.protocol.records import Artifact, Attempt, CallRecords
from openapi_tool.telemetry.calls import CallFacts
from openapi_tool.tools.arguments import Arguments, CallOwner
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.policy import Deadline
from openapi_tool.tools.problems import short
from openapi_tool.tools.result import ToolOutput, Usage


class CallContext(Protocol):
    """State of one call, and the memory reserved for it from its first upstream response until its commit.

    Its requests wait for permits as `agent` and with `slot`, and are charged to `budget`, if any. `recheck`, if any,
    raises ToolError once the call may send no further request.
    """

    agent: str
    slot: Slot
    budget: Charge | None
    recheck: Callable[[], None] | None

    @property
    def spent(self) -> Usage:
        """Upstream cost of the call so far, including failed requests."""

    @property
    def attempts(self) -> Sequence[Attempt]:
        """Upstream requests of the call so far, in the order in which they were sent."""

    @property
    def permit_waits(self) -> Sequence[tuple[float, float]]:
        """Begins and ends of waits for a permit of the rate limit, on the monotonic clock in seconds."""

    def __enter__(self) -> Self:
        """Enter the context; may be nested."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release all memory on the last exit."""

    def release_all_but(self, size: int) -> None:
        """Release all but `size` bytes."""


ContextT = TypeVar("ContextT", bound=CallContext)


class Artifacts(Protocol):
    """Whole texts of truncated results."""

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return at most `chars` characters from `start` of an agent's artifact; None if missing or expired."""


class Kernel(Artifacts, Protocol):
    """The kernel's tables. Every method raises Unavailable while the database is unavailable."""

    async def load(self, command: Command) -> CallRecords:
        """Load all records of a call in one round trip."""

    async def last_result_age_s(self, project_id: str, agent_turn_id: str, step_id: str) -> float | None:
        """Return the age of the step's newest result in seconds, None without one."""

    async def commit(self, card: Card, report: Report, artifact: ArtifactCard | None, *, retry: bool = False) -> bool:
        """Write result card, artifact, inbox row and edge in one transaction; return False if nothing was written.

        `retry` means that an earlier attempt to write the same result failed.
        """

    async def report(self, card_id: str, report: Report) -> bool:
        """Write inbox row and edge for an existing result card."""


class ToolBackend(Protocol[ContextT]):
    """Implementation of the tools. Raises ToolError for every failure."""

    def call_context(self, project_id: str) -> ContextT:
        """Return a context for a call of this project."""

    async def run(
        self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, context: ContextT
    ) -> ToolOutput:
        """Send the upstream requests and render the responses, within `context`."""


class ResultStore(Protocol):
    """Temporary record store that all executors share. Every method raises Unavailable."""

    async def put(self, name: str, record: bytes) -> None:
        """Store a record under a name."""

    async def get(self, name: str) -> bytes | None:
        """Return the record of a name, None if there is none."""

    async def delete(self, name: str) -> None:
        """Delete a record."""


class Publisher(Protocol):
    """Publisher of doorbells."""

    async def publish(self, wakeup: Wakeup) -> bool:
        """Publish a doorbell; return False if that is impossible. Raises Unavailable if a retry may work."""


class Slots(Protocol):
    """Slots of the running calls."""

    def release(self, sequence: int) -> None:
        """Give up the slot of a running call, by its command's sequence in the stream; the call continues."""

    def charge(self, sequence: int, requests: int) -> None:
        """Record the number of upstream requests of a running call, for the fair share of its project."""

    def of(self, sequence: int) -> Slot:
        """Return the slot of a running call."""


class Clock(Protocol):
    """Clock of the server that timestamps commands."""

    def time(self) -> float:
        """Return seconds since the epoch."""


class Span(Protocol):
    """Span of one call; its report and doorbell continue its trace."""

    @property
    def context(self) -> SpanContext:
        """Span context for the new traceparent."""

    @property
    def tracestate(self) -> str | None:
        """Vendor state, passed through unchanged."""

    facts: CallFacts | None
    """Facts for the exported span; filled while the call runs."""


class Tracer(Protocol):
    """Creates the span of a call, whether or not spans are exported."""

    def span(self, name: str, link: TraceLink, attributes: Mapping[str, str]) -> AbstractContextManager[Span]:
        """Start a child span of the link's parent."""


_ID_NAMES = ("project_id", "agent_id", "agent_turn_id", "tool_call_id")
_SHOWN_ID_CHARS = 128
"""Limit of an id in a log line. A tool call id has any length, and JSON may need six bytes per character."""


def ids(identity: CallIdentity) -> dict[str, Any]:
    """Return the ids for log lines and spans of a call, each truncated to 128 characters."""
    return {name: short(getattr(identity, name), _SHOWN_ID_CHARS) for name in _ID_NAMES}


def owner_ids(owner: CallOwner) -> dict[str, Any]:
    """Return the same ids for a call from any front end, without those that it does not have."""
    return {name: short(value, _SHOWN_ID_CHARS) for name in _ID_NAMES if (value := owner.ids.get(name)) is not None}
