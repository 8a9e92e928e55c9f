"""Calls of a gateway, whatever its protocol: who calls, which tools, one call from its arguments to its answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Any

import orjson
from cachetools import LRUCache

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.concurrency.keyed_lock import KeyedLock
from openapi_tool.engine.call import Call
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.stored import CANCELLED, CallRow, StoredTexts, UntakenResults, call_key, may_store
from openapi_tool.gateway.tools import GatewayTool, Tools
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.protocol.attempts import attempt_objects
from openapi_tool.protocol.cards import MAX_CONTENT_BYTES, ToolCall, checked_arguments, new_id
from openapi_tool.protocol.errors import (
    BadRequest,
    InternalError,
    NotFound,
    RateLimited,
    ToolNotAvailable,
    Unavailable,
)
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.telemetry.calls import CallFacts, record_finished
from openapi_tool.telemetry.logs import CALL_FIELDS
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.policy import Policy
from openapi_tool.tools.problems import listed
from openapi_tool.tools.result import ResultFields
from openapi_tool.tools.schema import unsuitable_values
from openapi_tool.tools.switches import Switches
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

# After a request for usage its project's next one waits for this many times as long as it took, up to a maximum.
_USAGE_PAUSES = 9
_MAX_USAGE_PAUSE_S = 10.0
_MAX_USAGE_PROJECTS = 10_000  # whose last request for usage is remembered

_ABANDONED_S = 5.0
"""Seconds that a call gets to store its paid result, or to settle its cost, after its client has gone."""


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


@dataclass(slots=True)
class _Slot:
    """Knows whether a call waits for a permit or a retry (`quotas.permits.Slot`)."""

    waits: bool = False

    def pause(self) -> None:
        self.waits = True

    def resume(self) -> None:
        self.waits = False

    def sending(self) -> None:
        """Do nothing: there is no drain."""


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a running call is: items that are done, all items, and whether it waits for a permit or a retry."""

    done: int
    items: int
    waits: bool


@dataclass(slots=True)
class RunningCall:
    """Call from its arguments to its answer."""

    caller: Caller
    tool: GatewayTool
    given: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: new_id("tc_"))
    slot: _Slot = field(default_factory=_Slot)
    call: Call | None = None

    @property
    def progress(self) -> CallProgress:
        """How far it is."""
        listed = self.given.get(self.tool.definition.built_in.list_argument or "")
        items = len(listed) if isinstance(listed, list) and listed else 1
        attempts = self.call.attempts if self.call is not None else ()
        done = sum(attempt.http_status == HTTPStatus.OK and attempt.seconds is not None for attempt in attempts)
        return CallProgress(min(done, items), items, self.slot.waits)

    @property
    def has_received_all(self) -> bool:
        """Return whether something was paid for, and no request is in flight or waits to be sent."""
        if self.call is None or not self.call.attempts or self.slot.waits:
            return False
        return all(attempt.seconds is not None for attempt in self.call.attempts) and self.progress.done > 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a call, with the id by which `inspect` finds it.

    `key` is the name under which it may be stored if nobody takes it, None if it may not. `may_store`: nothing in the
    call says "do not track".
    """

    fields: ResultFields
    call_id: str | None = None
    key: str | None = None
    may_store: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the result beside its text, wherever its `result_format` has it."""
        result = self.fields.result if isinstance(self.fields.result, dict) and not self.fields.error else {}
        return {**(self.fields.tool_output or {}), **result}


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What a gateway works with.

    A call ends after `call_timeout_s`, or its definition's time limit if that is longer; at most `max_timeout_s`.
    """

    runner: ToolRunner
    call_timeout_s: float
    max_timeout_s: float
    executor: ExecutorOptions
    state: GatewayState
    texts: StoredTexts
    untaken: UntakenResults
    budgets: Budgets


class Gateway:
    """Runs calls of any caller. A call whose client is gone ends at once, and its cost is settled."""

    def __init__(self, parts: GatewayParts, tools: Tools, policy: Callable[[], Policy]) -> None:
        self._parts = parts
        self._policy = policy
        self._tools = tools
        self._switches = Switches()
        self._usage_turns = KeyedLock()
        self._usage_after: LRUCache[str, float] = LRUCache(_MAX_USAGE_PROJECTS)
        self._slots = FairSemaphore(parts.executor.concurrency)
        self._tasks: set[asyncio.Task[Any]] = set()

    def use_tools(self, tools: Tools) -> None:
        """Offer these tools from now on; running calls keep their definitions."""
        self._tools = tools

    def use_switches(self, switches: Switches) -> None:
        """Disable these tools for all requests from now on."""
        self._switches = switches
        self._parts.runner.set_switches(switches)

    def tools_of(self, caller: Caller) -> list[GatewayTool]:
        """Return the tools that a caller may use."""
        return [tool for tool in self._tools.values() if self._offers(caller, tool)]

    def may_call(self, caller: Caller, name: str) -> bool:
        """Return whether a caller may call a tool, by its name for clients; also a stored result is for these only."""
        tool = self._tools.get(name)
        with suppress(ToolNotAvailable):
            if tool is not None and self._offers(caller, tool):
                self._switches.check(caller.project_id, tool.definition.tool_name)
                return True
        return False

    def _offers(self, caller: Caller, tool: GatewayTool) -> bool:
        permitted = self._policy().permits_in
        return caller.may_call(tool.name) and permitted(caller.project_id, tool.definition.built_in)

    @property
    def tools(self) -> list[GatewayTool]:
        """All tools, of which a caller may see some."""
        return list(self._tools.values())

    @property
    def running(self) -> int:
        """Number of calls that run or are being stopped."""
        return len(self._tasks)

    async def budget_of(self, caller: Caller) -> list[dict[str, Any]]:
        """Return what is left of each budget of a caller and of its project."""
        call = self._parts.runner.new_call(CallIdentity(caller.project_id, caller.agent_id))
        return await self._parts.budgets.left(call.quota_agent)

    async def usage_of(self, caller: Caller, since: float) -> list[dict[str, Any]]:
        """Return what a caller's calls since a time have cost, by tool. Raises Unavailable.

        Its project's next request then waits for nine times as long as this one took, at most ten seconds: reading many
        rows occupies the state, which all calls need.
        """
        now = asyncio.get_running_loop().time
        async with self._usage_turns.hold(caller.project_id):
            await asyncio.sleep(max(0.0, self._usage_after.get(caller.project_id, 0.0) - now()))
            began = now()
            try:
                return await self._parts.state.rows.by_tool(caller.project_id, caller.agent_id, since)
            finally:
                pause_s = min(_USAGE_PAUSES * (now() - began), _MAX_USAGE_PAUSE_S)
                self._usage_after[caller.project_id] = now() + pause_s

    async def whole_text(self, caller: Caller, answer: Answer, max_chars: int) -> str | None:
        """Return the whole text of a truncated result without frames; None if it is not stored. Raises Unavailable."""
        reference = answer.facts.get("artifact_ref")
        if reference is None:
            return None
        card_id = str(reference["card_id"])
        found = await self._parts.texts.artifact(caller.project_id, caller.agent_id, card_id, 0, max_chars)
        return found.text if found else None

    async def call(
        self,
        caller: Caller,
        name: str,
        arguments: Mapping[str, Any] | None,
        started: Callable[[RunningCall], None] = lambda _: None,
    ) -> Answer:
        """Run a call and return its answer; every failure is one. `started` gets the call before it runs.

        If it is cancelled, the call is stopped in the background.
        """
        tool = self._tools.get(name)
        if tool is None or not self._offers(caller, tool):
            return Answer(self._no_such_tool(caller, name))
        running = RunningCall(caller, tool, arguments or {})
        started(running)
        task = self._begin(self._run(running), f"call {running.id}")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._begin(self._stop(running, task), f"stop {running.id}")
            raise

    async def keep(self, answer: Answer) -> None:
        """Store a paid result that nobody took, for an identical call of the same caller."""
        if answer.key is None:
            return
        try:
            await self._parts.untaken.put(answer.key, answer.fields)
        except Unavailable as outage:
            _log_not_stored("a result that nobody took", outage)

    def keep_soon(self, answer: Answer) -> None:
        """As `keep`, in the background."""
        if answer.key is not None:
            self._begin(self.keep(answer), "untaken result")

    async def aclose(self) -> None:
        """Stop all calls, and wait until their costs are settled and their results stored."""
        while self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=2 * _ABANDONED_S)
            for task in late:
                task.cancel()

    def _begin(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = in_background(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _no_such_tool(self, caller: Caller, name: str) -> ResultFields:
        offered = ", ".join(tool.name for tool in self.tools_of(caller)) or "none"
        missing = NotFound(f"There is no tool named {short(name)!r}; use one of: {short(offered, 1_000)}.")
        nobody = CallIdentity(caller.project_id, caller.agent_id)
        return self._parts.runner.failure_result(self._parts.runner.new_call(nobody), name, missing, time.monotonic())

    async def _run(self, running: RunningCall) -> Answer:
        identity = _identity(running)
        CALL_FIELDS.set(lambda: _ids(identity))
        call = running.call = self._parts.runner.new_call(identity, running.slot)
        definition = running.tool.definition
        key = None  # under which an identical call finds the result
        fields = None
        try:
            with call.memory:
                try:
                    arguments = _checked(running.given)
                    key = call_key(identity, definition, arguments) if may_store(definition, arguments) else None
                    fields = await self._untaken(identity, running.tool, key) or await self._run_in_slot(
                        running, identity, call, arguments
                    )
                except Exception as error:  # noqa: BLE001 - `failure_result` logs a defect
                    fields = self._parts.runner.failure_result(
                        call, definition.tool_name, error, running.began, definition.built_in.name
                    )
        finally:
            await self._record(running, identity, call, fields)
        untaken_as = key if call.spent.tokens and fields.status == "success" else None
        return Answer(fields, running.id, untaken_as, may_store=key is not None)

    async def _run_in_slot(
        self, running: RunningCall, identity: CallIdentity, call: Call, arguments: Mapping[str, Any]
    ) -> ResultFields:
        """Run the call once there is a slot. Raises ToolError."""
        parts = self._parts
        definition = running.tool.definition
        project = running.caller.project_id
        if self._slots.waiting_of(project) >= parts.executor.max_held - self._slots.waiting:
            # A project may wait with as many calls as places are free, so some always are for the others.
            raise RateLimited("Too many calls wait in this gateway; call again in a few seconds, with fewer at a time.")
        deadline = self._deadline(definition)
        async with self._slot(running.caller, deadline):
            try:
                result = await parts.runner.run(call, definition, ToolCall(arguments), deadline)
            except Unavailable as outage:
                log.error("the state cannot be read: %s", outage, extra={"action": "state.unavailable"})  # noqa: TRY400
                raise InternalError(
                    "The stored text cannot be read now; ask for the page itself again, by its url.", retryable=True
                ) from None
        if result.full_text is not None:
            try:
                await parts.texts.put(identity, result.full_text)  # before the model is shown a cursor into it
            except Unavailable as outage:
                _log_not_stored("the whole text of a truncated result", outage)
        return result.fields

    def _deadline(self, definition: ToolDefinition) -> Deadline:
        """Return when a call that begins now must end. `suspend_timeout_seconds` is about a kernel's worker."""
        parts = self._parts
        return Deadline.after(min(max(parts.call_timeout_s, definition.timeout_s or 0.0), parts.max_timeout_s))

    @asynccontextmanager
    async def _slot(self, caller: Caller, deadline: Deadline) -> AsyncIterator[None]:
        """Hold one of the slots of calls. Raises RateLimited if none is free in time."""
        try:
            async with deadline.limit():
                await self._slots.take(caller.project_id, caller.agent_id)
        except TimeoutError:
            raise RateLimited("Too many calls run in this gateway; call again later, with fewer at a time.") from None
        try:
            yield
        finally:
            self._slots.give(caller.project_id)

    async def _untaken(self, identity: CallIdentity, tool: GatewayTool, key: str | None) -> ResultFields | None:
        """Return the result of an identical call that nobody took, if the tool may still be called."""
        if key is None:
            return None
        with suppress(Unavailable, ToolNotAvailable):
            self._switches.check(identity.project_id, tool.definition.tool_name)
            return await self._parts.untaken.get(key)
        return None

    async def _stop(self, running: RunningCall, task: asyncio.Task[Answer]) -> None:
        """Stop a call that nobody waits for. If all that it paid for has arrived, its result is stored first."""
        if not running.has_received_all:
            task.cancel()
        await asyncio.wait([task], timeout=_ABANDONED_S)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await self.keep(task.result())

    async def _record(
        self, running: RunningCall, identity: CallIdentity, call: Call, fields: ResultFields | None
    ) -> None:
        """Log and count a call, and store its row."""
        tool_output = (fields.tool_output if fields else None) or {}
        row = CallRow(
            at=time.time() - (time.monotonic() - running.began),
            tool_call_id=running.id,
            project=identity.project_id,
            agent=identity.agent_id,
            session=tool_output.get("session"),
            tool=running.tool.definition.tool_name,
            status=fields.status if fields else CANCELLED,
            error=fields.error if fields else None,
            tokens=call.spent.tokens,
            requests=call.spent.requests,
            cached=bool(fields and fields.cached),
            truncated=bool(fields and fields.truncated),
            retries=sum(attempt.resends > 0 for attempt in call.attempts),
            latency_ms=round((time.monotonic() - running.began) * 1000),
            attempts=attempt_objects(call.attempts),
        )
        record_finished(_facts(running, identity, call, row, fields))
        try:
            await asyncio.shield(self._parts.state.rows.store(row))
        except Unavailable as outage:
            _log_not_stored("the row of a call", outage)


def _checked(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's arguments, of bounded size. Raises BadRequest."""
    checked = checked_arguments(arguments)  # first: their number and depth bound the work of the next line
    if unsuitable := unsuitable_values(checked):
        raise BadRequest(f"Correct these and call again: {'; '.join(listed(unsuitable))}.")
    size = len(orjson.dumps(checked))
    if size > MAX_CONTENT_BYTES:
        raise BadRequest(f"The tool call's arguments are larger than {MAX_CONTENT_BYTES:,} bytes; call with less.")
    return checked


def _identity(running: RunningCall) -> CallIdentity:
    caller = running.caller
    return CallIdentity(
        caller.project_id,
        caller.agent_id,
        channel_id="gateway",
        agent_turn_id=running.id,
        turn_epoch=1,
        tool_call_id=running.id,
        step_id=running.id,
        trace_id=secrets.token_hex(16),
    )


def _ids(identity: CallIdentity) -> dict[str, str]:
    names = ("project_id", "agent_id", "tool_call_id", "trace_id")
    return {name: getattr(identity, name) or "" for name in names}


def _facts(
    running: RunningCall, identity: CallIdentity, call: Call, row: CallRow, fields: ResultFields | None
) -> CallFacts:
    return CallFacts(
        ids=_ids(identity),
        trace_id=identity.trace_id or "",
        protocol="gateway",
        function_name=short(running.tool.definition.tool_name),
        delivery_attempt=1,
        age_s=0.0,
        began=running.began,
        loaded=running.began,
        tool=running.tool.definition.built_in.name,
        status=row.status,
        error_code=fields.error_code if fields else CANCELLED,
        tokens=row.tokens,
        attempts=call.attempts,
        permit_waits=call.permit_waits,
        cached=row.cached,
        truncated=row.truncated,
    )


def _log_not_stored(what: str, outage: Unavailable) -> None:
    log.error("cannot store %s: %s", what, outage, extra={"action": "state.not_stored"})
