"""Run one tool call for any front end: arguments, policy, deadline, cursor, upstream, result.

The front end decides owner, definition and deadline, and stores the outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from openapi_tool.call import Call
from openapi_tool.concurrency import raise_if_cancelled, shielded
from openapi_tool.executor.continuation import Continuation
from openapi_tool.executor.ports import ToolBackend, owner_ids
from openapi_tool.isolation.service import Isolation
from openapi_tool.protocol import frozen
from openapi_tool.protocol.cards import StoredText, ToolCall
from openapi_tool.protocol.errors import (
    InternalError,
    ToolError,
    ToolMisconfigured,
    ToolTimeout,
    Unavailable,
    without_traceback,
)
from openapi_tool.protocol.identity import scoped_project
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.quotas.permits import NO_SLOT, Slot
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.arguments import Arguments, CallOwner, OperatorEnvs, SecretSource, preparation
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import ToolOutput
from openapi_tool.tools.policy import Authorizer, Deadline, Switches
from openapi_tool.tools.problems import short
from openapi_tool.tools.result import RenderedResult, ResultFields, failure, success
from openapi_tool.tools.scopes import SessionScope
from openapi_tool.tools.search_request import requested
from openapi_tool.tools.text_search import SearchRequest

log = logging.getLogger(__name__)

_KEY_SHAPES = Redactor(where="error")
"""Masks what looks like a key, such as one in a definition instead of its variable, but no known secret.

A failure quotes the caller, who would learn from a mask that his guess of a secret is right.
"""

_WRITE_GRACE_S = 2.0  # until the cost of a cancelled call is stored


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Dependencies of every call.

    `kernel` separates equal project ids of two kernels, and may be empty. `isolation` runs what a tenant can make
    costly.
    """

    authorizer: Authorizer
    envs: OperatorEnvs
    read_secret: SecretSource
    scope: SessionScope
    kernel: str = ""
    isolation: Isolation = field(default_factory=Isolation)


@frozen
class ToolCallRequest:
    """What a call asks for: `given` holds the model's arguments."""

    definition: ToolDefinition
    given: ToolCall
    deadline: Deadline


class ToolRunner:
    """Runs tool calls; every failure becomes a result."""

    def __init__(self, options: RunnerOptions, backend: ToolBackend, continuation: Continuation) -> None:
        self._options = options
        self._backend = backend
        self._continuation = continuation
        self._switches = Switches()

    def reload(self, authorizer: Authorizer, read_secret: SecretSource) -> None:
        """Replace policy and secrets for all calls that start from now on (SIGHUP)."""
        self._options = replace(self._options, authorizer=authorizer, read_secret=read_secret)

    def set_switches(self, switches: Switches) -> None:
        """Disable these tools for all requests that are sent from now on."""
        self._switches = switches

    async def parse_definition(self, call: Call, record: DefinitionRecord, deadline: Deadline) -> ToolDefinition:
        """Parse a stored definition. Raises ToolError."""
        return await self._options.isolation.parse_definition(record, call.project, deadline.remaining())

    def new_call(self, owner: CallOwner, slot: Slot = NO_SLOT) -> Call:
        """Return a call of an owner, which gives up `slot` while it waits; run it within its memory."""
        project = scoped_project(self._options.kernel, owner.project_id)
        return Call(owner, project, self._backend.call_memory(project), slot)

    async def run(self, call: Call, request: ToolCallRequest) -> tuple[ResultFields, StoredText | None]:
        """Run a call within its memory; return its result, and the whole text if it was truncated.

        Raises Unavailable and CancelledError.
        """
        result = await self._run_to_result(call, request)
        if call.budget is not None:  # before any front end stores the result, so that no crash loses its cost
            await shielded(call.budget.wait_until_written(), _WRITE_GRACE_S)
        return result

    async def _run_to_result(self, call: Call, request: ToolCallRequest) -> tuple[ResultFields, StoredText | None]:
        started = time.monotonic()
        definition, session = request.definition, None
        built_in = definition.built_in.name
        try:
            arguments = await self._arguments(call, request)
            session = arguments.session_id
            output, rendered, full_text = await self._run(call, request, arguments)
            return success(
                output,
                rendered,
                definition.result_format,
                latency_ms=_ms_since(started),
                attempts=call.attempts,
                tool=built_in,
                session=session,
                budget=_remaining_budget(call),
            ), full_text
        except Exception as cause:  # noqa: BLE001 - failure_result logs defects
            return self.failure_result(call, definition.tool_name, cause, started, built_in, session), None

    def failure_result(
        self,
        call: Call,
        tool_name: str,
        cause: Exception,
        started: float,
        built_in: str = "",
        session: str | None = None,
    ) -> ResultFields:
        """Return the result of a failed call; `started` is its start on the monotonic clock, in seconds.

        Raises `cause` if it is Unavailable, and CancelledError.
        """
        if isinstance(cause, Unavailable):
            raise cause
        error = cause if isinstance(cause, ToolError) else _defect(call.owner, cause)
        without_traceback(cause)  # its frames would keep the response in memory
        error.tokens, error.requests = call.spent.tokens, call.spent.requests
        if isinstance(error, ToolMisconfigured):
            log.warning(
                "a tool cannot be called until an operator corrects it: %s",
                error.message,
                extra={"action": "tool.misconfigured"} | _tool(call.owner, tool_name),
            )
        fields = failure(error, _ms_since(started), call.attempts, built_in, session, _remaining_budget(call))
        masked = _KEY_SHAPES.value
        return replace(fields, result=masked(fields.result), error=masked(fields.error))

    async def _arguments(self, call: Call, request: ToolCallRequest) -> Arguments:
        owner, definition, options = call.owner, request.definition, self._options
        prepared = preparation(definition, request.given, owner, options.envs, options.read_secret, options.scope)
        wait_s = request.deadline.remaining()
        checked = await options.isolation.check_arguments(definition, prepared.check, call.project, wait_s)
        arguments = self._backend.without_unknown(definition, prepared.finish(checked))
        if arguments.key_fallback_reason is not None:
            log.warning(
                "the key of auth_env (%s) is used instead of the definition's own: %s",
                short(definition.auth_env),
                arguments.key_fallback_reason,
                extra={"action": "tool.key_passed_over"} | _tool(owner, definition.tool_name),
            )
        if log.isEnabledFor(logging.DEBUG):
            log.debug("running", extra={"action": "call.running", "session": arguments.session} | owner_ids(owner))
        return arguments

    async def _run(
        self, call: Call, request: ToolCallRequest, arguments: Arguments
    ) -> tuple[ToolOutput, RenderedResult, StoredText | None]:
        owner, definition, deadline = call.owner, request.definition, request.deadline
        check_switch = partial(self._check_switch, owner.project_id, definition.tool_name)
        check_switch()
        await self._options.authorizer.authorize(definition, owner, arguments)
        if not deadline.remaining():
            raise ToolTimeout("The tool executor received this call too late to run it; call again.")
        cursor, max_result_tokens, search = requested(definition, arguments)
        full_text = None
        if cursor is None:
            call.recheck = check_switch
            output = await self._backend.run(definition, arguments, deadline, call)
            note = call.budget.note if call.budget is not None else ""
            rendered, full_text = await self._continuation.render(output, definition, owner, max_result_tokens, note)
        elif search is None:
            output, rendered = await self._continuation.resume(cursor, definition, owner, max_result_tokens)
        else:  # reads the whole text and may take seconds, so only this is limited
            output, rendered = await self._find(call, search, cursor, request, max_result_tokens)
        return output, replace(rendered, repaired=arguments.repaired) if arguments.repaired else rendered, full_text

    def _check_switch(self, project_id: str, tool_name: str) -> None:
        # Called after each wait for a permit, too: an operator may have disabled the tool meanwhile.
        self._switches.check(project_id, tool_name)

    async def _find(
        self, call: Call, search: SearchRequest, cursor: str, request: ToolCallRequest, max_result_tokens: int | None
    ) -> tuple[ToolOutput, RenderedResult]:
        try:
            async with request.deadline.limit():
                return await self._continuation.find(search, cursor, request.definition, call.owner, max_result_tokens)
        except TimeoutError:
            raise ToolTimeout(
                "The search in the stored text was not done in time; call again, or read on with only cursor."
            ) from None


def _tool(owner: CallOwner, tool_name: str) -> dict[str, Any]:
    return {**owner_ids(owner), "tool_name": short(tool_name)}


def _remaining_budget(call: Call) -> Mapping[str, Any] | None:
    return call.budget.left() if call.budget is not None else None


def _defect(owner: CallOwner, cause: Exception) -> InternalError:
    # An exception in a `finally` block can replace the CancelledError.
    raise_if_cancelled(cause)
    log.error("internal error in a call", exc_info=cause, extra={"action": "call.broken"} | owner_ids(owner))
    return InternalError("The tool executor failed on this call; its operator finds the cause in its log.")


def _ms_since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
