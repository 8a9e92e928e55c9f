"""Which calls may be made: pre-call hooks, then the effective tool set (tool-design section 4).

Both stand before the network, and what they cannot decide is denied.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from openapi_tool.protocol.errors import ToolNotAvailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.definition import ToolDefinition

TAG = "tag:"
HOOKS_GROUP = "openapi_tool.hooks"
"""The entry point group in which a package offers a hook."""

_UNDECIDED = "it could not be checked"

log = logging.getLogger(__name__)


def matches(pattern: str, tool: BuiltInTool) -> bool:
    """Whether `jina.*` is like the canonical name, or `tag:network` one of the tags."""
    if pattern.startswith(TAG):
        return pattern.removeprefix(TAG) in tool.tags
    return fnmatchcase(tool.name, pattern)


def matches_nothing(pattern: str) -> bool:
    """Whether no built-in tool is meant, which is a mistake in whoever wrote the pattern."""
    return not any(matches(pattern, tool) for tool in CATALOGUE.values())


@dataclass(frozen=True, slots=True)
class ToolRules:
    """Patterns of tools: one of `allow` must match, none of `deny` may."""

    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()

    def permit(self, tool: BuiltInTool) -> bool:
        """Whether a tool may be used; deny wins."""
        return _any(self.allow, tool) and not _any(self.deny, tool)


def _any(patterns: Iterable[str], tool: BuiltInTool) -> bool:
    return any(matches(pattern, tool) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for everybody, and those of single projects, which can only take more away."""

    everywhere: ToolRules = ToolRules()
    projects: Mapping[str, ToolRules] = field(default_factory=dict)

    def permits(self, project_id: str, tool: BuiltInTool) -> bool:
        """Whether a tool is in the effective set of a project."""
        return self.everywhere.permit(tool) and self.projects.get(project_id, ToolRules()).permit(tool)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """What a hook is shown: names, owner, and the arguments as they will be used, without secrets.

    `tool` is the canonical name, `tool_name` the project's own. `arguments` is a copy; changing it changes nothing.
    """

    tool: str
    tool_name: str
    tags: frozenset[str]
    project_id: str
    channel_id: str
    agent_id: str
    agent_turn_id: str
    tool_call_id: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Denial:
    """A hook's no. `reason` is written for the model, which reads it."""

    reason: str


Hook = Callable[[PlannedCall], Awaitable[object]]
"""Decides about a call: None lets it pass, a Denial does not; neither does anything else, an error or a long wait."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What every call passes before it is run: hooks in their order, then the policy. `hook_timeout_s` is for each."""

    policy: Policy = Policy()
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    hook_timeout_s: float = 1.0

    async def admit(self, definition: ToolDefinition, identity: CallIdentity, arguments: Arguments) -> None:
        """Let a call pass. Raises ToolNotAvailable."""
        for name, hook in self.hooks.items():
            reason = await self._asked(name, hook, _planned(definition, identity, arguments))
            if reason is not None:
                raise _denied(definition, identity, f"hook {name}", reason)
        if not self.policy.permits(identity.project_id, definition.tool):
            raise _denied(definition, identity, "policy", "it is switched off for this project")

    async def _asked(self, name: str, hook: Hook, call: PlannedCall) -> str | None:
        """Why a hook denies, None where it does not."""
        try:
            async with asyncio.timeout(self.hook_timeout_s):
                verdict = await hook(call)
        except TimeoutError:
            return f"{_UNDECIDED} in time"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the call itself is broken off
            return _UNDECIDED
        except Exception:
            log.exception("a hook failed, so the call is denied", extra={"action": "hook.failed", "hook": name})
            return _UNDECIDED
        if verdict is None:
            return None
        return verdict.reason if isinstance(verdict, Denial) else _UNDECIDED


def _planned(definition: ToolDefinition, identity: CallIdentity, arguments: Arguments) -> PlannedCall:
    return PlannedCall(
        tool=definition.tool.name,
        tool_name=definition.tool_name,
        tags=definition.tool.tags,
        project_id=identity.project_id,
        channel_id=identity.channel_id,
        agent_id=identity.agent_id,
        agent_turn_id=identity.agent_turn_id,
        tool_call_id=identity.tool_call_id,
        arguments=copy.deepcopy(dict(arguments.values)),
    )


def _denied(definition: ToolDefinition, identity: CallIdentity, by: str, reason: str) -> ToolNotAvailable:
    log.warning(
        "a call is denied by %s: %s",
        by,
        reason,
        extra={
            "action": "call.denied",
            "tool": definition.tool.name,
            "tool_name": definition.tool_name,
            "project_id": identity.project_id,
            "agent_id": identity.agent_id,
            "tool_call_id": identity.tool_call_id,
        },
    )
    return ToolNotAvailable(
        f"The tool {definition.tool_name!r} is not available for this call: {reason}. Go on without it."
    )
