"""Authorization of calls (hooks, allowed tools, disabled tools; tool-design section 4), and their deadlines."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

import orjson
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import NoDecode

from openapi_tool.options import ExecutorOptions, Options, ToolOptions, split
from openapi_tool.protocol import frozen
from openapi_tool.protocol.errors import ToolNotAvailable
from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.tools.arguments import Arguments, CallOwner
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.problems import short

TAG = "tag:"
HOOKS_GROUP = "openapi_tool.hooks"

_UNDECIDED = "it could not be checked"

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
        return any(_matches(pattern, tool) for pattern in self.allow) and not any(
            _matches(pattern, tool) for pattern in self.deny
        )


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
    """Denial by a hook. The model reads `reason`."""

    reason: str


Hook = Callable[[PlannedCall], Awaitable[object]]
"""Pre-call hook. None allows the call; any other value, an exception or a timeout denies it."""


@dataclass(frozen=True, slots=True)
class Authorizer:
    """Runs `hooks` in order, each within `policy.hook_timeout_s`, then applies the policy."""

    policy: Policy = field(default_factory=Policy)
    hooks: Mapping[str, Hook] = field(default_factory=dict)

    async def authorize(self, definition: ToolDefinition, owner: CallOwner, arguments: Arguments) -> None:
        """Raise ToolNotAvailable if a hook or the policy denies the call."""
        for name, hook in self.hooks.items():
            reason = await self._run(name, hook, _planned(definition, owner, arguments))
            if reason is not None:
                raise _denied(definition, owner, f"hook {name}", reason)
        if not self.policy.permits_in(owner.project_id, definition.built_in):
            raise _denied(definition, owner, "policy", "it is switched off for this project")

    async def _run(self, name: str, hook: Hook, call: PlannedCall) -> str | None:
        try:
            async with asyncio.timeout(self.policy.hook_timeout_s):
                verdict = await hook(call)
        except TimeoutError:
            return f"{_UNDECIDED} in time"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the call itself is cancelled; otherwise only a task that the hook awaited was
            return _UNDECIDED
        except Exception:
            log.exception("hook failed; call denied", extra={"action": "hook.failed", "hook": name})
            return _UNDECIDED
        if verdict is None:
            return None
        return verdict.reason if isinstance(verdict, Denial) else _UNDECIDED


def _planned(definition: ToolDefinition, owner: CallOwner, arguments: Arguments) -> PlannedCall:
    return PlannedCall(
        tool=definition.built_in.name,
        tool_name=definition.tool_name,
        tags=definition.built_in.tags,
        project_id=owner.project_id,
        channel_id=owner.ids.get("channel_id") or "",
        agent_id=owner.agent_id,
        agent_turn_id=owner.ids.get("agent_turn_id") or "",
        tool_call_id=owner.ids.get("tool_call_id") or "",
        arguments=copy.deepcopy(dict(arguments.values)),
    )


def _denied(definition: ToolDefinition, owner: CallOwner, by: str, reason: str) -> ToolNotAvailable:
    log.warning(
        "call denied by %s: %s",
        by,
        reason,
        extra={
            "action": "call.denied",
            "tool": definition.built_in.name,
            "tool_name": short(definition.tool_name),
            "project_id": short(owner.project_id),
            "agent_id": short(owner.agent_id),
            "tool_call_id": short(owner.ids.get("tool_call_id") or ""),
        },
    )
    return ToolNotAvailable(
        f"The tool {short(definition.tool_name)!r} is not available for this call: {reason}. Continue without it."
    )


ALL = "*"
MAX_SWITCHES = 1_000
_MAX_ENABLINGS = 20
MAX_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class Switch:
    """Record that an operator disabled or enabled a tool; `ALL` as project or tool means every one.

    `by` is the operator, `at` the time in ISO 8601, UTC.
    """

    project_id: str
    tool_name: str
    reason: str
    by: str
    at: str

    @property
    def scope(self) -> tuple[str, str]:
        """Project and tool."""
        return self.project_id, self.tool_name


class SwitchRecordInvalid(Exception):
    """The stored record is not a record of switches."""


class Switches:
    """Disabled tools, one switch per scope.

    `enablings` are the last records of enabling: replicas log from them who enabled a tool.
    """

    def __init__(self, switches: Iterable[Switch] = (), enablings: Iterable[Switch] = ()) -> None:
        self._by_scope: Mapping[tuple[str, str], Switch] = {switch.scope: switch for switch in switches}
        self.enablings = tuple(enablings)[-_MAX_ENABLINGS:]

    @classmethod
    def decode(cls, record: bytes) -> Switches:
        """Decode a stored record. Raises SwitchRecordInvalid."""
        try:
            stored = orjson.loads(record)
            return cls(map(_switch, stored["disabled"]), map(_switch, stored["enabled"]))
        except (ValueError, TypeError, KeyError) as error:
            raise SwitchRecordInvalid(f"it is not a record of disabled tools: {type(error).__name__}") from error

    def encode(self) -> bytes:
        """Return the record to store."""
        enabled = [asdict(switch) for switch in self.enablings]
        return orjson.dumps({"version": 1, "disabled": [asdict(switch) for switch in self.all], "enabled": enabled})

    @property
    def all(self) -> list[Switch]:
        """All switches, by project and tool."""
        return [self._by_scope[scope] for scope in sorted(self._by_scope)]

    def check(self, project_id: str, tool_name: str) -> None:
        """Raise ToolNotAvailable if a tool is disabled for a project."""
        if not self._by_scope:
            return
        for scope in ((project_id, tool_name), (project_id, ALL), (ALL, tool_name), (ALL, ALL)):
            if (switch := self._by_scope.get(scope)) is not None:
                raise ToolNotAvailable(
                    f"An operator disabled this tool: {switch.reason} Do not call it again; continue without it."
                )

    def with_disabled(self, switch: Switch) -> Switches:
        """Return the set with `switch`, which replaces that of the same scope."""
        return Switches({**self._by_scope, switch.scope: switch}.values(), self.enablings)

    def with_enabled(self, switch: Switch) -> Switches:
        """Return the set without the switch of the same scope; the same set if there is none."""
        if switch.scope not in self._by_scope:
            return self
        return Switches((each for each in self.all if each.scope != switch.scope), (*self.enablings, switch))


def _switch(row: Mapping[str, object]) -> Switch:
    return Switch(**{name: str(row[name]) for name in ("project_id", "tool_name", "reason", "by", "at")})


_OTHER_STEPS_S = 30.0  # lease, rendering, doorbell, …; their limits are a few seconds each


class TurnLimit:
    """Limit of a running call by its turn, on the monotonic clock; infinite until `shorten`.

    `executor/waiting_turn.py` shortens it once it finds that the turn ends before the call's deadline.
    """

    def __init__(self) -> None:
        self.at = float("inf")
        self._waits: list[asyncio.Timeout] = []

    def shorten(self, at: float) -> None:
        """Bring the limit forward to `at`, also for waits in progress."""
        self.at = min(self.at, at)
        loop = asyncio.get_running_loop()
        when = loop.time() + self.at - time.monotonic()  # on the loop's clock
        for timeout in self._waits:
            before = timeout.when()
            if before is None or before > when:
                with suppress(RuntimeError):  # the timeout has ended
                    timeout.reschedule(when)

    def watch(self, timeout: asyncio.Timeout) -> None:
        """Register a timeout for `shorten` to reschedule. It stays registered after its end; a call has few."""
        self._waits.append(timeout)


@frozen
class Deadline:
    """Deadline of a call on the monotonic clock; `turn` may bring it forward while the call runs."""

    at: float
    turn: TurnLimit | None = None

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        at = self.at if self.turn is None else min(self.at, self.turn.at)
        return max(0.0, at - time.monotonic())

    def limit(self) -> asyncio.Timeout:
        """Return a context that raises TimeoutError at the deadline."""
        timeout = asyncio.timeout(self.remaining())
        if self.turn is not None:
            self.turn.watch(timeout)
        return timeout

    def shortened(self, seconds: float | None) -> Deadline:
        """Return the earlier of this deadline and `seconds` from now."""
        return self if seconds is None else Deadline(min(self.at, time.monotonic() + seconds), self.turn)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a call by the settings."""

    executor: ExecutorOptions
    tools: ToolOptions

    def worker_waits_s(self, suspend_timeout_s: float | None) -> float:
        """Return for how long a worker waits from the command's arrival on."""
        return max(self.executor.worker_timeout_s, suspend_timeout_s or 0.0)

    def may_outlast_worker_timeout(self, suspend_timeout_s: float | None) -> bool:
        """Return whether a call may outlast `executor.worker_timeout_s`, the worker's least wait."""
        return suspend_timeout_s is not None and suspend_timeout_s > self.executor.worker_timeout_s

    def worker_timeout_left_s(self, age_s: float) -> float:
        """Return what is left of `worker_timeout_s`, which began `age_s` ago, minus `commit_margin_s`."""
        return self.executor.worker_timeout_s - self.executor.commit_margin_s - age_s

    def deadline(self, age_s: float, suspend_timeout_s: float | None, timeout_s: float | None = None) -> Deadline:
        """Return the deadline, perhaps passed, of a call whose command arrived in the stream `age_s` seconds ago.

        `suspend_timeout_s` and `timeout_s` are the definition's; without both `tools.default_timeout_s` applies. The
        limit `timeout_s` itself is not part of this deadline: it begins with the upstream's part (`jina/backend.py`).
        """
        wait_s = self.worker_waits_s(suspend_timeout_s) - self.executor.commit_margin_s
        left_s = min(wait_s, self.tools.max_timeout_s) - max(0.0, age_s)
        unlimited = suspend_timeout_s is None and timeout_s is None
        return Deadline.after(left_s).shortened(self.tools.default_timeout_s if unlimited else None)


def longest_call_s(limits: TimeLimits, authorizer: Authorizer, statement_s: float) -> float:
    """Return the seconds after which a call that still runs is a defect: the sum of the limits of its steps.

    `statement_s` limits each database connection and statement. A call has at most eight: two each for load, commit,
    last retry of the commit, and reload after a commit that wrote nothing.
    """
    hooks_s = len(authorizer.hooks) * authorizer.policy.hook_timeout_s
    commit_s = limits.executor.commit_retry_timeout_s
    return hooks_s + limits.tools.max_timeout_s + commit_s + 8 * statement_s + _OTHER_STEPS_S
