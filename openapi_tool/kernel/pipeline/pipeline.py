"""Pipeline for one delivery of a command: decode, load, run, commit, publish the doorbell.

A *command* asks for one tool call, and may be delivered more than once. A *turn* is a run of the kernel's agent; it is
suspended until its calls have their results. The pipeline returns a *settlement*: whether the command is acknowledged,
handed back for another delivery, or kept as a dead letter for an operator.

The steps have modules of their own: `call_runs` runs a call, `commit` writes its result in the order that
`result_order` sets, `doorbell_sender` wakes the worker. `existing_results` settles a call that needs no run.

A result that could not be committed is *parked*: stored in NATS, so that the next delivery of the command commits it
without another run (`parked_results`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from openapi_tool.concurrency.cancellation import raise_if_cancelled, shielded
from openapi_tool.concurrency.keyed_lock import KeyedLock
from openapi_tool.engine.call import Call
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.kernel.pipeline.call_runs import EXHAUSTED, CallRuns, requests_of
from openapi_tool.kernel.pipeline.commit import ResultCommitter
from openapi_tool.kernel.pipeline.delivered_call import DeliveredCall
from openapi_tool.kernel.pipeline.doorbell_sender import DoorbellSender
from openapi_tool.kernel.pipeline.existing_results import ExistingResults
from openapi_tool.kernel.pipeline.parked_results import ParkedResults
from openapi_tool.kernel.pipeline.ports import CallSlot, Clock, Kernel, Publisher, Tracer
from openapi_tool.kernel.pipeline.result_order import ResultOrder
from openapi_tool.kernel.pipeline.result_to_commit import ResultToCommit
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.cards import ResultCard, result_card
from openapi_tool.protocol.command import AfterExecution, Command, Delivery
from openapi_tool.protocol.dialect import Dialect
from openapi_tool.protocol.errors import Unanswerable, Unavailable
from openapi_tool.protocol.identity import CallIdentity, identify, unidentified
from openapi_tool.protocol.report import Doorbell, Report, trace_link
from openapi_tool.protocol.settlement import Acknowledge, HandBack, Settlement, StoreDeadLetter
from openapi_tool.protocol.tracing import TraceLink
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import CallFacts, record_finished
from openapi_tool.telemetry.logs import CALL_FIELDS
from openapi_tool.telemetry.spans import CallSpan
from openapi_tool.tools.definition import stored_after_execution
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.output import COPIES_OF_COMMIT
from openapi_tool.tools.time_limits import TimeLimits
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

MAX_WITHOUT_BODY = 20
"""Deliveries of a command without its body are handed back before this one, until the server sends the body, too.

A publisher can forge the header that says that the server left the body out. So this delivery is handled as it is.
"""


class UnexplainedRefusal(Exception):
    """The database did not write a result, and neither another result nor a turn that is over explains that."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Author of the result cards (`actor_id`), and the sections of the settings with the limits of a call."""

    actor_id: str
    executor: ExecutorOptions
    tools: ToolOptions


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
        executor = options.executor
        actor_id = options.actor_id
        limits = TimeLimits(executor, options.tools)
        # A call ends `commit_margin_s` before its turn's deadline. Its result may wait for half of that time for its
        # order; the other half is for the commit.
        order = ResultOrder(executor.min_result_delay_s, executor.commit_margin_s / 2, clock)
        self._executor = executor
        self._actor_id = actor_id
        # Interfaces to other packages. The dialect is the code for one version of the kernel's protocol.
        self._dialect = dialect
        self._kernel = kernel
        self._runner = runner
        self._tracer = tracer
        self._clock = clock
        self._slot_of = slot_of
        # Parts of the pipeline.
        self._call_locks = KeyedLock()  # by project and call
        self._order = order
        self._parked = parked
        self._call_runs = CallRuns(runner, kernel, limits, clock, actor_id, options.tools.artifact_ttl_s)
        self._committer = ResultCommitter(kernel, parked, order, executor.commit_retry_timeout_s)
        self._doorbell_sender = DoorbellSender(publisher, clock, limits)
        self._existing_results = ExistingResults(actor_id, dialect, kernel, order, self._doorbell_sender, tracer)

    async def handle(self, delivery: Delivery) -> Settlement:
        """Handle one delivery and return its settlement; raises only CancelledError."""
        try:
            return await self._answer(delivery)
        except Unanswerable as refusal:
            return StoreDeadLetter(refusal.reason, refusal.message, terminate=refusal.terminate)
        except Unavailable as outage:
            metrics.REQUEUED.inc()  # counts the commands that an outage hands back
            # `problem` lacks the remedy, as this reason is logged for each command. The health report logs both once.
            return HandBack(self._executor.requeue_delay_s, reason=outage.problem)
        except Exception as defect:
            raise_if_cancelled(defect)  # if a cancellation caused it, this is no defect
            sequence = delivery.stream_sequence
            log.exception("internal error", extra={"action": "call.broken", "stream_sequence": sequence})
            if delivery.exhausted:  # `max_lost_runs` runs were lost, so no further run is tried
                return StoreDeadLetter("defect", "an internal error of the executor prevented a result", terminate=True)
            return HandBack(self._executor.requeue_delay_s, defect=True, reason="internal error")

    async def _answer(self, delivery: Delivery) -> Settlement:
        """Answer a command once no copy of it runs in this process. Raises Unanswerable, Unavailable, a defect."""
        received = time.monotonic()
        if delivery.lacks_body and delivery.number < MAX_WITHOUT_BODY:
            delay_s = delivery.number * self._executor.requeue_delay_s  # longer each time: an operator must act
            return HandBack(delay_s, reason="delivered without its body: the durable has headers_only set")
        command = self._dialect.decode(delivery)
        call_id = command.identity.tool_call_id or command.card_id
        if call_id is None:  # no record can be found
            raise unidentified()
        # Copies of a command run one after the other. Two at the same time would share one upstream request, and one of
        # them might commit the result while the other one counts the cost.
        async with self._call_locks.hold((command.identity.project_id, call_id)) as waited:
            may_be_parked = waited or delivery.number > 1  # a copy that waited follows a run, as a redelivery does
            return await self._load_and_answer(delivery, command, received, may_be_parked=may_be_parked)

    async def _load_and_answer(
        self, delivery: Delivery, command: Command, received: float, *, may_be_parked: bool
    ) -> Settlement:
        """Load the rows of a command. Run its call if it has no result yet and a turn accepts one.

        `received` is when the delivery reached the pipeline, on the monotonic clock. `may_be_parked` says whether an
        earlier run may have parked a result.
        """
        records = await self._kernel.load(command)
        identity = identify(command.identity, records.card)
        slot = self._slot_of(delivery.stream_sequence)
        if records.earlier is not None:
            await self._delete_parked(identity, may_be_parked=may_be_parked)
            return await self._existing_results.settle(delivery, identity, records, records.earlier, slot)
        try:
            acceptance = self._dialect.accept(identity, records)
        except Unanswerable:
            await self._delete_parked(identity, may_be_parked=may_be_parked)
            raise
        call = self._runner.new_call(identity, slot)
        link = trace_link(identity, acceptance.waiting_turn)
        delivered = DeliveredCall(
            delivery=delivery,
            command=command,
            records=records,
            acceptance=acceptance,
            call=call,
            slot=slot,
            facts=self._facts_before_run(delivery, command, call, link, received),
            may_be_parked=may_be_parked,
        )
        return await self._run_and_commit(delivered, link)

    async def _delete_parked(self, identity: CallIdentity, *, may_be_parked: bool) -> None:
        """Delete the result that an earlier run may have parked. To look first is cheaper, as few calls have one."""
        if may_be_parked and await self._parked.find(identity):
            await self._parked.delete(identity)

    def _facts_before_run(
        self, delivery: Delivery, command: Command, call: Call, link: TraceLink, received: float
    ) -> CallFacts:
        """Return what telemetry knows before the call runs; `attempts` and `permit_waits` are filled while it runs."""
        loaded = time.monotonic()
        age_when_loaded_s = self._clock() - delivery.published_at.timestamp()
        return CallFacts(
            ids=log_ids(call.identity),
            trace_id=link.parent.trace_id,
            protocol=self._dialect.version,
            function_name=short(command.function_name),
            delivery_attempt=delivery.number,
            age_s=max(0.0, age_when_loaded_s - (loaded - received)),
            began=received,
            loaded=loaded,
            attempts=call.attempts,
            permit_waits=call.permit_waits,
        )

    async def _run_and_commit(self, delivered: DeliveredCall, link: TraceLink) -> Settlement:
        """Run a call, or find its parked result, and commit the result; its span continues the trace of `link`."""
        call, facts = delivered.call, delivered.facts
        CALL_FIELDS.set(facts.fields)
        span_name = f"execute_tool {facts.function_name}"
        # The span begins when the command arrived in the stream. That moment is known on the server's clock only, and
        # spans use the monotonic clock. `age_s` is how long before `began` the command arrived.
        arrived_at = facts.began - facts.age_s
        with self._tracer.span(span_name, link, facts.ids, arrived_at) as span, call.memory:  # released at the end
            span.facts = facts
            result = await self._find_parked(delivered)
            if result is None:
                result = await self._call_runs.run(delivered)
            delivered.slot.requests = requests_of(call)  # the consumer reads the number when the call ends
            _record_result(facts, call, result)
            # Release the memory of responses, except what the commit needs.
            artifact_bytes = len(result.artifact.content) if result.artifact else 0
            call.memory.release_all_but(COPIES_OF_COMMIT * artifact_bytes)
            return await shielded(self._commit(delivered, result, span), self._executor.commit_grace_s)

    async def _find_parked(self, delivered: DeliveredCall) -> ResultToCommit | None:
        """Return the result that an earlier run parked, None without one.

        After `max_lost_runs` lost runs it is ignored: if the database refuses it each time, the call would get none.
        """
        if not delivered.may_be_parked or delivered.delivery.exhausted:
            return None
        return await self._parked.find(delivered.call.identity)

    async def _commit(self, delivered: DeliveredCall, result: ResultToCommit, span: CallSpan) -> Settlement:
        """Commit once the worker is ready for the result, and publish the doorbell.

        The caller shields all of this: a cancellation in between would leave a result without its doorbell.
        """
        delivery = delivered.delivery
        card = self._result_card(delivered, result)
        report = self._dialect.report(delivered.acceptance, span.context, span.tracestate, card.card_id, card.content)
        if not await self._write(delivered, result, card, report):
            return await self._settle_unwritten(delivered, result)
        if result.was_parked or delivery.exhausted:  # an exhausted call may have a parked result that it ignored
            await self._parked.delete(delivered.call.identity)
        await self._send_doorbell(delivered, report.doorbell)
        record_finished(delivered.facts)
        if delivery.exhausted:
            # The turn has its failed result; the dead letter lets an operator find the command that killed executors.
            return StoreDeadLetter("attempts_exhausted", EXHAUSTED, terminate=False)
        return Acknowledge()

    def _result_card(self, delivered: DeliveredCall, result: ResultToCommit) -> ResultCard:
        fields = result.fields
        return result_card(
            actor_id=self._actor_id,
            function_name=delivered.command.function_name,
            identity=delivered.call.identity,
            call_card=delivered.records.card,
            status=fields.status,
            after_execution=_after_execution(delivered),
            result=fields.result,
            error=fields.error,
            tool_output=fields.tool_output,
        )

    async def _write(self, delivered: DeliveredCall, result: ResultToCommit, card: ResultCard, report: Report) -> bool:
        """Write the rows of a result in the order of its turn, and not before the turn is suspended.

        Return whether they were written. Raises the failure of a write, after the result was parked if possible.
        """
        facts = delivered.facts
        began = time.monotonic()
        turn = delivered.acceptance.waiting_turn
        wait = self._order.begin(delivered.delivery, delivered.call.identity, turn, delivered.slot)
        await self._order.wait_for_suspension(wait)
        written = await self._committer.store_or_park(wait, result, card, report)
        # Waits and attempts to write alternate. Telemetry shows one interval of each: all waits, then the rest. Of
        # wait 20 ms, write 5 ms, wait 30 ms, write 5 ms it shows 50 ms of waiting and a commit of 10 ms.
        facts.turn_s = wait.waited_s
        facts.commit = began + wait.waited_s, time.monotonic()
        return written

    async def _send_doorbell(self, delivered: DeliveredCall, doorbell: Doorbell | None) -> None:
        """Publish the doorbell; it is None if no worker can be addressed."""
        facts = delivered.facts
        began = time.monotonic()
        await self._doorbell_sender.send(delivered.delivery, delivered.call.identity, delivered.records, doorbell)
        if doorbell is not None:
            facts.doorbell = began, time.monotonic()
            facts.doorbell_subject = doorbell.subject

    async def _settle_unwritten(self, delivered: DeliveredCall, result: ResultToCommit) -> Settlement:
        """Settle a call whose commit wrote nothing, by what is stored; if that does not explain it, park the result."""
        identity = delivered.call.identity
        try:
            settlement = await self._settle_by_what_is_stored(delivered)
        except (Exception, asyncio.CancelledError) as failure:
            is_over = isinstance(failure, Unanswerable) or delivered.delivery.exhausted
            if is_over:  # no later delivery would commit the result
                await self._delete_parked(identity, may_be_parked=delivered.may_be_parked)
            elif not result.was_parked:
                await self._parked.park(identity, result)
            raise
        await self._delete_parked(identity, may_be_parked=delivered.may_be_parked)
        return settlement

    async def _settle_by_what_is_stored(self, delivered: DeliveredCall) -> Settlement:
        """Load the rows again, and settle a call that has another result by now.

        Raises Unanswerable if its turn no longer waits. If neither is so, raises UnexplainedRefusal: as a defect the
        call is tried again a few times; as an outage it would be retried forever.
        """
        delivery, identity = delivered.delivery, delivered.call.identity
        records = await self._kernel.load(delivered.command)
        if records.earlier is not None:
            return await self._existing_results.settle(delivery, identity, records, records.earlier, delivered.slot)
        self._dialect.accept(identity, records)
        raise UnexplainedRefusal("the result was not written, and neither another result nor a stale turn explains it")


def _record_result(facts: CallFacts, call: Call, result: ResultToCommit) -> None:
    fields = result.fields
    facts.tool = fields.tool
    facts.status = fields.status
    facts.error_code = fields.error_code
    facts.cached = fields.cached
    facts.truncated = fields.truncated
    facts.tokens = call.spent.tokens
    # The run that parked a result has paid for it, but has not logged its tokens; this run does.
    if result.was_parked and fields.tool_output is not None:
        usage = fields.tool_output.get("usage")
        if usage:
            facts.tokens = usage["tokens"]


def _after_execution(delivered: DeliveredCall) -> AfterExecution:
    """Return what the turn does after the result: as the definition says, else the command, else `suspend`."""
    stored = stored_after_execution(delivered.records.definition)
    sent = delivered.command.after_execution
    if stored and sent and stored != sent:
        log.warning(
            "the command's after_execution differs from the definition's; using the definition's",
            extra={"action": "after_execution.differs", "stored": stored, "sent": sent}
            | log_ids(delivered.call.identity),
        )
    return stored or sent or "suspend"
