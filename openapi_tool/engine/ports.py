"""Interfaces (ports) of the engine, which other packages implement."""

from __future__ import annotations

from typing import Protocol

from openapi_tool.engine.call import Call, CallMemory
from openapi_tool.protocol.records import Artifact
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import ToolOutput


class Artifacts(Protocol):
    """Whole texts of truncated results."""

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return at most `chars` characters from `start` of an agent's artifact; None if missing or expired."""


class ToolBackend(Protocol):
    """Implementation of the tools. Raises ToolError for every failure."""

    def call_memory(self, project: str) -> CallMemory:
        """Return the memory of a call of a project, without any reserved yet; only this backend's `run` takes it."""

    def without_unknown(self, definition: ToolDefinition, arguments: Arguments) -> Arguments:
        """Drop arguments that the upstream does not know, if the definition allows the model to give any."""

    async def run(self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call) -> ToolOutput:
        """Send the upstream requests and render the responses."""
