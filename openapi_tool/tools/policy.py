"""Authorization of calls: whether an agent may call a tool now (tool-design section 4).

The operator decides with a *policy* in the settings, which says which tools each project may use, and with *hooks*,
functions of his own that are asked before each call. A policy names tools by their *canonical names*, those of the
built-in tools: `jina.search`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import NoDecode

from openapi_tool.options.section import Options, split
from openapi_tool.protocol.errors import ToolNotAvailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsontext import JsonValue, storable_text
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.wording import short

TAG = "tag:"
HOOKS_GROUP = "openapi_tool.hooks"

MAX_REASON_CHARS = 1_000

# Reasons that the model reads if a hook fails.
_UNDECIDED = "it could not be checked"
_LATE = f"{_UNDECIDED} in time"

log = logging.getLogger(__name__)


def _matches(pattern: str, tool: BuiltInTool) -> bool:
    """Return whether a pattern matches the canonical name (`jina.*`) or a tag (`tag:network`)."""
    if pattern.startswith(TAG):
        return pattern.removeprefix(TAG) in tool.tags
    return fnmatchcase(tool.name, pattern)


def _matches_a_tool(pattern: str) -> str:
    if not any(_matches(pattern, tool) for tool in CATALOGUE.values()):
        raise ValueError("matches no tool; use canonical names such as jina.search or jina.*, or tag:read")
    return pattern


ToolPattern = Annotated[str, AfterValidator(_matches_a_tool)]


@validated(frozen=True)
class ToolRules(Options):
    """Tools that one project may use."""

    allow: Annotated[
        tuple[ToolPattern, ...], Field(description="Patterns of canonical names, or `tag:` and a tag.")
    ] = ("*",)
    deny: Annotated[tuple[ToolPattern, ...], Field(description="The same; deny wins.")] = ()

    def permits(self, tool: BuiltInTool) -> bool:
        """Return whether a tool is permitted."""
        is_denied = any(_matches(pattern, tool) for pattern in self.deny)
        return not is_denied and any(_matches(pattern, tool) for pattern in self.allow)


@validated(frozen=True)
class Policy(ToolRules):
    """Authorization of calls: hooks first, then patterns of canonical names and tags."""

    allow: Annotated[
        tuple[ToolPattern, ...],
        NoDecode,
        BeforeValidator(split),
        Field(description="Tools that may be used: `jina.*`, `tag:search`; comma-separated in the environment."),
    ] = ("*",)
    deny: Annotated[
        tuple[ToolPattern, ...],
        NoDecode,
        BeforeValidator(split),
        Field(description="Tools that may not be used; wins over `allow`."),
    ] = ()
    projects: Annotated[
        dict[str, ToolRules],
        Field(description="`allow` and `deny` of single projects, which can only restrict further."),
    ] = field(default_factory=dict)
    hooks: Annotated[
        tuple[str, ...],
        NoDecode,
        BeforeValidator(split),
        Field(description="Entry points of the group `openapi_tool.hooks` that every call passes, in this order."),
    ] = ()
    hook_timeout_s: Annotated[
        float, Field(ge=0.001, le=30, description="Time limit of each hook in seconds; a slower hook denies.")
    ] = 1

    def permits_in(self, project_id: str, tool: BuiltInTool) -> bool:
        """Return whether the general rules and the project's own, if any, permit a tool."""
        rules = self.projects.get(project_id)
        return self.permits(tool) and (rules is None or rules.permits(tool))


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """Call as shown to a hook, without secrets; `tool` is the canonical name, `tool_name` the project's own.

    An id that the call does not have is empty. `arguments` is a deep copy, so a hook cannot change the call.
    """

    tool: str
    tool_name: str
    tags: frozenset[str]
    project_id: str
    channel_id: str
    agent_id: str
    agent_turn_id: str
    tool_call_id: str
    arguments: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Denial:
    """Denial by a hook. The model reads the first MAX_REASON_CHARS of `reason`."""

    reason: str


Hook = Callable[[PlannedCall], Awaitable[object]]
"""Pre-call hook. None allows the call; any other value, an exception or a timeout denies it."""


@dataclass(frozen=True, slots=True)
class Authorizer:
    """Runs `hooks` in order, each within `policy.hook_timeout_s`, then applies the policy."""

    policy: Policy = field(default_factory=Policy)
    hooks: Mapping[str, Hook] = field(default_factory=dict)

    async def authorize(self, definition: ToolDefinition, identity: CallIdentity, arguments: Arguments) -> None:
        """Raise ToolNotAvailable if a hook or the policy denies the call."""
        for name, hook in self.hooks.items():
            reason = await self._reason_to_deny(name, hook, _planned(definition, identity, arguments))
            if reason is not None:
                raise _denied(definition, identity, f"hook {name}", reason)
        if not self.policy.permits_in(identity.project_id, definition.built_in):
            raise _denied(definition, identity, "policy", "it is switched off for this project")

    async def _reason_to_deny(self, name: str, hook: Hook, call: PlannedCall) -> str | None:
        """Return why a hook denies a call, None if it allows it. Anything but None, returned in time, denies."""
        task = asyncio.current_task()
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.policy.hook_timeout_s):
                verdict = await hook(call)
        except TimeoutError:
            return _LATE
        except asyncio.CancelledError:
            if _is_cancelled(task):
                raise
            return _UNDECIDED  # only a task that the hook awaited was cancelled
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit, for example, must not end the executor
            log.exception("hook failed; call denied", extra={"action": "hook.failed", "hook": name})
            return _UNDECIDED
        if _is_cancelled(task):
            raise asyncio.CancelledError  # which the hook has suppressed
        if time.monotonic() - started > self.policy.hook_timeout_s:  # it blocked the loop, or suppressed the timeout
            return _LATE
        if verdict is None:
            return None
        return _shown_reason(verdict) if isinstance(verdict, Denial) else _UNDECIDED


def _is_cancelled(task: asyncio.Task[object] | None) -> bool:
    """Return whether the call itself is cancelled."""
    return task is None or task.cancelling() > 0


def _shown_reason(denial: Denial) -> str:
    """Return the reason of a denial for the model."""
    reason: object = denial.reason  # whatever the hook has passed
    text = storable_text(reason).strip() if isinstance(reason, str) else ""
    return short(text, MAX_REASON_CHARS) or "no reason was given"


def _planned(definition: ToolDefinition, identity: CallIdentity, arguments: Arguments) -> PlannedCall:
    return PlannedCall(
        tool=definition.built_in.name,
        tool_name=definition.tool_name,
        tags=definition.built_in.tags,
        project_id=identity.project_id,
        channel_id=identity.channel_id,
        agent_id=identity.agent_id,
        agent_turn_id=identity.agent_turn_id,
        tool_call_id=identity.tool_call_id,
        arguments=copy.deepcopy(dict(arguments.values)),
    )


def _denied(definition: ToolDefinition, identity: CallIdentity, by: str, reason: str) -> ToolNotAvailable:
    log.warning(
        "call denied by %s: %s",
        by,
        reason,
        extra={
            "action": "call.denied",
            "tool": definition.built_in.name,
            "tool_name": short(definition.tool_name),
        }
        | log_ids(identity),
    )
    return ToolNotAvailable(
        f"The tool {short(definition.tool_name)!r} is not available for this call: {reason}. Continue without it."
    )
