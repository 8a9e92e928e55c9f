"""Run one tool call for any door; `ToolRunner.run` has the steps.

A *door* brings a call in and takes its result out: the kernel door, the MCP door or the HTTP door. It finds the tool's
definition, has `ToolRunner.new_call` make the `Call`, sets the deadline, and stores the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from openapi_tool.concurrency.cancellation import raise_if_cancelled, shielded
from openapi_tool.engine.call import Call
from openapi_tool.engine.pagination import Pagination
from openapi_tool.engine.ports import ToolBackend
from openapi_tool.isolation.service import Isolation
from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.errors import (
    InternalError,
    ToolError,
    ToolMisconfigured,
    ToolTimeout,
    Unavailable,
    without_traceback,
)
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.quotas.permits import NO_SLOT, Slot
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.arguments import Arguments, ArgumentSources, SecretSource
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.policy import Authorizer
from openapi_tool.tools.result import ResultFields, RunResult, ShownOutput, failure, success
from openapi_tool.tools.result_request import result_request
from openapi_tool.tools.switches import Switches
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

_without_key_shapes = Redactor(where="error").value
"""Masks in a failure what has the shape of a key, for example a key that a definition holds by mistake.

It masks no secret by its value. A failure quotes the arguments, so a caller could test guesses of a secret: after a
call with `url: abc123`, a mask in place of `abc123` in the error would tell that `abc123` is the secret.
"""

_WRITE_GRACE_S = 2.0  # that a cancelled call still gets to store its cost


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Dependencies of every call.

    - `authorizer`: the operator's policy, which may forbid a call.
    - `arguments`: where arguments and secrets of a call come from.
    - `quota_namespace`: setting of that name; it goes before the project's name in the records of quotas.
    - `isolation`: worker processes for steps whose cost a tenant's input decides.
    """

    authorizer: Authorizer
    arguments: ArgumentSources
    quota_namespace: str = ""
    isolation: Isolation = field(default_factory=Isolation)


class ToolRunner:
    """Runs tool calls.

    A failure becomes the result of its call, except for two: Unavailable (PostgreSQL or NATS failed) and CancelledError
    are raised, since the door then decides what happens to the call.
    """

    def __init__(self, options: RunnerOptions, backend: ToolBackend, pagination: Pagination) -> None:
        self._options = options
        self._backend = backend
        self._pagination = pagination
        self._switches = Switches()

    def reload(self, authorizer: Authorizer, read_secret: SecretSource) -> None:
        """Replace policy and secrets for all calls that start from now on; SIGHUP asks for it."""
        arguments = replace(self._options.arguments, read_secret=read_secret)
        self._options = replace(self._options, authorizer=authorizer, arguments=arguments)

    def set_switches(self, switches: Switches) -> None:
        """Replace the list of disabled tools; also calls that already run send no further request for these."""
        self._switches = switches

    async def parse_definition(self, call: Call, record: DefinitionRecord, deadline: Deadline) -> ToolDefinition:
        """Parse a stored definition for a call of it. Raises ToolError."""
        return await self._options.isolation.parse_definition(record, call.project, deadline.remaining())

    def new_call(self, identity: CallIdentity, slot: Slot = NO_SLOT) -> Call:
        """Return a new call, which gives up `slot` while it waits. The caller runs it within `with call.memory:`."""
        memory = self._backend.call_memory(identity.project_id)
        return Call(identity, memory, slot, quota_namespace=self._options.quota_namespace)

    async def run(self, call: Call, definition: ToolDefinition, tool_call: ToolCall, deadline: Deadline) -> RunResult:
        """Run a call. Raises Unavailable and CancelledError; any other failure becomes its result.

        The caller has entered `call.memory`, the reserved memory of its responses. `tool_call` has the model's
        arguments.
        """
        started = time.monotonic()
        session_id: str | None = None
        full_text = None
        try:
            # First, as a disabled tool is refused for that reason even if its arguments or its key are not usable.
            self.check_switch(call.project, definition.tool_name)
            arguments = await self._arguments(call, definition, tool_call, deadline)
            session_id = arguments.session_id
            _log_start(call, definition, arguments)
            await self._options.authorizer.authorize(definition, call.identity, arguments)
            _refuse_if_late(deadline)
            shown = await self._shown(call, definition, arguments, deadline)
            fields = _success_fields(call, definition, arguments, shown, started)
            full_text = shown.full_text
        except Exception as cause:  # noqa: BLE001 - `failure_result` logs defects
            built_in_name = definition.built_in.name
            fields = self.failure_result(call, definition.tool_name, cause, started, built_in_name, session_id)
        if call.accounts is not None:  # before the door stores the result, so that no crash loses its cost
            await shielded(call.accounts.wait_until_written(), _WRITE_GRACE_S)
        return RunResult(fields, full_text)

    async def _arguments(
        self, call: Call, definition: ToolDefinition, tool_call: ToolCall, deadline: Deadline
    ) -> Arguments:
        """Return the arguments that the call runs with. Raises ToolError.

        Four steps:

        1. Separate the model's arguments from those that the kernel has added, and render the definition's defaults.
        2. Check both against the definition's schema.
        3. Merge them with the fixed values and the secrets.
        4. Leave out arguments that neither the definition nor Jina knows.
        """
        prepared = self._options.arguments.prepare(definition, tool_call, call.identity)
        wait_s = deadline.remaining()
        checked = await self._options.isolation.check_arguments(definition, prepared.check, call.project, wait_s)
        merged = prepared.finish(checked)
        return self._backend.without_unknown(definition, merged)

    async def _shown(
        self, call: Call, definition: ToolDefinition, arguments: Arguments, deadline: Deadline
    ) -> ShownOutput:
        """Return what the call asks for: a new result, a later part of an earlier one, or a search in that."""
        request = result_request(definition, arguments)
        if request.cursor is None:
            # The backend checks the switch again after each wait for a permit. The function must not refer to `call`,
            # as `call` refers to the function: only the garbage collector would free such a cycle.
            call.recheck = partial(self.check_switch, call.project, definition.tool_name)
            output = await self._backend.run(definition, arguments, deadline, call)
            return await self._pagination.show(call, definition, output, request.max_tokens)
        call.known_budget = self._backend.known_budget(definition, arguments, call)
        if request.search is None:
            return await self._pagination.later_part(call, definition, request.cursor, request.max_tokens)
        # A search reads the whole text and may take seconds, and nothing in it ends at the deadline by itself.
        async with _search_limit(deadline):
            return await self._pagination.search(call, definition, request.search, request.cursor, request.max_tokens)

    def check_switch(self, project: str, tool_name: str) -> None:
        """Raise ToolNotAvailable if an operator has disabled the tool, perhaps while the call runs."""
        self._switches.check(project, tool_name)

    def failure_result(
        self,
        call: Call,
        tool_name: str,
        cause: Exception,
        started: float,
        built_in_name: str = "",
        session_id: str | None = None,
    ) -> ResultFields:
        """Return the result of a failed call, and log what an operator must act on.

        - `tool_name` is the definition's name of the tool, `built_in_name` that of the built-in tool behind it, such
          as `jina.search`; it is empty if the definition is not known.
        - `started` is the start of the call, in seconds of the monotonic clock.

        Raises `cause` if it is Unavailable. Raises CancelledError if `cause` hides that the call was cancelled.
        """
        if isinstance(cause, Unavailable):
            raise cause
        error = cause if isinstance(cause, ToolError) else _defect(call, cause)
        without_traceback(cause)  # its frames would keep the response in memory
        error.tokens, error.requests = call.spent.tokens, call.spent.requests
        if isinstance(error, ToolMisconfigured):
            _log_misconfigured(call, tool_name, error)
        fields = failure(error, _ms_since(started), call.attempts, built_in_name, session_id, _remaining_budget(call))
        return replace(fields, result=_without_key_shapes(fields.result), error=_without_key_shapes(fields.error))


def _log_start(call: Call, definition: ToolDefinition, arguments: Arguments) -> None:
    """Log that a call begins; warn if it cannot use the key that `options.envs` of its definition names.

    It uses the key that `auth_env` of the definition names then.
    """
    if arguments.key_fallback_reason is not None:
        log.warning(
            "the key of auth_env (%s) is used instead of the definition's own: %s",
            short(definition.auth_env),
            arguments.key_fallback_reason,
            extra={"action": "tool.key_passed_over"} | _log_fields(call, definition.tool_name),
        )
    log.debug(
        "running",
        extra={"action": "call.running", "session": arguments.session_identity} | log_ids(call.identity),
    )


def _refuse_if_late(deadline: Deadline) -> None:
    if not deadline.remaining():
        raise ToolTimeout("This service received this call too late to run it; call again.")


@asynccontextmanager
async def _search_limit(deadline: Deadline) -> AsyncIterator[None]:
    """End a search at the deadline. Raises ToolTimeout then."""
    try:
        async with deadline.limit():
            yield
    except TimeoutError:
        raise ToolTimeout(
            "The search in the stored text was not done in time; call again, or read on with only cursor."
        ) from None


def _success_fields(
    call: Call, definition: ToolDefinition, arguments: Arguments, shown: ShownOutput, started: float
) -> ResultFields:
    return success(
        shown.output,
        shown.rendered,
        definition.result_format,
        latency_ms=_ms_since(started),
        attempts=call.attempts,
        tool=definition.built_in.name,
        session=arguments.session_id,
        budget=_remaining_budget(call),
        # Names of arguments that were changed, such as an address without `https://`, or dropped as unknown.
        repaired=tuple(sorted({*arguments.repaired, *call.repaired})),
    )


def _log_misconfigured(call: Call, tool_name: str, error: ToolMisconfigured) -> None:
    log.warning(
        "a tool cannot be called until an operator corrects it: %s",
        error.message,
        extra={"action": "tool.misconfigured"} | _log_fields(call, tool_name),
    )


def _log_fields(call: Call, tool_name: str) -> dict[str, Any]:
    return {**log_ids(call.identity), "tool_name": short(tool_name)}


def _remaining_budget(call: Call) -> Mapping[str, Any] | None:
    return call.known_budget if call.accounts is None else call.accounts.left()


def _defect(call: Call, cause: Exception) -> InternalError:
    """Log an exception that is no ToolError, and return the error for the model. Raises CancelledError."""
    # If an exception in a `finally` block has replaced the CancelledError of a cancelled call, raise that one.
    raise_if_cancelled(cause)
    log.error("internal error in a call", exc_info=cause, extra={"action": "call.broken"} | log_ids(call.identity))
    return InternalError("This service failed on the call; its operator finds the cause in its log.")


def _ms_since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
