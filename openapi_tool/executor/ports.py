"""What the executor needs from the other rooms, and nothing of how they do it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.records import Artifact, CallKey, CallRecords
from openapi_tool.protocol.report import Report
from openapi_tool.protocol.trace import SpanContext, TraceLink
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.result import ToolOutput


class Memory(Protocol):
    """Memory that a call holds, from its first answer until its result is committed."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give everything back."""

    def keep(self, size: int) -> None:
        """Hold at most `size` bytes from now on."""


CallMemory = TypeVar("CallMemory", bound=Memory)


class Kernel(Protocol):
    """The kernel's tables. Every method raises Unavailable while they are away."""

    async def load(self, key: CallKey) -> CallRecords:
        """Everything that is known of a call, in one round trip."""

    async def commit(self, card: Card, report: Report, artifact: ArtifactCard | None) -> bool:
        """Write result card, artifact, inbox row and edge in one transaction; False if nothing was written."""

    async def report(self, card_id: str, report: Report) -> bool:
        """Write inbox row and edge for a result card that is already there."""

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """At most `chars` characters from `start` of an agent's artifact; None where there is no such, or no more."""


class Tools(Protocol[CallMemory]):
    """Whatever runs a call. Raises ToolError for every failure."""

    def memory(self) -> CallMemory:
        """What a call will hold."""

    async def run(
        self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, memory: CallMemory
    ) -> ToolOutput:
        """Ask the upstream and render its answer within `memory`."""


class Bell(Protocol):
    """The doorbell of a waiting worker."""

    async def ring(self, project_id: str, worker_target: str, context_headers: Mapping[str, Any]) -> bool:
        """Wake the worker; False when that is impossible. Raises Unavailable when it can be tried again."""


class Span(Protocol):
    """The span of one call, which its report and doorbell carry on."""

    @property
    def context(self) -> SpanContext:
        """The identity that goes into the new traceparent."""

    @property
    def tracestate(self) -> str | None:
        """Vendor state that passes through."""

    def outcome(self, status: str, error_code: str | None) -> None:
        """Note how the call ended."""


class Tracer(Protocol):
    """Makes the span of a call, whether or not anything is exported."""

    def span(self, name: str, link: TraceLink, attributes: Mapping[str, str]) -> AbstractContextManager[Span]:
        """A child of the link's parent."""
