"""One call, top to bottom: decode, load, check, run, commit, ring.

Each step is a room of its own; no step goes back to an earlier one. What can be answered is
answered, what cannot is dead-lettered, and what failed on our side is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from tenacity import (
    AsyncRetrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from openapi_tool.executor.continuation import Continuation, asked_cursor
from openapi_tool.executor.ports import Bell, Kernel, Memory, Span, Tools, Tracer
from openapi_tool.executor.time_limit import TimeLimits
from openapi_tool.executor.uninterrupted import uninterrupted
from openapi_tool.protocol.cards import ArtifactCard, Card, identify, read_tool_call, result_card
from openapi_tool.protocol.command import AfterExecution, Command, Delivery, decode_command
from openapi_tool.protocol.errors import (
    InternalError,
    NotFound,
    ToolError,
    ToolMisconfigured,
    Unanswerable,
    Unavailable,
)
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import CallRecords, EarlierResult, call_key
from openapi_tool.protocol.report import (
    Acceptance,
    Report,
    accept,
    build_report,
    reportable_content,
    trace_link,
)
from openapi_tool.protocol.settlement import Acknowledge, DeadLetter, Settlement, TryAgain
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.once import Once
from openapi_tool.tools.arguments import Arguments, OperatorEnvs, SecretSource, prepare_arguments
from openapi_tool.tools.definition import ToolDefinition, parse_definition, stored_after_execution
from openapi_tool.tools.policy import Gate
from openapi_tool.tools.problems import short
from openapi_tool.tools.result import ResultFields, Shown, ToolOutput, failure, success
from openapi_tool.tools.session import SessionScope

log = logging.getLogger(__name__)

_FINISH_S = 2.0
_COPIES_OF_COMMIT = 5  # of a kept text: its JSON, that with the version of jsonb, the buffers of driver and transport
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_EXHAUSTED = "Every attempt at this call stopped the tool executor, so it is not run again; change the arguments."


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Who answers, within what limits, what `gate` lets through, with which `envs` of the operator.

    `secret` reads a variable, `scope` derives session identities, `redact` takes every secret out of the
    JSON-like value of a failure. In seconds: when a command is tried again after an outage, and how long a
    result waits for the database.
    """

    actor_id: str
    limits: TimeLimits
    gate: Gate
    envs: OperatorEnvs
    secret: SecretSource
    scope: SessionScope
    redact: Callable[[Any], Any]
    retry_delay_s: float
    result_wait_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that will be answered: who asked, what is known of it, which turn takes the answer."""

    delivery: Delivery
    command: Command
    identity: CallIdentity
    records: CallRecords
    acceptance: Acceptance
    started: float

    def elapsed_ms(self) -> int:
        """Milliseconds since the call began here."""
        return round((time.monotonic() - self.started) * 1000)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What goes into the result card, and the card with the whole text of an output that was cut."""

    fields: ResultFields
    artifact: ArtifactCard | None = None


class Pipeline:
    """Handles deliveries of tool commands; knows no driver, only ports."""

    def __init__(
        self,
        options: PipelineOptions,
        kernel: Kernel,
        tools: Tools[Any],
        continuation: Continuation,
        bell: Bell,
        tracer: Tracer,
    ) -> None:
        self._options = options
        self._kernel = kernel
        self._tools = tools
        self._continuation = continuation
        self._bell = bell
        self._tracer = tracer
        self._logged = Once()

    async def handle(self, delivery: Delivery) -> Settlement:
        """Answer one delivery and say what becomes of its message; bad input never raises."""
        try:
            return await self._handle(delivery)
        except Unanswerable as refusal:
            return DeadLetter(refusal.reason, refusal.message, refusal.terminate)
        except Unavailable as outage:
            metrics.POSTPONED.inc()
            log.warning(
                "a part of the kernel is away; the command is tried again: %s",
                outage,
                extra={"action": "call.postponed", "stream_sequence": delivery.stream_sequence},
            )
            return TryAgain(self._options.retry_delay_s)
        except Exception:
            log.exception(
                "a defect kept this command from being answered; it is tried again",
                extra={"action": "call.broken", "stream_sequence": delivery.stream_sequence},
            )
            if delivery.exhausted:
                return DeadLetter("defect", "a defect of the executor kept it from being answered", terminate=True)
            return TryAgain(self._options.retry_delay_s, defect=True)

    async def _handle(self, delivery: Delivery) -> Settlement:
        command = decode_command(delivery)
        records = await self._kernel.load(call_key(command))
        identity = identify(command, records.card)
        if records.earlier is not None:
            return await self._repeat(identity, records, records.earlier)

        acceptance = accept(identity, records)
        call = _Call(delivery, command, identity, records, acceptance, time.monotonic())
        with self._span(call) as span, self._tools.memory() as memory:
            answer = await self._answer(call, memory)
            memory.keep(_COPIES_OF_COMMIT * len(answer.artifact.content) if answer.artifact else 0)
            span.outcome(answer.fields.status, answer.fields.error_code)
            card = self._result_card(call, answer.fields)
            report = self._report(identity, acceptance, span, card.card_id, card.content)
            return await uninterrupted(self._finish(call, answer, card, report), _FINISH_S)

    async def _finish(self, call: _Call, answer: _Answer, card: Card, report: Report) -> Settlement:
        """Commit, then ring; nothing of it is broken off halfway."""
        if not await self._commit(card, report, answer.artifact):
            return await self._reconsider(call.command, call.identity)
        await self._ring(call.identity, call.records, report.context_headers)
        self._log_answer(call, answer.fields)
        if call.delivery.exhausted:
            return DeadLetter("attempts_exhausted", _EXHAUSTED, terminate=False)
        return Acknowledge()

    async def _commit(self, card: Card, report: Report, artifact: ArtifactCard | None) -> bool:
        """Write the result; one that is ready waits for a database that is away."""
        try:
            return await self._kernel.commit(card, report, artifact)
        except Unavailable as outage:
            log.warning("a result waits for the database: %s", outage, extra={"action": "commit.waits"})
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            wait=wait_exponential_jitter(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S, jitter=_FIRST_WAIT_S),
            stop=stop_after_delay(self._options.result_wait_s),
            before_sleep=before_sleep_log(log, logging.WARNING),
            reraise=True,
        ):
            with attempt:
                return await self._kernel.commit(card, report, artifact)
        raise AssertionError("retrying never ends without a result")

    async def _answer(self, call: _Call, memory: Memory) -> _Answer:
        """Run the call; every failure of it becomes a result, a defect of ours included."""
        try:
            definition = self._definition(call)
            output, shown, artifact = await self._run(call, definition, memory)
            return _Answer(success(output, shown, definition.result_format, call.elapsed_ms()), artifact)
        except ToolError as error:
            return self._failed(call, error)
        except Unavailable:
            raise
        except Exception:
            log.exception("a defect broke this call", extra={"action": "call.broken"} | ids(call.identity))
            defect = InternalError("The tool executor failed on this call; its operator finds the cause in its log.")
            return self._failed(call, defect)

    def _failed(self, call: _Call, error: ToolError) -> _Answer:
        if isinstance(error, ToolMisconfigured):
            self._log_misconfigured(call, error)
        fields, redact = failure(error, call.elapsed_ms()), self._options.redact
        return _Answer(replace(fields, result=redact(fields.result), error=redact(fields.error)))

    def _log_misconfigured(self, call: _Call, error: ToolMisconfigured) -> None:
        """Tell the operator once for each project, tool and reason; every call's own line has the code."""
        project_id, tool_name = call.identity.project_id, call.command.function_name
        if self._logged.first(project_id, tool_name, error.message):
            log.warning(
                "a tool cannot be called until an operator corrects it: %s",
                error.message,
                extra={"action": "tool.misconfigured", "project_id": project_id, "tool_name": short(tool_name)},
            )

    def _definition(self, call: _Call) -> ToolDefinition:
        if call.delivery.exhausted:
            raise InternalError(_EXHAUSTED)
        if call.command.violation is not None:
            raise call.command.violation
        if call.records.tool is None:
            raise NotFound(f"This project has no tool named {call.command.tool_name!r}; use one of the tools offered.")
        return parse_definition(call.records.tool)

    async def _run(
        self, call: _Call, definition: ToolDefinition, memory: Memory
    ) -> tuple[ToolOutput, Shown, ArtifactCard | None]:
        """The output, what of it a model is shown, and the card of the whole text where that is more."""
        arguments = self._arguments(call, definition)
        await self._options.gate.admit(definition, call.identity, arguments)
        deadline = self._options.limits.deadline(
            call.delivery.published_at, definition.suspend_timeout_s, definition.timeout_s
        )
        cursor = asked_cursor(definition, arguments)
        if cursor is not None:
            return *await self._continuation.go_on(cursor, definition, call.identity), None
        output = await self._tools.run(definition, arguments, deadline, memory)
        return output, *await self._continuation.show(output, definition, call.identity, call.records.card)

    def _arguments(self, call: _Call, definition: ToolDefinition) -> Arguments:
        tool_call = read_tool_call(call.records.card, call.identity.tool_call_id)
        options = self._options
        arguments = prepare_arguments(definition, tool_call, call.identity, options.envs, options.secret, options.scope)
        log.debug("running", extra={"action": "call.running", "session": arguments.session} | ids(call.identity))
        return arguments

    def _span(self, call: _Call) -> AbstractContextManager[Span]:
        link = trace_link(call.identity, call.acceptance.target)
        return self._tracer.span(f"execute_tool {call.command.function_name}", link, ids(call.identity))

    def _result_card(self, call: _Call, fields: ResultFields) -> Card:
        return result_card(
            actor_id=self._options.actor_id,
            function_name=call.command.function_name,
            identity=call.identity,
            call_card=call.records.card,
            status=fields.status,
            after_execution=_after_execution(call),
            result=fields.result,
            error=fields.error,
            tool_output=fields.tool_output,
        )

    def _report(
        self, identity: CallIdentity, acceptance: Acceptance, span: Span, card_id: str, content: Mapping[str, Any]
    ) -> Report:
        return build_report(
            actor_id=self._options.actor_id,
            identity=identity,
            acceptance=acceptance,
            span=span.context,
            tracestate=span.tracestate,
            card_id=card_id,
            card_content=content,
        )

    async def _repeat(self, identity: CallIdentity, records: CallRecords, earlier: EarlierResult) -> Settlement:
        """The call has a result: ring for ours, report ours first where that is missing, leave another's alone."""
        metrics.REPEATED.inc()
        ours = earlier.author_id == self._options.actor_id and earlier.live
        if ours and earlier.report_headers is not None:
            await self._ring(identity, records, earlier.report_headers)
        elif ours and reportable_content(earlier.content):
            await self._report_again(identity, records, earlier)
        log.info(
            "the call had a result already",
            extra={"action": "call.repeated", "author_id": earlier.author_id} | ids(identity),
        )
        return Acknowledge()

    async def _report_again(self, identity: CallIdentity, records: CallRecords, earlier: EarlierResult) -> None:
        acceptance = accept(identity, records)
        with self._tracer.span("report", trace_link(identity, acceptance.target), ids(identity)) as span:
            report = self._report(identity, acceptance, span, earlier.card_id, earlier.content)
            await self._kernel.report(earlier.card_id, report)
        await self._ring(identity, records, report.context_headers)

    async def _reconsider(self, command: Command, identity: CallIdentity) -> Settlement:
        """Nothing was written: another result came first, or the turn that waited is gone."""
        records = await self._kernel.load(call_key(command))
        if records.earlier is not None:
            return await self._repeat(identity, records, records.earlier)
        accept(identity, records)
        # Counted as a lost run: as an outage it would be tried, and billed, without end.
        raise InternalError("the result could not be written, although nothing stands against it")

    async def _ring(self, identity: CallIdentity, records: CallRecords, headers: Mapping[str, Any]) -> None:
        if records.worker_target is None:
            log.error(
                "the calling agent is not in the roster: its result is committed, but nobody can be woken",
                extra={"action": "doorbell.impossible"} | ids(identity),
            )
            return
        await self._bell.ring(identity.project_id, records.worker_target, headers)

    def _log_answer(self, call: _Call, fields: ResultFields) -> None:
        metrics.CALLS.labels(fields.status, fields.error_code or "").inc()
        metrics.CALL_SECONDS.labels(fields.status).observe(call.elapsed_ms() / 1000)
        log.info(
            "answered",
            extra={
                "action": "call.answered",
                "tool_name": call.command.function_name,
                "status": fields.status,
                "error_code": fields.error_code,
                "duration_ms": call.elapsed_ms(),
                "attempt": call.delivery.attempt,
            }
            | ids(call.identity),
        )


def _after_execution(call: _Call) -> AfterExecution:
    """The definition's valid value wins over the command's; without either the turn goes on."""
    stored, sent = stored_after_execution(call.records.tool), call.command.after_execution
    if stored and sent and stored != sent:
        log.warning(
            "the command's after_execution differs from the definition's, which counts",
            extra={"action": "after_execution.differs", "stored": stored, "sent": sent} | ids(call.identity),
        )
    return stored or sent or "suspend"


def ids(identity: CallIdentity) -> dict[str, Any]:
    """What every log line and span of a call carries."""
    return {
        "project_id": identity.project_id,
        "agent_id": identity.agent_id,
        "agent_turn_id": identity.agent_turn_id,
        "tool_call_id": identity.tool_call_id,
    }
