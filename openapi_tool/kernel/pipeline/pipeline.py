"""Pipeline for one delivery of a command: decode, load, run, commit, publish the doorbell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from openapi_tool.concurrency.cancellation import raise_if_cancelled, shielded
from openapi_tool.concurrency.keyed_lock import KeyedLock
from openapi_tool.engine.call import Call
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.kernel.pipeline.commit import ResultCommitter
from openapi_tool.kernel.pipeline.doorbell_sender import DoorbellSender
from openapi_tool.kernel.pipeline.parked_results import ParkedResults
from openapi_tool.kernel.pipeline.ports import CallSlot, Clock, Kernel, Publisher, Tracer
from openapi_tool.kernel.pipeline.result_order import ResultOrder
from openapi_tool.kernel.pipeline.result_to_commit import ResultToCommit
from openapi_tool.kernel.pipeline.turn_deadline import turn_deadline
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.cards import ResultCard, artifact_card, read_tool_call, result_card
from openapi_tool.protocol.command import AfterExecution, Command, Delivery
from openapi_tool.protocol.dialect import Dialect
from openapi_tool.protocol.errors import (
    InternalError,
    NotFound,
    ReportRefused,
    ToolMisconfigured,
    Unanswerable,
    Unavailable,
)
from openapi_tool.protocol.identity import CallIdentity, identify, unidentified
from openapi_tool.protocol.records import CallRecords, DefinitionRecord, EarlierResult
from openapi_tool.protocol.report import Acceptance, Doorbell, Report, reportable_content, trace_link
from openapi_tool.protocol.settlement import Acknowledge, HandBack, Settlement, StoreDeadLetter
from openapi_tool.protocol.tracing import TraceLink
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import CallFacts, record_finished
from openapi_tool.telemetry.logs import CALL_FIELDS
from openapi_tool.telemetry.spans import CallSpan
from openapi_tool.tools.deadlines import Deadline, TimeLimits
from openapi_tool.tools.definition import stored_after_execution
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.output import COPIES_OF_COMMIT
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

_UNCLAIMED_STATUSES = ("pending", "deferred")  # of an inbox row that may still need a doorbell
_NOT_IN_ROSTER = (
    "The calling agent is not in the project's roster, so no worker can be woken; an operator must add it to "
    "resource.project_agents."
)
_EXHAUSTED = "Every attempt at this call stopped the tool executor, so it is not run again; change the arguments."

MAX_WITHOUT_BODY = 20
"""From this delivery on, a command without a body is handled as it is: a publisher can forge the header that says that
the server left the body out."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Actor id of the result cards, and the settings sections with the limits of a call."""

    actor_id: str
    executor: ExecutorOptions
    tools: ToolOptions


@dataclass(slots=True, eq=False)
class _Delivered:
    """Delivered command that gets a result; `may_be_parked`: an earlier run may have parked its result."""

    delivery: Delivery
    command: Command
    records: CallRecords
    acceptance: Acceptance
    call: Call
    slot: CallSlot
    facts: CallFacts
    may_be_parked: bool


class Pipeline:
    """Handles deliveries of tool commands; `slot_of` returns the slot of a running call by stream sequence."""

    def __init__(
        self,
        options: PipelineOptions,
        dialect: Dialect,
        kernel: Kernel,
        runner: ToolRunner,
        publisher: Publisher,
        tracer: Tracer,
        clock: Clock,
        parked: ParkedResults,
        slot_of: Callable[[int], CallSlot],
    ) -> None:
        self._options = options
        self._dialect = dialect
        self._kernel = kernel
        self._runner = runner
        self._limits = TimeLimits(options.executor, options.tools)
        self._doorbell_sender = DoorbellSender(publisher, clock, self._limits)
        self._tracer = tracer
        self._clock = clock
        self._parked = parked
        # A call ends `commit_margin_s` before its turn's deadline: half of that is for waiting here, half for the
        # commit.
        max_wait_s = options.executor.commit_margin_s / 2
        self._order = ResultOrder(options.executor.min_result_delay_s, max_wait_s, clock)
        self._committer = ResultCommitter(kernel, parked, self._order, options.executor.commit_retry_timeout_s)
        self._slot_of = slot_of
        self._call_locks = KeyedLock()

    async def handle(self, delivery: Delivery) -> Settlement:
        """Handle one delivery and return its settlement; raises only CancelledError."""
        try:
            return await self._answer(delivery)
        except Unanswerable as refusal:
            return StoreDeadLetter(refusal.reason, refusal.message, refusal.terminate)
        except Unavailable as outage:
            metrics.REQUEUED.inc()  # counts the commands that an outage hands back
            # This reason is logged for each command; the health report logs it once, with the remedy.
            return HandBack(self._options.executor.requeue_delay_s, reason=outage.problem)
        except Exception as defect:
            raise_if_cancelled(defect)
            sequence = delivery.stream_sequence
            log.exception("internal error", extra={"action": "call.broken", "stream_sequence": sequence})
            if delivery.exhausted:  # `max_lost_runs` runs were lost, so no further run is tried
                return StoreDeadLetter("defect", "an internal error of the executor prevented a result", terminate=True)
            return HandBack(self._options.executor.requeue_delay_s, defect=True, reason="internal error")

    async def _answer(self, delivery: Delivery) -> Settlement:
        """Answer a command once no copy of it runs here. Raises Unanswerable, Unavailable, a defect."""
        received = time.monotonic()
        if delivery.lacks_body and delivery.number < MAX_WITHOUT_BODY:
            delay_s = delivery.number * self._options.executor.requeue_delay_s
            return HandBack(delay_s, reason="delivered without its body: the durable has headers_only set")
        command = self._dialect.decode(delivery)
        call_id = command.identity.tool_call_id or command.card_id
        if call_id is None:  # no record can be found
            raise unidentified()
        # Copies of a command run one after the other. Together they would share one upstream request. Only one copy can
        # commit its result, and the cost of the request might be counted by the other one.
        async with self._call_locks.hold((command.identity.project_id, call_id)) as waited:
            may_be_parked = waited or delivery.number > 1  # a copy that waited follows a run, as a redelivery does
            return await self._load_and_answer(delivery, command, received, may_be_parked=may_be_parked)

    async def _load_and_answer(
        self, delivery: Delivery, command: Command, received: float, *, may_be_parked: bool
    ) -> Settlement:
        """Load the rows of a command. Run its call if it has no result yet and a turn accepts one."""
        records = await self._kernel.load(command)
        identity = identify(command.identity, records.card)
        if records.earlier is not None:
            await self._delete_parked(identity, may_be_parked=may_be_parked)
            return await self._settle_existing_result(delivery, identity, records, records.earlier)
        try:
            acceptance = self._dialect.accept(identity, records)
        except Unanswerable:
            await self._delete_parked(identity, may_be_parked=may_be_parked)
            raise
        slot = self._slot_of(delivery.stream_sequence)
        call = self._runner.new_call(identity, slot)
        link = trace_link(identity, acceptance.waiting_turn)
        delivered = _Delivered(
            delivery=delivery,
            command=command,
            records=records,
            acceptance=acceptance,
            call=call,
            slot=slot,
            facts=self._facts(delivery, command, call, link, received),
            may_be_parked=may_be_parked,
        )
        return await self._run_and_commit(delivered, link)

    async def _run_and_commit(self, delivered: _Delivered, link: TraceLink) -> Settlement:
        """Run a call, or find its parked result, and commit the result; its span continues the trace of `link`."""
        call, facts = delivered.call, delivered.facts
        CALL_FIELDS.set(facts.fields)
        span_name = f"execute_tool {facts.function_name}"
        # The span begins when the command arrived in the stream. `began` is on the monotonic clock, which has no time
        # of the server, so its age at `began` is subtracted.
        arrived_at = facts.began - facts.age_s
        with self._tracer.span(span_name, link, facts.ids, arrived_at) as span, call.memory:
            span.facts = facts
            result = await self._find_parked(delivered) or await self._run(delivered)
            delivered.slot.requests = _requests_of(call)  # for `CommandConsumer._finished`
            _record_result(facts, call, result)
            # Release the memory of responses, except what the commit needs.
            call.memory.release_all_but(COPIES_OF_COMMIT * len(result.artifact.content) if result.artifact else 0)
            return await shielded(self._commit(delivered, result, span), self._options.executor.commit_grace_s)

    async def _find_parked(self, delivered: _Delivered) -> ResultToCommit | None:
        """Return the result that an earlier run parked, None without one.

        After `max_lost_runs` lost runs it is ignored: if the database refuses it each time, the call would get none.
        """
        if not delivered.may_be_parked or delivered.delivery.exhausted:
            return None
        return await self._parked.find(delivered.call.identity)

    async def _run(self, delivered: _Delivered) -> ResultToCommit:
        """Run the call; every failure but Unavailable and CancelledError becomes its result."""
        delivery, call, records, limits = delivered.delivery, delivered.call, delivered.records, self._limits
        try:
            record = _runnable(delivered)
            default_deadline = limits.deadline(self._age_s(delivery), None)  # until the definition's limits are known
            definition = await self._runner.parse_definition(call, record, default_deadline)
            given = read_tool_call(records.card, call.identity.tool_call_id)
        except Exception as cause:  # noqa: BLE001 - logged by `failure_result`
            name = delivered.command.function_name
            return ResultToCommit(self._runner.failure_result(call, name, cause, started=delivered.facts.loaded))
        deadline = limits.deadline(self._age_s(delivery), definition.suspend_timeout_s, definition.timeout_s)
        # Once another call of the step has a result, the turn ends `worker_timeout_s` later. So a call that may take
        # longer than that looks for such results, by step id, and gets an earlier deadline when there is one.
        check_after_s = limits.worker_timeout_left_s(self._age_s(delivery))
        may_outlast = limits.may_outlast_worker_timeout(definition.suspend_timeout_s)
        if may_outlast and call.identity.step_id is not None and check_after_s < deadline.remaining():
            async with turn_deadline(self._kernel, limits, call.identity, check_after_s) as turn_limit:
                result = await self._runner.run(call, definition, given, Deadline(deadline.at, turn_limit))
        else:
            result = await self._runner.run(call, definition, given, deadline)
        if result.full_text is None:
            return ResultToCommit(result.fields)
        actor_id, ttl_s = self._options.actor_id, self._options.tools.artifact_ttl_s
        artifact = artifact_card(actor_id, call.identity, records.card, result.full_text, ttl_s)
        return ResultToCommit(result.fields, artifact)

    async def _commit(self, delivered: _Delivered, result: ResultToCommit, span: CallSpan) -> Settlement:
        """Commit once the worker is ready for the result, and publish the doorbell. Shielded as a whole."""
        delivery, acceptance = delivered.delivery, delivered.acceptance
        card = self._result_card(delivered, result)
        report = self._dialect.report(acceptance, span.context, span.tracestate, card.card_id, card.content)
        if not await self._write(delivered, result, card, report):
            return await self._settle_unwritten(delivered, result)
        if result.was_parked or delivery.exhausted:  # an exhausted call may have one that it ignored
            await self._parked.delete(delivered.call.identity)
        await self._send_doorbell(delivered, report.doorbell)
        record_finished(delivered.facts)
        if delivery.exhausted:
            # The turn has its failed result; the dead letter lets an operator find the command that ended executors.
            return StoreDeadLetter("attempts_exhausted", _EXHAUSTED, terminate=False)
        return Acknowledge()

    def _result_card(self, delivered: _Delivered, result: ResultToCommit) -> ResultCard:
        fields = result.fields
        return result_card(
            actor_id=self._options.actor_id,
            function_name=delivered.command.function_name,
            identity=delivered.call.identity,
            call_card=delivered.records.card,
            status=fields.status,
            after_execution=_after_execution(delivered),
            result=fields.result,
            error=fields.error,
            tool_output=fields.tool_output,
        )

    async def _write(self, delivered: _Delivered, result: ResultToCommit, card: ResultCard, report: Report) -> bool:
        """Write the rows of a result in the order of its turn; return whether they were written."""
        facts, began = delivered.facts, time.monotonic()
        turn = delivered.acceptance.waiting_turn
        wait = self._order.begin(delivered.delivery, delivered.call.identity, turn, delivered.slot)
        await self._order.wait_for_suspension(wait)
        written = await self._committer.store_or_park(wait, result, card, report)
        # Waits and attempts to write alternate. Telemetry shows one interval of each: all waits, then the rest. Of
        # wait 20 ms, write 5 ms, wait 30 ms, write 5 ms it shows 50 ms of waiting and a commit of 10 ms.
        facts.turn_s = wait.waited_s
        facts.commit = began + wait.waited_s, time.monotonic()
        return written

    async def _send_doorbell(self, delivered: _Delivered, doorbell: Doorbell | None) -> None:
        facts, began = delivered.facts, time.monotonic()
        await self._doorbell_sender.send(delivered.delivery, delivered.call.identity, delivered.records, doorbell)
        if doorbell is not None:
            facts.doorbell = began, time.monotonic()
            facts.doorbell_subject = doorbell.subject

    async def _delete_parked(self, identity: CallIdentity, *, may_be_parked: bool) -> None:
        """Delete the result that an earlier run may have parked. To look first is cheaper, as few have one."""
        if may_be_parked and await self._parked.find(identity):
            await self._parked.delete(identity)

    def _facts(self, delivery: Delivery, command: Command, call: Call, link: TraceLink, received: float) -> CallFacts:
        """Return what telemetry knows before the call runs; the lists of the call grow while it runs."""
        return CallFacts(
            ids=log_ids(call.identity),
            trace_id=link.parent.trace_id,
            protocol=self._dialect.version,
            function_name=short(command.function_name),
            delivery_attempt=delivery.number,
            age_s=max(0.0, self._age_s(delivery)),
            began=received,
            loaded=time.monotonic(),
            attempts=call.attempts,
            permit_waits=call.permit_waits,
        )

    def _age_s(self, delivery: Delivery) -> float:
        return self._clock() - delivery.published_at.timestamp()

    async def _settle_existing_result(
        self, delivery: Delivery, identity: CallIdentity, records: CallRecords, earlier: EarlierResult
    ) -> Settlement:
        """Settle a call that has a result card: complete a missing report, publish a missing doorbell.

        A result by another author is left alone, and a claimed inbox row gets no doorbell: a durable that is created
        again may redeliver the commands of a day. Raises ReportRefused.
        """
        if not earlier.is_of_this_call:
            raise ReportRefused(
                "id_collision",
                f"result {earlier.card_id!r} is of another tool call id with the same MD5, which must be unique",
            )
        metrics.DEDUPLICATED.inc()
        ours = earlier.author_id == self._options.actor_id and not earlier.is_deleted
        headers = earlier.report_headers  # None without an inbox row
        if ours and headers is not None and earlier.report_status in _UNCLAIMED_STATUSES:
            doorbell = self._dialect.doorbell(identity.project_id, records.worker_target, headers)
            await self._doorbell_sender.send(delivery, identity, records, doorbell)
        elif ours and headers is None and reportable_content(earlier.content):
            await self._complete_report(delivery, identity, records, earlier)
        log.info(
            "the call already has a result",
            extra={"action": "call.deduplicated", "author_id": short(earlier.author_id or "")} | log_ids(identity),
        )
        return Acknowledge()

    async def _complete_report(
        self, delivery: Delivery, identity: CallIdentity, records: CallRecords, earlier: EarlierResult
    ) -> None:
        """Write inbox row and edge of a result that has none, and publish its doorbell."""
        acceptance = self._dialect.accept(identity, records)
        with self._tracer.span("report", trace_link(identity, acceptance.waiting_turn), log_ids(identity)) as span:
            report = self._dialect.report(acceptance, span.context, span.tracestate, earlier.card_id, earlier.content)
            slot = self._slot_of(delivery.stream_sequence)
            wait = self._order.begin(delivery, identity, acceptance.waiting_turn, slot)
            write = partial(self._kernel.report, earlier.card_id, report)
            await self._order.write(wait, write, partial(self._kernel.is_turn_busy, report))
        await self._doorbell_sender.send(delivery, identity, records, report.doorbell)

    async def _settle_unwritten(self, delivered: _Delivered, result: ResultToCommit) -> Settlement:
        """Settle a call whose commit wrote nothing, by what is stored; if that does not explain it, park the result."""
        identity = delivered.call.identity
        try:
            settlement = await self._settle_by_what_is_stored(delivered)
        except (Exception, asyncio.CancelledError) as failure:
            if isinstance(failure, Unanswerable) or delivered.delivery.exhausted:  # no later delivery would commit it
                await self._delete_parked(identity, may_be_parked=delivered.may_be_parked)
            elif not result.was_parked:
                await self._parked.park(identity, result)
            raise
        await self._delete_parked(identity, may_be_parked=delivered.may_be_parked)
        return settlement

    async def _settle_by_what_is_stored(self, delivered: _Delivered) -> Settlement:
        """Settle a call that has another result. Raises Unanswerable if its turn no longer waits, else a defect."""
        identity = delivered.call.identity
        records = await self._kernel.load(delivered.command)
        if records.earlier is not None:
            return await self._settle_existing_result(delivered.delivery, identity, records, records.earlier)
        self._dialect.accept(identity, records)
        # Counts as a lost run; treated as an outage, it would be retried forever.
        raise InternalError("the result was not written, and neither another result nor a stale turn explains it")


def _runnable(delivered: _Delivered) -> DefinitionRecord:
    """Return the definition of a call that may run. Raises ToolError if it must not."""
    if delivered.delivery.exhausted:
        raise InternalError(_EXHAUSTED)
    if delivered.command.violation is not None:
        raise delivered.command.violation
    # A turn that is not suspended needs no doorbell, and so no worker.
    if delivered.records.worker_target is None and delivered.acceptance.waiting_turn.suspends:
        raise ToolMisconfigured(_NOT_IN_ROSTER)
    if delivered.records.definition is None:
        named = short(delivered.command.function_name)
        raise NotFound(f"This project has no tool named {named!r}; use one of the tools offered.")
    return delivered.records.definition


def _requests_of(call: Call) -> int:
    """Return the number of upstream requests, which the project's fair share is charged with.

    Each of the two counts can be too small: `attempts` ends at MAX_ATTEMPTS, and a request that identical calls share
    is in the `spent` of only one of them.
    """
    return max(call.spent.requests, len(call.attempts))


def _record_result(facts: CallFacts, call: Call, result: ResultToCommit) -> None:
    fields = result.fields
    # The run that parked a result has paid for it; this one logs its tokens.
    usage = (fields.tool_output or {}).get("usage") if result.was_parked else None
    facts.tool, facts.status, facts.error_code = fields.tool, fields.status, fields.error_code
    facts.tokens = usage["tokens"] if usage else call.spent.tokens
    facts.cached, facts.truncated = fields.cached, fields.truncated


def _after_execution(delivered: _Delivered) -> AfterExecution:
    stored, sent = stored_after_execution(delivered.records.definition), delivered.command.after_execution
    if stored and sent and stored != sent:
        log.warning(
            "the command's after_execution differs from the definition's; using the definition's",
            extra={"action": "after_execution.differs", "stored": stored, "sent": sent}
            | log_ids(delivered.call.identity),
        )
    return stored or sent or "suspend"
