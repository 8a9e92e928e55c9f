"""The gateway: it offers tools to callers and runs their calls, whatever protocol they arrive by.

The packages `mcp` and `http`, its *doors*, call it. `call` has the data of one call, and `assembly` builds a gateway.
An *untaken* result was paid for, and no client took it: its client had gone or had cancelled the call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.gateway.call import Answer, Caller, RunningCall, WaitRecord
from openapi_tool.gateway.finished import facts_of, ids_of, row_of
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.stored import StoredTexts, UntakenResults, may_store, name_of_result
from openapi_tool.gateway.tools import GatewayTool, Tools
from openapi_tool.gateway.usage_requests import UsageRequests
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.protocol.cards import MAX_CONTENT_BYTES, StoredText, ToolCall, checked_arguments
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
"""Seconds that a call gets after its client has gone: to store its paid result, or to charge what it has cost."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What a gateway works with.

    - `call_timeout_s`: after so many seconds a call ends, unless its definition has a longer time limit.
    - `max_timeout_s`: after so many seconds any call ends.
    - `executor`: how many calls may run, and how many may wait, at the same time.
    - `state`: what this process shares with the gateway's other processes.
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


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a call has ended: its result, and the name by which an identical call finds it; None if it is not stored."""

    fields: ResultFields
    result_name: str | None


class Gateway:
    """Runs calls of any caller. A call whose client is gone ends soon, and is charged what it has cost.

    `policy` returns the policy that is valid now: it may be reloaded.
    """

    def __init__(self, parts: GatewayParts, tools: Tools, policy: Callable[[], Policy]) -> None:
        self._parts = parts
        self._policy = policy
        self._tools = tools
        self._switches = Switches()
        self._usage = UsageRequests(parts.state.rows)
        self._slots = FairSemaphore(parts.executor.concurrency)  # each running call holds one
        self._tasks: set[asyncio.Task[Any]] = set()  # each runs a call, stops one, or stores an untaken result

    def use_tools(self, tools: Tools) -> None:
        """Offer these tools from now on; running calls keep their definitions."""
        self._tools = tools

    def use_switches(self, switches: Switches) -> None:
        """Disable these tools for all requests from now on."""
        self._switches = switches
        self._parts.runner.set_switches(switches)

    @property
    def running(self) -> int:
        """Number of tasks that run calls, stop calls, or store untaken results."""
        return len(self._tasks)

    @property
    def tools(self) -> list[GatewayTool]:
        """All tools, of which a caller may see some."""
        return list(self._tools.values())

    def tools_of(self, caller: Caller) -> list[GatewayTool]:
        """Return the tools that a caller may use."""
        return [tool for tool in self._tools.values() if self._offers(caller, tool)]

    def may_call(self, caller: Caller, name: str) -> bool:
        """Return whether a caller may call the tool that clients know by this name.

        A door asks this before it hands out the stored result of an earlier request.
        """
        tool = self._tools.get(name)
        return tool is not None and self._offers(caller, tool) and not self._is_disabled(caller, tool)

    def _offers(self, caller: Caller, tool: GatewayTool) -> bool:
        """Return whether the caller's token and the policy permit the tool, be it disabled or not."""
        permitted = self._policy().permits_in
        return caller.may_call(tool.name) and permitted(caller.project_id, tool.definition.built_in)

    def _is_disabled(self, caller: Caller, tool: GatewayTool) -> bool:
        """Return whether an operator has disabled the tool for the caller's project."""
        try:
            self._switches.check(caller.project_id, tool.definition.tool_name)
        except ToolNotAvailable:
            return True
        return False

    async def budget_of(self, caller: Caller) -> list[dict[str, Any]]:
        """Return what is left of each budget of a caller and of its project."""
        never_run = self._parts.runner.new_call(CallIdentity(caller.project_id, caller.agent_id))
        # A call knows by which names the records of budgets call its project and agent.
        return await self._parts.budgets.left(never_run.quota_agent)

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
        stored = await self._parts.texts.artifact(caller.project_id, caller.agent_id, card_id, 0, max_chars)
        return stored.text if stored else None

    async def call(
        self,
        caller: Caller,
        name: str,
        arguments: Mapping[str, Any] | None,
        started: Callable[[RunningCall], None] | None = None,
    ) -> Answer:
        """Run a call and return its answer; a failed call is answered, too. `started` gets the call before it runs.

        If this method is cancelled, as the client has gone or has cancelled the call, the call is stopped in the
        background.
        """
        tool = self._tools.get(name)
        if tool is None or not self._offers(caller, tool):
            return Answer(self._no_such_tool(caller, name))
        wait = WaitRecord()
        call = self._parts.runner.new_call(caller.new_identity(), wait)
        running = RunningCall(caller, tool, arguments or {}, call, wait)
        if started is not None:
            started(running)
        task = self._begin(self._run(running), f"call {running.id}")
        try:
            return await asyncio.shield(task)  # `_stop` decides whether the task is cancelled
        except asyncio.CancelledError:
            self._begin(self._stop(running, task), f"stop {running.id}")
            raise

    async def keep(self, answer: Answer) -> None:
        """Store a paid result that nobody took, for an identical call of the same caller."""
        if answer.result_name is None:
            return
        try:
            await self._parts.untaken.put(answer.result_name, answer.fields)
        except Unavailable as outage:
            _log_not_stored("a result that nobody took", outage)

    def keep_soon(self, answer: Answer) -> None:
        """As `keep`, in the background."""
        if answer.result_name is not None:
            self._begin(self.keep(answer), "untaken result")

    async def aclose(self) -> None:
        """Wait until all calls have ended, with their costs charged and results stored; cancel those that are late."""
        while self._tasks:
            # `_stop` takes up to `_ABANDONED_S` seconds before it cancels a call, and the call then some more.
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
        CALL_FIELDS.set(lambda: ids_of(call.identity))  # for the log lines of this task
        outcome = None  # stays so if the call is cancelled
        try:
            with call.memory:  # reserved for its responses, until its result is here
                outcome = await self._outcome(running)
        finally:
            await self._record(running, None if outcome is None else outcome.fields)
        fields = outcome.fields
        is_paid_for = call.spent.tokens > 0 and fields.status == "success"
        return Answer(
            fields,
            running.id,
            result_name=outcome.result_name if is_paid_for else None,
            may_store=outcome.result_name is not None,
        )

    async def _outcome(self, running: RunningCall) -> _Outcome:
        """Return how a call has ended, which may have failed."""
        call = running.call
        definition = running.tool.definition
        result_name = None
        try:
            self._switches.check(running.caller.project_id, definition.tool_name)  # before the arguments
            arguments = _checked(running.unchecked_arguments)
            if may_store(definition, arguments):
                result_name = name_of_result(call.identity, definition, arguments)
            fields = await self._untaken(result_name)
            if fields is None:
                fields = await self._run_in_slot(running, arguments)
        except Exception as error:  # noqa: BLE001 - `failure_result` logs a defect
            fields = self._parts.runner.failure_result(
                call, definition.tool_name, error, running.began, definition.built_in.name
            )
        return _Outcome(fields, result_name)

    async def _untaken(self, result_name: str | None) -> ResultFields | None:
        """Return the result of an identical call that nobody took; None without one."""
        if result_name is None:
            return None
        try:
            return await self._parts.untaken.get(result_name)
        except Unavailable:  # the state is down: then the call runs as if there were none
            return None

    async def _run_in_slot(self, running: RunningCall, arguments: Mapping[str, Any]) -> ResultFields:
        """Run the call once there is a slot, and store its whole text if that is truncated. Raises ToolError."""
        definition = running.tool.definition
        self._refuse_if_full(running.caller.project_id)
        deadline = self._deadline(definition)
        async with self._slot(running.caller, deadline):
            try:
                result = await self._parts.runner.run(running.call, definition, ToolCall(arguments), deadline)
            except Unavailable as outage:  # of a call with a cursor: the text that it continues is in the state
                log.error("the state cannot be read: %s", outage, extra={"action": "state.unavailable"})  # noqa: TRY400
                raise InternalError(
                    "The stored text cannot be read now; ask for the page itself again, by its url.", retryable=True
                ) from None
        if result.full_text is not None:
            # Before the result is returned: it has a cursor, with which the model may ask for the next part at once.
            await self._store_text(running.call.identity, result.full_text)
        return result.fields

    def _refuse_if_full(self, project: str) -> None:
        """Raise RateLimited if the project has too many calls that wait for a slot.

        `max_held` calls may wait. A project may have as many of them as places are free still. So a project that floods
        the gateway alone takes half of the places, and the other half is left to other projects.
        """
        free_places = self._parts.executor.max_held - self._slots.waiting
        if self._slots.waiting_of(project) >= free_places:
            raise RateLimited("Too many calls wait in this gateway; call again in a few seconds, with fewer at a time.")

    def _deadline(self, definition: ToolDefinition) -> Deadline:
        """Return when a call that begins now must end.

        The definition's `suspend_timeout_seconds` does not count: it says how long a kernel waits for the result, and a
        gateway has no kernel.
        """
        parts = self._parts
        wanted_s = max(parts.call_timeout_s, definition.timeout_s or 0.0)
        return Deadline.after(min(wanted_s, parts.max_timeout_s))

    @asynccontextmanager
    async def _slot(self, caller: Caller, deadline: Deadline) -> AsyncIterator[None]:
        """Hold one of the slots of calls while the context is open. Raises RateLimited if none is free in time."""
        try:
            async with deadline.limit():
                await self._slots.take(caller.project_id, caller.agent_id)
        except TimeoutError:
            raise RateLimited("Too many calls run in this gateway; call again later, with fewer at a time.") from None
        try:
            yield
        finally:
            self._slots.give(caller.project_id)

    async def _store_text(self, identity: CallIdentity, full_text: StoredText) -> None:
        """Store the whole text of a truncated result; without it, a call with the cursor fails."""
        try:
            await self._parts.texts.put(identity, full_text)
        except Unavailable as outage:
            _log_not_stored("the whole text of a truncated result", outage)

    async def _stop(self, running: RunningCall, task: asyncio.Task[Answer]) -> None:
        """Stop a call that nobody waits for.

        If all that it has paid for has arrived, it is not cancelled, and its result is stored for an identical call.
        """
        if not running.has_received_all:
            task.cancel()
        await asyncio.wait([task], timeout=_ABANDONED_S)
        task.cancel()  # if it has not ended yet
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await self.keep(task.result())

    async def _record(self, running: RunningCall, fields: ResultFields | None) -> None:
        """Log and count a call, and store its row; `fields` is None if the call was cancelled."""
        row = row_of(running, fields)
        record_finished(facts_of(running, row, fields))
        try:
            await asyncio.shield(self._parts.state.rows.store(row))  # a call that is being cancelled is stored, too
        except Unavailable as outage:
            _log_not_stored("the row of a call", outage)


def _checked(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's arguments if they are JSON of bounded size. Raises BadRequest."""
    checked = checked_arguments(arguments)  # first: it bounds number and depth, and so the work of the next check
    if unsuitable := unsuitable_values(checked):
        raise BadRequest(f"Correct these and call again: {'; '.join(listed(unsuitable))}.")
    size = len(orjson.dumps(checked))
    if size > MAX_CONTENT_BYTES:
        raise BadRequest(f"The tool call's arguments are larger than {MAX_CONTENT_BYTES:,} bytes; call with less.")
    return checked


def _log_not_stored(what: str, outage: Unavailable) -> None:
    log.error("cannot store %s: %s", what, outage, extra={"action": "state.not_stored"})
