"""Who calls a gateway, and which tools it may call."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: budgets, cursors and stored texts belong to a project and its agent.

    `tools` are patterns of the names that it may call, within the policy of its project.
    """

    project_id: str
    agent_id: str
    tools: tuple[str, ...] = ("*",)

    def may_call(self, name: str) -> bool:
        """Return whether a tool of this name may be called."""
        return any(fnmatchcase(name, pattern) for pattern in self.tools)
