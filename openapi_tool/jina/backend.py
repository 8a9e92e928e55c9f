"""Backend of the built-in tools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from openapi_tool.concurrency.cancellation import shielded
from openapi_tool.engine.call import Call
from openapi_tool.jina.batches import batch_items, batch_output, item_arguments
from openapi_tool.jina.byte_semaphore import ByteSemaphore, RequestContext, ResponseMemory, max_call_memory
from openapi_tool.jina.cache import ResponseCache, cache_key
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.costs import UnreadCosts
from openapi_tool.jina.endpoints import Endpoint, endpoint_of
from openapi_tool.jina.options import CacheOptions, EgressOptions, RetryOptions
from openapi_tool.jina.request import (
    ResolvedParameters,
    UpstreamRequest,
    build_request,
    changed_arguments,
    resolve_parameters,
    under_url_policy,
    with_max_tokens,
    without_unknown,
)
from openapi_tool.jina.response import NothingToShow, UpstreamResult
from openapi_tool.jina.retries import Sleep, retry_wait_s
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.errors import ToolError, without_traceback
from openapi_tool.quotas.budgets import Budgets, Reservation, Spender
from openapi_tool.quotas.key_record import KeyUse
from openapi_tool.quotas.permits import Permit, PermitRequest, Permits, Unlimited
from openapi_tool.quotas.refused_keys import RefusedKeys
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.metrics import project_label
from openapi_tool.telemetry.upstream_waits import UPSTREAM_WAITS
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import Meter, ToolOutput, Usage
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

_ADJUSTABLE = frozenset({"count", "max_tokens", "target_selector"})  # a remedy may suggest another value of these
_TIMEOUT = "timeout"

_MIN_WAIT_S = 0.001  # a shorter wait for a permit is not recorded, unless it ended without one
_CANCEL_GRACE_S = 1.0  # that the items of a cancelled call get to end


@dataclass(frozen=True, slots=True)
class JinaBackendOptions:
    """Settings sections for upstream calls."""

    retry: RetryOptions
    cache: CacheOptions
    tools: ToolOptions
    url_policy: UrlPolicy
    egress: EgressOptions


@dataclass(slots=True, eq=False)
class _Item:
    """One item of a call, with all that the attempts to request it need.

    `endpoint` says how a request of its operation is built. `deadline` is that of its requests, perhaps earlier than
    the call's. `memory` is `call.memory` with its real type.
    """

    definition: ToolDefinition
    arguments: Arguments
    endpoint: Endpoint
    resolved: ResolvedParameters
    request: UpstreamRequest
    deadline: Deadline
    call: Call
    memory: ResponseMemory

    @property
    def may_cache(self) -> bool:
        """Return whether the response may be shared: stored for later calls, or taken from an earlier one."""
        parameters = self.resolved.parameters
        return not (parameters.get("noCache") or parameters.get("doNotTrack"))

    @property
    def min_tokens(self) -> int:
        """Return the minimum charge for a successful request."""
        return self.endpoint.min_tokens(self.resolved.parameters)

    def permit_request(self) -> PermitRequest:
        """Return the request for a permit, one for all attempts: it records the keys that were refused."""
        return PermitRequest(
            variable=self.arguments.key_variable,
            endpoint=self.endpoint.operation.name,
            agent=self.call.quota_agent,
            deadline=self.deadline,
            key=self.arguments.api_key,
            slot=self.call.slot,
            call=self.call.number,
        )

    def timed_request(self) -> UpstreamRequest:
        """Return the request with a `timeout` that makes the upstream answer within the remaining time."""
        resolved = self.resolved
        definition = self.definition
        timed = self.endpoint.timeouts.within(
            resolved.parameters,
            self.deadline.remaining(),
            has_own_limit=resolved.timeout_s is not None or definition.timeout_s is not None,
        )
        if timed is resolved.parameters:
            return self.request
        return build_request(definition, replace(resolved, parameters=timed), self.request.expected.offered)


class JinaBackend:
    """Runs search and reader calls, of one item or of a batch.

    The secrets that were sent with a call are masked in the responses to it. Each request, also a retry, needs one of
    `permits` and is charged to `budgets`. Only tests pass `sleep`, which waits between attempts.
    """

    def __init__(
        self,
        client: JinaClient,
        options: JinaBackendOptions,
        sleep: Sleep = asyncio.sleep,
        permits: Permits | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        self._client = client
        self._permits = permits or Unlimited()
        self._budgets = budgets
        self._refused_keys = RefusedKeys()
        self._costs = UnreadCosts()
        self._sleep = sleep
        self._options = options
        self.semaphore = ByteSemaphore(options.egress.body_budget_bytes, max_call_memory(client.max_response_bytes))
        metrics.RESPONSE_BYTES.set_function(lambda: self.semaphore.free_bytes)
        metrics.RESPONSE_WAITING.set_function(lambda: self.semaphore.waiting)
        self._cache = ResponseCache(options.cache)

    def call_memory(self, project: str) -> ResponseMemory:
        """See `ToolBackend`."""
        return self.semaphore.for_call(project)

    @staticmethod
    def without_unknown(definition: ToolDefinition, arguments: Arguments) -> Arguments:
        """See `ToolBackend`."""
        return without_unknown(definition, arguments)

    async def run(self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call) -> ToolOutput:
        """Return the output of a call's requests, of one or of each item of a batch. Raises ToolError.

        The caller has entered `call.memory`.
        """
        if self._budgets is not None and (self._budgets.limited or definition.budget is not None):
            project, agent = call.quota_agent
            spender = Spender(project, agent, arguments.session_identity, definition.tool_name, definition.budget)
            call.accounts = self._budgets.accounts_of(spender)
        items = batch_items(definition, arguments, self._options.tools.max_batch_items)
        if items is None:
            output = await self._run_one(definition, arguments, deadline, call)
            return self._with_advice(output, definition, arguments, [])

        async def outcome(item: str) -> ToolOutput | ToolError:
            try:
                return await self._run_one(definition, item_arguments(definition, arguments, item), deadline, call)
            except ToolError as error:  # the other items continue
                return error

        tasks = {item: asyncio.create_task(outcome(item)) for item in dict.fromkeys(items)}
        await _wait_for_all(list(tasks.values()))
        outcomes = {item: task.result() for item, task in tasks.items()}
        return self._with_advice(batch_output(items, outcomes), definition, arguments, list(tasks))

    def _with_advice(
        self, output: ToolOutput, definition: ToolDefinition, arguments: Arguments, items: Sequence[str]
    ) -> ToolOutput:
        """Add advice on how to lower a high cost; `items` are those of a batch, else empty."""
        tokens = output.usage.tokens
        if tokens <= self._options.tools.cost_note_tokens:
            return output
        one = item_arguments(definition, arguments, items[0]) if items else arguments
        parameters = resolve_parameters(definition, one).parameters
        offers = _offered(definition, arguments).__contains__
        ways = endpoint_of(definition).cheaper(parameters, tokens, max(1, len(items)), offers)
        return replace(output, cost_advice=f" Cheaper: {' or '.join(ways)}." if ways else "")

    async def _run_one(
        self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call
    ) -> ToolOutput:
        """Run one item; report its cost in output or error, and to the call, also if it is cancelled."""
        meter = Meter()
        is_limited_by_model = _model_limits_time(definition, arguments, deadline)
        try:
            item = self._item(definition, arguments, deadline, call)
            if item.may_cache:
                key = cache_key(definition, arguments, item.request)
                context = item.memory.for_request(call)
                output = await self._cache.get(key, item.deadline, partial(self._request, item), context, meter)
            else:
                output = await self._request(item, meter)
        except ToolError as error:
            error.tokens, error.requests = meter.tokens, meter.requests
            if error.timed_out:
                error.message += _quicker(definition, arguments)
            if error.timed_out and is_limited_by_model:
                error.message += f" A longer {_TIMEOUT} may help."
            raise without_traceback(error) from None
        finally:
            call.spent += meter.usage
        usage = meter.usage
        # A call that joined another call's request is `cached`, unless it is the one of them that reports the cost.
        return replace(output, usage=usage, cached=output.cached and not usage.requests)

    def _item(self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call) -> _Item:
        """Map and check the arguments, shorten the deadline, and build the request. Raises ToolError."""
        given = resolve_parameters(definition, arguments)
        if given.left_out and not call.left_out_logged:
            call.left_out_logged = True  # the items of a batch leave out the same
            _log_left_out(definition, given.left_out)
        resolved = under_url_policy(given, definition, self._options.url_policy)
        call.repaired |= changed_arguments(definition, given, resolved)
        if (endpoint := endpoint_of(definition)).limits_tokens:
            resolved = with_max_tokens(resolved, self._options.tools.default_max_tokens)
        deadline = deadline.shortened(definition.timeout_s).shortened(resolved.timeout_s)
        deadline = deadline.shortened(endpoint.timeouts.longest_s(resolved.parameters))
        request = build_request(definition, resolved, _offered(definition, arguments))
        memory = cast("ResponseMemory", call.memory)  # of `call_memory`
        return _Item(definition, arguments, endpoint, resolved, request, deadline, call, memory)

    async def _request(self, item: _Item, meter: Meter) -> ToolOutput:
        """Send the request of an item, and again after each failure that a retry may mend. Raises ToolError.

        For each attempt reserve its estimated cost in the budgets, and wait for a permit. If either fails, nothing is
        sent, and there is no retry.
        """
        accounts = item.call.accounts
        wanted = item.permit_request()
        min_retry_s = item.endpoint.timeouts.min_s(item.resolved.parameters)
        with item.memory:  # keep the call's memory if the call ends while another one waits for this shared request
            context = item.memory.for_request(item.call)
            attempt_number = 0
            while True:
                attempt_number += 1
                reservation = None if accounts is None else await accounts.reserve(item.min_tokens, item.deadline)
                permit = await self._acquire(wanted, reservation, context)
                try:
                    result = await self._attempt(item, permit, reservation, context, meter, attempt_number)
                except ToolError as error:
                    left_s = item.deadline.remaining() - min_retry_s
                    wait_s = retry_wait_s(error, attempt_number, self._options.retry, left_s)
                    if wait_s is None:
                        raise without_traceback(error) from None
                else:
                    return _output(result, item.resolved.parameters, context)
                item.call.slot.pause()
                try:
                    await self._sleep(wait_s)
                finally:
                    item.call.slot.resume()

    async def _attempt(
        self,
        item: _Item,
        permit: Permit,
        reservation: Reservation | None,
        context: RequestContext,
        meter: Meter,
        number: int,
    ) -> UpstreamResult:
        """Send a request, and end its permit and reservation. Raises ToolError.

        Permit, budgets and `meter` get its real cost, also that of a failure; if it was cancelled, the estimate. An
        attempt that ends before its request is sent costs nothing. `number` counts from 1.
        """
        key = KeyUse(permit.variable, item.endpoint.operation.name)
        estimate = item.min_tokens if reservation is None else reservation.amount.tokens
        tokens: int | None = None  # cost of the request, unknown while it runs
        try:
            result = await self._send(item, permit, context, number, estimate)
        except ToolError as error:
            tokens = error.tokens
            if permit.is_sent and (retries_with_other_keys := permit.failed(error)):
                error.max_retries = max(retries_with_other_keys, error.max_retries)
                error.retry_after = 0.0
            self._refused_keys.record(key, error.http_status)
            raise
        else:
            tokens = result.usage.tokens
            permit.done(tokens)
            self._refused_keys.record_success(key)
            return result
        finally:
            if permit.is_sent:
                if tokens is None:  # the attempt was cancelled
                    permit.cancelled()
                _settle(item, reservation, meter, estimate, tokens)
            else:
                _give_back(permit, reservation)

    async def _acquire(self, wanted: PermitRequest, reservation: Reservation | None, context: RequestContext) -> Permit:
        """Wait for a permit; then check that the tool was not disabled meanwhile. Raises ToolError.

        If this fails, permit and reservation are given back.
        """
        begin = time.monotonic()
        permit = None
        try:
            permit = await self._permits.acquire(wanted)
            if context.call.recheck is not None:
                context.call.recheck()
        except BaseException:
            _give_back(permit, reservation)
            raise
        finally:
            # If no permit was granted, record a short wait, too: it shows where the call ended.
            if (end := time.monotonic()) - begin >= _MIN_WAIT_S or permit is None:
                context.record_permit_wait(begin, end)
        return permit

    async def _send(
        self, item: _Item, permit: Permit, context: RequestContext, attempt_number: int, estimate: int
    ) -> UpstreamResult:
        """Send the request now, with the remaining time as `timeout`, and record the attempt. Raises ToolError.

        `attempt_number` counts from 1; the request is expected to cost `estimate` tokens.
        """
        request = item.timed_request()
        attempt = UpstreamAttempt(time.monotonic(), request.method, request.host, resends=attempt_number - 1)
        context.record_attempt(attempt)
        item.call.slot.sending()
        UPSTREAM_WAITS.begin(attempt)
        try:
            result = await self._client.fetch(request, permit.key, item.deadline, context, permit.connected)
        except ToolError as error:
            _record_end(attempt, context, error.code)
            if permit.is_sent:
                self._costs.estimate_cost_of(error, item.endpoint, estimate, context.body_bytes)
            context.clear()  # hold no memory while waiting for a retry
            raise without_traceback(error) from None
        else:
            _record_end(attempt, context)
        finally:
            UPSTREAM_WAITS.end(attempt)
        self._costs.learn(item.endpoint, result.usage.tokens, context.body_bytes)
        return result


def _settle(item: _Item, reservation: Reservation | None, meter: Meter, estimate: int, tokens: int | None) -> None:
    """Count the cost of a request that was sent; None is unknown, and counts as the estimate."""
    if item.call.accounts is not None and tokens is not None:
        item.call.accounts.learn_cost(tokens)
    counted = estimate if tokens is None else tokens
    if reservation is not None:
        reservation.charge(counted)
    meter.add(Usage(counted, 1))
    metrics.UPSTREAM_REQUESTS.labels(item.definition.built_in.name).inc()
    metrics.UPSTREAM_TOKENS.labels(item.definition.built_in.name, project_label(item.call.project)).inc(counted)


def _give_back(permit: Permit | None, reservation: Reservation | None) -> None:
    """End an attempt whose request was not sent."""
    if permit is not None:
        permit.unsent()
    if reservation is not None:
        reservation.release()


def _output(result: UpstreamResult, parameters: Mapping[str, Any], context: RequestContext) -> ToolOutput:
    """Return the output of a successful request. Raises ToolError if there is nothing to show."""
    if isinstance(result, NothingToShow):
        context.clear()
        raise result.error
    if parameters.get("respondWith") == "markdown":
        result = replace(result, state={**result.state, "format": "markdown"})
    return replace(result, may_store=False) if parameters.get("doNotTrack") else result


async def _wait_for_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all tasks; if one raises, or the call is cancelled, cancel the others.

    Not a TaskGroup: before Python 3.13 it leaves its task marked as cancelled after a failure, and a cancelled call is
    handed back instead of getting an error result.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        if not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            await shielded(asyncio.wait(tasks), _CANCEL_GRACE_S)
    defects = [defect for task in tasks if not task.cancelled() and (defect := task.exception())]
    if defects:
        raise defects[0]


def _record_end(attempt: UpstreamAttempt, context: RequestContext, error_code: str | None = None) -> None:
    attempt.http_status = context.http_status
    attempt.end(time.monotonic(), error_code)
    metrics.UPSTREAM_SECONDS.labels(attempt.host, error_code or "").observe(attempt.seconds or 0.0)


def _log_left_out(definition: ToolDefinition, names: Sequence[str]) -> None:
    log.warning(
        "a definition has parameters that the upstream does not take; they are not sent: %s",
        "; ".join(names),
        extra={"action": "parameter.ignored", "tool_name": short(definition.tool_name)},
    )


def _model_limits_time(definition: ToolDefinition, arguments: Arguments, deadline: Deadline) -> bool:
    """Return whether the call would have more time without the model's own `timeout`."""
    given = arguments.values.get(_TIMEOUT) if _TIMEOUT in arguments.by_model else None
    return isinstance(given, int | float) and given < deadline.shortened(definition.timeout_s).remaining()


def _quicker(definition: ToolDefinition, arguments: Arguments) -> str:
    """Return advice on how to get an answer in time."""
    resolved = resolve_parameters(definition, arguments)
    offers = _offered(definition, arguments).__contains__
    ways = endpoint_of(definition).quicker(resolved.parameters, resolved.names, offers)
    return f" Ask for less: {', '.join(ways)}." if ways else ""


def _offered(definition: ToolDefinition, arguments: Arguments) -> frozenset[str]:
    """Return the arguments that advice may name: those that the model may give, and has not given or may change."""
    taken = {name for name, value in arguments.values.items() if value} - _ADJUSTABLE
    return definition.model_arguments - taken
