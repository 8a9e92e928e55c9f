"""Calls of a gateway, whatever its protocol: `Gateway.call` runs one from its arguments to its answer."""

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
from openapi_tool.engine.call import Call
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.gateway.answer import Answer
from openapi_tool.gateway.call_records import facts_of, log_ids, row_of
from openapi_tool.gateway.caller import Caller
from openapi_tool.gateway.running_call import RunningCall
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.stored import StoredTexts, UntakenResults, call_key, may_store
from openapi_tool.gateway.tools import GatewayTool, Tools
from openapi_tool.gateway.usage_turns import UsageTurns
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
        self._usage_turns = UsageTurns()
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

        One request of a project after another, with pauses (`UsageTurns`).
        """
        async with self._usage_turns.turn(caller.project_id):
            return await self._parts.state.rows.by_tool(caller.project_id, caller.agent_id, since)

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
        identity = running.identity
        CALL_FIELDS.set(lambda: log_ids(identity))
        call = running.call = self._parts.runner.new_call(identity, running.slot)
        definition = running.tool.definition
        key = None  # under which an identical call finds the result
        fields = None  # of the result, unless the call is cancelled
        try:
            with call.memory:
                try:
                    arguments = _checked(running.given)
                    if may_store(definition, arguments):
                        key = call_key(identity, definition, arguments)
                    fields = await self._untaken(running, key)
                    if fields is None:
                        fields = await self._run_in_slot(running, call, arguments)
                except Exception as error:  # noqa: BLE001 - `failure_result` logs a defect
                    fields = self._parts.runner.failure_result(
                        call, definition.tool_name, error, running.began, definition.built_in.name
                    )
        finally:
            await self._record(running, call, fields)
        has_cost = call.spent.tokens > 0
        untaken_as = key if has_cost and fields.status == "success" else None
        return Answer(fields, running.id, untaken_as, may_store=key is not None)

    async def _run_in_slot(self, running: RunningCall, call: Call, arguments: Mapping[str, Any]) -> ResultFields:
        """Run the call once there is a slot. Raises ToolError."""
        self._refuse_if_too_many_wait(running.caller)
        parts = self._parts
        definition = running.tool.definition
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
                await parts.texts.put(call.identity, result.full_text)  # before the model is shown a cursor into it
            except Unavailable as outage:
                _log_not_stored("the whole text of a truncated result", outage)
        return result.fields

    def _refuse_if_too_many_wait(self, caller: Caller) -> None:
        """Raise RateLimited if the caller's project has as many waiting calls as places for waiting are free.

        So however many projects wait, some places are free for another one.
        """
        free_places = self._parts.executor.max_held - self._slots.waiting
        if self._slots.waiting_of(caller.project_id) >= free_places:
            raise RateLimited("Too many calls wait in this gateway; call again in a few seconds, with fewer at a time.")

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

    async def _untaken(self, running: RunningCall, key: str | None) -> ResultFields | None:
        """Return the result of an identical call that nobody took, if the tool may still be called."""
        if key is None:
            return None
        with suppress(Unavailable, ToolNotAvailable):
            self._switches.check(running.caller.project_id, running.tool.definition.tool_name)
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

    async def _record(self, running: RunningCall, call: Call, fields: ResultFields | None) -> None:
        """Log and count a call, and store its row."""
        row = row_of(running, call, fields)
        record_finished(facts_of(running, call, row, fields))
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


def _log_not_stored(what: str, outage: Unavailable) -> None:
    log.error("cannot store %s: %s", what, outage, extra={"action": "state.not_stored"})
