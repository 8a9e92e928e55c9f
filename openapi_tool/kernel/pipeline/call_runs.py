"""Run a call of the kernel in the engine: from its stored definition and its tool.call card to a result to commit.

The *definition* is the row that describes the tool, the tool.call card is the row with the arguments of the call. A
call that must not run, for example because its command breaks the protocol, gets a failed result instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.engine.call import Call
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.kernel.pipeline.delivered_call import DeliveredCall
from openapi_tool.kernel.pipeline.ports import Clock, Kernel
from openapi_tool.kernel.pipeline.result_to_commit import ResultToCommit
from openapi_tool.kernel.pipeline.turn_deadline import turn_deadline
from openapi_tool.protocol.attempts import requests_sent
from openapi_tool.protocol.cards import ToolCall, artifact_card, read_tool_call
from openapi_tool.protocol.errors import InternalError, NotFound, ToolError, ToolMisconfigured
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.result import RunResult
from openapi_tool.tools.time_limits import TimeLimits
from openapi_tool.tools.wording import short

EXHAUSTED = "Every attempt at this call stopped the tool executor, so it is not run again; change the arguments."

_NOT_IN_ROSTER = (
    "The calling agent is not in the project's roster, so no worker can be woken; an operator must add it to "
    "resource.project_agents."
)


@dataclass(frozen=True, slots=True)
class CallRuns:
    """Runs calls with `runner`; `actor_id` is the author of artifact cards, which expire after `artifact_ttl_s`."""

    runner: ToolRunner
    kernel: Kernel
    limits: TimeLimits
    clock: Clock
    actor_id: str
    artifact_ttl_s: int

    async def run(self, delivered: DeliveredCall) -> ResultToCommit:
        """Run the call; every failure but Unavailable and CancelledError becomes its result."""
        call = delivered.call
        try:
            record = _definition_to_run(delivered)
            definition, tool_call = await self._parsed(delivered, record)
        except Exception as cause:  # noqa: BLE001 - logged by `failure_result`
            name = delivered.command.function_name
            return ResultToCommit(self.runner.failure_result(call, name, cause, started=delivered.facts.loaded))
        deadline = self.limits.deadline(self._age_s(delivered), definition.suspend_timeout_s, definition.timeout_s)
        result = await self._run_until(deadline, delivered, definition, tool_call)
        if result.full_text is None:
            return ResultToCommit(result.fields)
        artifact = artifact_card(
            self.actor_id, call.identity, delivered.records.card, result.full_text, self.artifact_ttl_s
        )
        return ResultToCommit(result.fields, artifact)

    async def _parsed(self, delivered: DeliveredCall, record: DefinitionRecord) -> tuple[ToolDefinition, ToolCall]:
        """Return the definition and the call's arguments. Raises ToolError.

        A disabled tool is refused for that reason, even if its definition or the card is not usable.
        """
        call = delivered.call
        try:
            # The definition's own time limits are known only once it is parsed.
            parse_deadline = self.limits.deadline(self._age_s(delivered), suspend_timeout_s=None)
            definition = await self.runner.parse_definition(call, record, parse_deadline)
            return definition, read_tool_call(delivered.records.card, call.identity.tool_call_id)
        except ToolError:
            self.runner.check_switch(call.project, record.tool_name)
            raise

    async def _run_until(
        self, deadline: Deadline, delivered: DeliveredCall, definition: ToolDefinition, tool_call: ToolCall
    ) -> RunResult:
        """Run the call until its deadline, which another result of its step may bring forward.

        Once another call of the step has a result, the turn ends `worker_timeout_s` later. So a call that may run for
        longer than that looks for such a result, by step id, and gets an earlier deadline when there is one.
        """
        call = delivered.call
        first_check_s = self.limits.worker_timeout_left_s(self._age_s(delivered))
        may_outlast_worker = self.limits.may_outlast_worker_timeout(definition.suspend_timeout_s)
        may_reach_check = first_check_s < deadline.remaining()
        if not may_outlast_worker or not may_reach_check or call.identity.step_id is None:
            return await self.runner.run(call, definition, tool_call, deadline)
        async with turn_deadline(self.kernel, self.limits, call.identity, first_check_s) as turn_limit:
            return await self.runner.run(call, definition, tool_call, Deadline(deadline.at, turn_limit))

    def _age_s(self, delivered: DeliveredCall) -> float:
        """Return the seconds since the command arrived in the stream."""
        return self.clock() - delivered.delivery.published_at.timestamp()


def _definition_to_run(delivered: DeliveredCall) -> DefinitionRecord:
    """Return the definition of a call that may run. Raises ToolError if it must not."""
    if delivered.delivery.exhausted:  # too many runs ended their executor
        raise InternalError(EXHAUSTED)
    if delivered.command.violation is not None:
        raise delivered.command.violation
    # A turn that is not suspended needs no doorbell, and so no worker.
    if delivered.records.worker_target is None and delivered.acceptance.waiting_turn.suspends:
        raise ToolMisconfigured(_NOT_IN_ROSTER)
    if delivered.records.definition is None:
        named = short(delivered.command.function_name)
        raise NotFound(f"This project has no tool named {named!r}; use one of the tools offered.")
    return delivered.records.definition


def requests_of(call: Call) -> int:
    """Return the number of upstream requests of a call, for the fair share of its project.

    Each of the two counts can be too small: `attempts` ends at MAX_ATTEMPTS, and a request that identical calls share
    is in the `spent` of only one of them.
    """
    return max(call.spent.requests, requests_sent(call.attempts))
