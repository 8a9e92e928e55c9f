"""The gateway: it offers tools to callers and runs their calls, whatever the protocol of the door.

`call` has the data of one call, `assembly` builds a gateway, and `mcp` and `http` are its doors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import orjson

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.gateway.call import Answer, Caller, RunningCall, WaitRecord
from openapi_tool.gateway.finished import facts_of, ids_of, row_of
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.stored import StoredTexts, UntakenResults, call_key, may_store
from openapi_tool.gateway.tools import GatewayTool, Tools
from openapi_tool.gateway.usage_requests import UsageRequests
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.protocol.cards import MAX_CONTENT_BYTES, ToolCall, checked_arguments
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
from openapi_tool.telemetry.calls import record_finished
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

_ABANDONED_S = 5.0
"""Seconds that a call gets to store its paid result, or to settle its cost, after its client has gone."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What a gateway works with.

    - `call_timeout_s`: after so many seconds a call ends, unless its definition has a longer time limit.
    - `max_timeout_s`: after so many seconds any call ends.
    - `texts`: whole texts of truncated results.
    - `untaken`: paid results that no client took.
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
    """Runs calls of any caller. A call whose client is gone ends soon, and its cost is settled.

    `policy` returns the policy that is valid now: it may be reloaded.
    """

    def __init__(self, parts: GatewayParts, tools: Tools, policy: Callable[[], Policy]) -> None:
        self._parts = parts
        self._policy = policy
        self._tools = tools
        self._switches = Switches()
        self._usage = UsageRequests(parts.state.rows)
        self._slots = FairSemaphore(parts.executor.concurrency)  # each running call holds one
        self._tasks: set[asyncio.Task[Any]] = set()  # that run a call, stop one, or store an untaken result

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
        """Return whether a caller may call the tool that clients know by this name.

        A door asks this before it hands out the stored result of an earlier request.
        """
        tool = self._tools.get(name)
        with suppress(ToolNotAvailable):
            if tool is not None and self._offers(caller, tool):
                self._switches.check(caller.project_id, tool.definition.tool_name)
                return True
        return False

    def _offers(self, caller: Caller, tool: GatewayTool) -> bool:
        """Return whether token and policy permit the tool; an operator may have disabled it still."""
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
        """Return what a caller's calls have cost since a time in seconds since the epoch, by tool. Raises Unavailable.

        The more often a project asks, the longer it waits (`UsageRequests`).
        """
        return await self._usage.by_tool(caller, since)

    async def whole_text(self, caller: Caller, answer: Answer, max_chars: int) -> str | None:
        """Return the whole text of a truncated result, at most `max_chars` of it; None if the text is not stored.

        The text is without the frames that mark web content for a model. Raises Unavailable.
        """
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
        """Run a call and return its answer; a failed call is answered, too. `started` gets the call before it runs.

        If this method is cancelled, the call is stopped in the background.
        """
        tool = self._tools.get(name)
        if tool is None or not self._offers(caller, tool):
            return Answer(self._no_such_tool(caller, name))
        wait = WaitRecord()
        call = self._parts.runner.new_call(caller.new_identity(), wait)
        running = RunningCall(caller, tool, arguments or {}, call, wait)
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
        runner = self._parts.runner
        call = runner.new_call(CallIdentity(caller.project_id, caller.agent_id))
        return runner.failure_result(call, name, missing, time.monotonic())

    async def _run(self, running: RunningCall) -> Answer:
        """Run a call and record it, also if it is cancelled."""
        call = running.call
        CALL_FIELDS.set(lambda: ids_of(call.identity))
        finished = None
        try:
            with call.memory:
                finished = await self._finished(running)
        finally:
            await self._record(running, None if finished is None else finished.fields)
        is_paid_for = call.spent.tokens > 0 and finished.fields.status == "success"
        key = finished.key
        return Answer(finished.fields, running.id, key if is_paid_for else None, may_store=key is not None)

    async def _finished(self, running: RunningCall) -> _Finished:
        """Return the result of a call, also of a failed one."""
        call = running.call
        definition = running.tool.definition
        key = None
        try:
            arguments = _checked(running.given)
            key = call_key(call.identity, definition, arguments) if may_store(definition, arguments) else None
            fields = await self._untaken(running, key) or await self._run_in_slot(running, arguments)
        except Exception as error:  # noqa: BLE001 - `failure_result` logs a defect
            fields = self._parts.runner.failure_result(
                call, definition.tool_name, error, running.began, definition.built_in.name
            )
        return _Finished(fields, key)

    async def _untaken(self, running: RunningCall, key: str | None) -> ResultFields | None:
        """Return the result of an identical call that nobody took, if the tool may still be called."""
        if key is None:
            return None
        with suppress(Unavailable, ToolNotAvailable):
            self._switches.check(running.caller.project_id, running.tool.definition.tool_name)
            return await self._parts.untaken.get(key)
        return None

    async def _run_in_slot(self, running: RunningCall, arguments: Mapping[str, Any]) -> ResultFields:
        """Run the call once there is a slot. Raises ToolError."""
        parts = self._parts
        definition = running.tool.definition
        project = running.caller.project_id
        if self._slots.waiting_of(project) >= parts.executor.max_held - self._slots.waiting:
            # `max_held` calls may wait. Of a project at most as many wait as places are free: some stay for others.
            raise RateLimited("Too many calls wait in this gateway; call again in a few seconds, with fewer at a time.")
        deadline = self._deadline(definition)
        async with self._slot(running.caller, deadline):
            try:
                result = await parts.runner.run(running.call, definition, ToolCall(arguments), deadline)
            except Unavailable as outage:
                log.error("the state cannot be read: %s", outage, extra={"action": "state.unavailable"})  # noqa: TRY400
                raise InternalError(
                    "The stored text cannot be read now; ask for the page itself again, by its url.", retryable=True
                ) from None
        if result.full_text is not None:
            try:
                # Before the model is shown a cursor into the text.
                await parts.texts.put(running.call.identity, result.full_text)
            except Unavailable as outage:
                _log_not_stored("the whole text of a truncated result", outage)
        return result.fields

    def _deadline(self, definition: ToolDefinition) -> Deadline:
        """Return when a call that begins now must end.

        The definition's `suspend_timeout_seconds` does not count: it says how long a kernel's worker waits.
        """
        parts = self._parts
        wanted_s = max(parts.call_timeout_s, definition.timeout_s or 0.0)
        return Deadline.after(min(wanted_s, parts.max_timeout_s))

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

    async def _stop(self, running: RunningCall, task: asyncio.Task[Answer]) -> None:
        """Stop a call that nobody waits for. If all that it paid for has arrived, it may finish, and is stored."""
        if not running.has_received_all:
            task.cancel()
        await asyncio.wait([task], timeout=_ABANDONED_S)
        task.cancel()  # of no effect on a task that has ended
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await self.keep(task.result())

    async def _record(self, running: RunningCall, fields: ResultFields | None) -> None:
        """Log and count a call, and store its row; `fields` is None if the call was cancelled."""
        row = row_of(running, fields)
        record_finished(facts_of(running, row, fields))
        try:
            await asyncio.shield(self._parts.state.rows.store(row))
        except Unavailable as outage:
            _log_not_stored("the row of a call", outage)


@dataclass(frozen=True, slots=True)
class _Finished:
    """Result of a call, and the name by which an identical call finds it; None if it must not be stored."""

    fields: ResultFields
    key: str | None


def _checked(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's arguments, of bounded size. Raises BadRequest."""
    checked = checked_arguments(arguments)  # first: it bounds number and depth, and so the work of the next check
    if unsuitable := unsuitable_values(checked):
        raise BadRequest(f"Correct these and call again: {'; '.join(listed(unsuitable))}.")
    size = len(orjson.dumps(checked))
    if size > MAX_CONTENT_BYTES:
        raise BadRequest(f"The tool call's arguments are larger than {MAX_CONTENT_BYTES:,} bytes; call with less.")
    return checked


def _log_not_stored(what: str, outage: Unavailable) -> None:
    log.error("cannot store %s: %s", what, outage, extra={"action": "state.not_stored"})
