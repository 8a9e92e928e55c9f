"""Interfaces (ports) of the engine: `kernel` and `gateway` store artifacts, `jina` is the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from openapi_tool.engine.call import Call, CallMemory
from openapi_tool.protocol.records import Artifact
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import ToolOutput


class Artifacts(Protocol):
    """Artifacts: stored whole texts of results of which the model was shown a part."""

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return at most `chars` characters, from the character `start` on, of the artifact `card_id`.

        Return None if the agent has no such artifact, or none any more.
        """


class ToolBackend(Protocol):
    """Implementation of the built-in tools."""

    def call_memory(self, project: str) -> CallMemory:
        """Return memory for a new call of a project, which holds nothing yet.

        It becomes the `memory` of the call, and only `run` of this backend can use it.
        """

    def without_unknown(self, definition: ToolDefinition, arguments: Arguments) -> Arguments:
        """Return the arguments without those that neither tool nor upstream knows.

        Only a definition that allows any argument (`takes_other_arguments`) lets such arguments through its schema.
        """

    def known_budget(self, definition: ToolDefinition, arguments: Arguments, call: Call) -> Mapping[str, Any] | None:
        """Return what this process knows to be left of the budgets that apply to a call, without asking anybody.

        Return None if it knows of none.
        """

    async def run(self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call) -> ToolOutput:
        """Send the upstream requests of a call and render their responses. Raises ToolError for every failure."""
