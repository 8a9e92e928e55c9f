"""Run one tool call for any door: arguments, policy, deadline, cursor, upstream, result.

The door makes the `Call`, finds the definition, sets the deadline, and stores the result.
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
from openapi_tool.tools.result import ResultFields, RunResult, failure, success
from openapi_tool.tools.result_request import result_request
from openapi_tool.tools.switches import Switches
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

_without_key_shapes = Redactor(where="error").value
"""Masks in a value what looks like a key, such as one in a definition instead of its variable, but no known secret.

A failure quotes the arguments. If known secrets were masked, too, a caller could write a guess into an argument, such
as `url: abc123`, and a mask in the error would tell that the guess is right.
"""

_WRITE_GRACE_S = 2.0  # until the cost of a cancelled call is stored


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Dependencies of every call.

    `quota_namespace` is that of `Settings`. `isolation` runs what a tenant can make costly.
    """

    authorizer: Authorizer
    arguments: ArgumentSources
    quota_namespace: str = ""
    isolation: Isolation = field(default_factory=Isolation)


class ToolRunner:
    """Runs tool calls; every failure becomes a result, except Unavailable and CancelledError, which are raised."""

    def __init__(self, options: RunnerOptions, backend: ToolBackend, pagination: Pagination) -> None:
        self._options = options
        self._backend = backend
        self._pagination = pagination
        self._switches = Switches()

    def reload(self, authorizer: Authorizer, read_secret: SecretSource) -> None:
        """Replace policy and secrets for all calls that start from now on (SIGHUP)."""
        arguments = replace(self._options.arguments, read_secret=read_secret)
        self._options = replace(self._options, authorizer=authorizer, arguments=arguments)

    def set_switches(self, switches: Switches) -> None:
        """Disable these tools for all requests that are sent from now on."""
        self._switches = switches

    async def parse_definition(self, call: Call, record: DefinitionRecord, deadline: Deadline) -> ToolDefinition:
        """Parse a stored definition. Raises ToolError."""
        return await self._options.isolation.parse_definition(record, call.project, deadline.remaining())

    def new_call(self, identity: CallIdentity, slot: Slot = NO_SLOT) -> Call:
        """Return a new call, which gives up `slot` while it waits; run it within its memory."""
        memory = self._backend.call_memory(identity.project_id)
        return Call(identity, memory, slot, quota_namespace=self._options.quota_namespace)

    async def run(self, call: Call, definition: ToolDefinition, given: ToolCall, deadline: Deadline) -> RunResult:
        """Run a call within its memory. Raises Unavailable and CancelledError; any other failure becomes its result.

        `given` has the model's arguments.
        """
        started = time.monotonic()
        built_in_name = definition.built_in.name
        session_id: str | None = None
        try:
            arguments = await self._arguments(call, definition, given, deadline)
            session_id = arguments.session_id
            self._check_switch(call.project, definition.tool_name)
            await self._options.authorizer.authorize(definition, call.identity, arguments)
            _refuse_if_late(deadline)
            wanted = result_request(definition, arguments)
            if wanted.cursor is None:
                # The backend checks the switch again after each wait for a permit. A reference to the call would make a
                # cycle of each call, which only a collection of garbage frees.
                call.recheck = partial(self._check_switch, call.project, definition.tool_name)
                output = await self._backend.run(definition, arguments, deadline, call)
                shown = await self._pagination.show(call, definition, output, wanted.max_tokens)
            elif wanted.search is None:
                shown = await self._pagination.resume(call, definition, wanted.cursor, wanted.max_tokens)
            else:  # a search reads the whole text and may take seconds, so it needs a time limit of its own
                async with _search_limit(deadline):
                    shown = await self._pagination.find(
                        call, definition, wanted.search, wanted.cursor, wanted.max_tokens
                    )
            fields = success(
                shown.output,
                shown.rendered,
                definition.result_format,
                latency_ms=_ms_since(started),
                attempts=call.attempts,
                tool=built_in_name,
                session=session_id,
                budget=_remaining_budget(call),
                repaired=tuple(sorted({*arguments.repaired, *call.repaired})),
            )
            full_text = shown.full_text
        except Exception as cause:  # noqa: BLE001 - failure_result logs defects
            fields = self.failure_result(call, definition.tool_name, cause, started, built_in_name, session_id)
            full_text = None
        if call.accounts is not None:  # before the door stores the result, so that no crash loses its cost
            await shielded(call.accounts.wait_until_written(), _WRITE_GRACE_S)
        return RunResult(fields, full_text)

    async def _arguments(
        self, call: Call, definition: ToolDefinition, given: ToolCall, deadline: Deadline
    ) -> Arguments:
        """Merge, validate and resolve the arguments; leave out those that nobody knows. Raises ToolError."""
        prepared = self._options.arguments.prepare(definition, given, call.identity)
        wait_s = deadline.remaining()
        checked = await self._options.isolation.check_arguments(definition, prepared.check, call.project, wait_s)
        arguments = self._backend.without_unknown(definition, prepared.finish(checked))
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
        return arguments

    def _check_switch(self, project: str, tool_name: str) -> None:
        """Raise ToolNotAvailable if an operator has disabled the tool, perhaps since the call began."""
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
        """Return the result of a failed call; `started` is its start on the monotonic clock, in seconds.

        Raises `cause` if it is Unavailable, and CancelledError.
        """
        if isinstance(cause, Unavailable):
            raise cause
        error = cause if isinstance(cause, ToolError) else _defect(call, cause)
        without_traceback(cause)  # its frames would keep the response in memory
        error.tokens, error.requests = call.spent.tokens, call.spent.requests
        if isinstance(error, ToolMisconfigured):
            log.warning(
                "a tool cannot be called until an operator corrects it: %s",
                error.message,
                extra={"action": "tool.misconfigured"} | _log_fields(call, tool_name),
            )
        fields = failure(error, _ms_since(started), call.attempts, built_in_name, session_id, _remaining_budget(call))
        return replace(fields, result=_without_key_shapes(fields.result), error=_without_key_shapes(fields.error))


def _refuse_if_late(deadline: Deadline) -> None:
    if not deadline.remaining():
        raise ToolTimeout("This service received this call too late to run it; call again.")


@asynccontextmanager
async def _search_limit(deadline: Deadline) -> AsyncIterator[None]:
    try:
        async with deadline.limit():
            yield
    except TimeoutError:
        raise ToolTimeout(
            "The search in the stored text was not done in time; call again, or read on with only cursor."
        ) from None


def _log_fields(call: Call, tool_name: str) -> dict[str, Any]:
    return {**log_ids(call.identity), "tool_name": short(tool_name)}


def _remaining_budget(call: Call) -> Mapping[str, Any] | None:
    return call.accounts.left() if call.accounts is not None else None


def _defect(call: Call, cause: Exception) -> InternalError:
    # An exception in a `finally` block can replace the CancelledError.
    raise_if_cancelled(cause)
    log.error("internal error in a call", exc_info=cause, extra={"action": "call.broken"} | log_ids(call.identity))
    return InternalError("This service failed on the call; its operator finds the cause in its log.")


def _ms_since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
