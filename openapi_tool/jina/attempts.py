"""The attempts to send the request of one item: the first, and one more after each failure that may pass.

Before an attempt sends, it takes two things. It ends each of them exactly once:

- a *reservation* of its estimated cost in the accounts of the call (`quotas/budgets.py`), if there are budgets;
- a *permit* of the rate limit of its key (`quotas/permits.py`).

How they end depends on what became of the request:

- It was sent and has an outcome, a response or an error: both learn its real cost.
- It was sent, then cancelled: both learn its estimated cost, since the real one is unknown.
- It was not sent: both are given back, and nothing is charged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.costs import UnreadCosts
from openapi_tool.jina.options import RetryOptions
from openapi_tool.jina.prepared_item import PreparedItem
from openapi_tool.jina.request_context import RequestContext
from openapi_tool.jina.response import NothingToShow, UpstreamResult
from openapi_tool.jina.retries import Sleep, retry_wait_s
from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.errors import ToolError, without_traceback
from openapi_tool.quotas.budgets import Reservation
from openapi_tool.quotas.key_record import KeyUse
from openapi_tool.quotas.permits import Permit, PermitRequest, Permits
from openapi_tool.quotas.refused_keys import RefusedKeys
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.metrics import project_label
from openapi_tool.telemetry.upstream_waits import UPSTREAM_WAITS
from openapi_tool.tools.output import Meter, ToolOutput, Usage

_MIN_RECORDED_WAIT_S = 0.001
"""A wait for a permit is recorded from this length on, and any wait that ended without a permit."""


class UpstreamSender:
    """Sends the requests of items, each as often as needed. `sleep` waits between two attempts."""

    def __init__(self, client: JinaClient, permits: Permits, retry: RetryOptions, sleep: Sleep) -> None:
        self._client = client
        self._permits = permits
        self._retry = retry
        self._sleep = sleep
        self._refused_keys = RefusedKeys()  # for the log: keys that the upstream refuses, and those it accepts again
        self._unread_costs = UnreadCosts()  # estimates the cost of requests whose response does not tell it

    async def output_of(self, item: PreparedItem, meter: Meter) -> ToolOutput:
        """Send the request of an item until an attempt succeeds. Raises ToolError once no retry may help.

        If no reservation or no permit can be had, nothing is sent, and there is no retry. `meter` gets the cost of
        every attempt.
        """
        accounts = item.call.accounts
        permit_request = item.permit_request()
        min_retry_s = item.min_retry_s  # must be left for a retry itself
        # A shared request may outlive the call that started it; until its end it keeps that call's memory.
        with item.memory:
            context = RequestContext(item.call, item.memory)
            number = 0
            while True:
                number += 1
                reservation = None
                if accounts is not None:  # reserves the average cost of the tool, at least `min_tokens`
                    reservation = await accounts.reserve(item.min_tokens, item.deadline)
                permit = await self._acquire(permit_request, reservation, context)
                attempt = _Attempt(item, number, permit, reservation, context, meter)
                try:
                    result = await self._run(attempt)
                except ToolError as error:
                    max_wait_s = item.deadline.remaining() - min_retry_s
                    wait_s = retry_wait_s(error, number, self._retry, max_wait_s)
                    if wait_s is None:
                        raise without_traceback(error) from None
                else:
                    return _output(result, item.resolved.parameters, context)
                item.call.slot.pause()  # another call may run in it meanwhile
                try:
                    await self._sleep(wait_s)
                finally:
                    item.call.slot.resume()

    async def _acquire(
        self, permit_request: PermitRequest, reservation: Reservation | None, context: RequestContext
    ) -> Permit:
        """Wait for a permit, then check that no operator has disabled the tool meanwhile. Raises ToolError.

        If this fails, permit and reservation are given back.
        """
        begin = time.monotonic()
        permit = None
        try:
            permit = await self._permits.acquire(permit_request)
            if context.call.recheck is not None:
                context.call.recheck()
        except BaseException:
            _give_back(permit, reservation)
            raise
        finally:
            end = time.monotonic()
            if permit is None or end - begin >= _MIN_RECORDED_WAIT_S:
                context.record_permit_wait(begin, end)
        return permit

    async def _run(self, attempt: _Attempt) -> UpstreamResult:
        """Send the request once, and end permit and reservation as the module says. Raises ToolError."""
        tokens: int | None = None  # cost of the request; a cancelled one leaves it None
        try:
            result = await self._send(attempt)
        except ToolError as error:
            tokens = error.tokens
            self._on_failure(attempt, error)
            raise
        else:
            tokens = result.usage.tokens
            self._on_success(attempt, tokens)
            return result
        finally:
            attempt.end(tokens)

    async def _send(self, attempt: _Attempt) -> UpstreamResult:
        """Send the request now, and record it in call, metrics and cost estimates. Raises ToolError."""
        item, permit, context = attempt.item, attempt.permit, attempt.context
        request = item.timed_request()  # its `timeout` is the time that is left now
        record = UpstreamAttempt(time.monotonic(), request.method, request.host, resends=attempt.number - 1)
        attempt.record = record
        context.record_attempt(record)
        item.call.slot.sending()  # from now on a process that is to stop waits for this call
        UPSTREAM_WAITS.begin(record)
        try:
            # The client calls `connected` once the request has a connection, which sets `permit.is_sent`.
            result = await self._client.fetch(request, permit.key, item.deadline, context, attempt.connected)
        except ToolError as error:
            _record_end(record, context, error.code)
            if permit.is_sent:
                self._unread_costs.set_cost_of(error, item.endpoint, attempt.estimated_tokens, context.body_bytes)
            context.clear()  # hold no memory while waiting for a retry
            raise without_traceback(error) from None
        else:
            _record_end(record, context)
        finally:
            UPSTREAM_WAITS.end(record)
        self._unread_costs.learn(item.endpoint, result.usage.tokens, context.body_bytes)
        return result

    def _on_success(self, attempt: _Attempt, tokens: int) -> None:
        attempt.permit.done(tokens)
        self._refused_keys.record_success(attempt.key_use)

    def _on_failure(self, attempt: _Attempt, error: ToolError) -> None:
        """End the permit of a request that was sent; if other keys of its pool may work, let retries use them at once.

        A pool is a group of keys that share their requests.
        """
        if attempt.permit.is_sent:
            retries_with_other_keys = attempt.permit.failed(error)
            if retries_with_other_keys:
                error.max_retries = max(retries_with_other_keys, error.max_retries)
                error.retry_after = 0.0
        self._refused_keys.record(attempt.key_use, error.http_status)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Attempt:
    """One attempt to send the request of an item, which has its permit and its reservation.

    - `number`: 1 for the item's first attempt.
    - `reservation`: None without budgets.
    - `context`: that of the request, which all its attempts share.
    - `meter`: counts the cost of the item.
    - `record`: what the call shows of it; None before it is sent.
    """

    item: PreparedItem
    number: int
    permit: Permit
    reservation: Reservation | None
    context: RequestContext
    meter: Meter
    record: UpstreamAttempt | None = None

    def connected(self) -> None:
        """Record that the request has its connection: from now on it counts as sent."""
        self.permit.connected()
        if self.record is not None:
            self.record.is_sent = True

    @property
    def estimated_tokens(self) -> int:
        """Expected cost of the request: what is reserved for it, else its minimum charge."""
        return self.item.min_tokens if self.reservation is None else self.reservation.amount.tokens

    @property
    def key_use(self) -> KeyUse:
        """The key that the request is sent with, and the operation that it is used for."""
        return KeyUse(self.permit.variable, self.item.endpoint.operation.name)

    def end(self, tokens: int | None) -> None:
        """End the reservation, and a permit whose request has no outcome; count the request and its cost.

        `tokens` is the cost of the request, None if it was cancelled.
        """
        if not self.permit.is_sent:
            _give_back(self.permit, self.reservation)
        elif tokens is None:
            self.permit.cancelled()
            self._count(self.estimated_tokens)
        else:
            if self.item.call.accounts is not None:
                self.item.call.accounts.learn_cost(tokens)  # for the reservations of later requests
            self._count(tokens)

    def _count(self, tokens: int) -> None:
        """Count one request that cost `tokens` in reservation, meter and metrics."""
        if self.reservation is not None:
            self.reservation.charge(tokens)
        self.meter.add(Usage(tokens, 1))
        tool = self.item.definition.built_in.name
        metrics.UPSTREAM_REQUESTS.labels(tool).inc()
        metrics.UPSTREAM_TOKENS.labels(tool, project_label(self.item.call.project)).inc(tokens)


def _give_back(permit: Permit | None, reservation: Reservation | None) -> None:
    """End an attempt whose request was not sent."""
    if permit is not None:
        permit.unsent()
    if reservation is not None:
        reservation.release()


def _record_end(record: UpstreamAttempt, context: RequestContext, error_code: str | None = None) -> None:
    """Record status, time and error of a request in the call and in the metrics."""
    record.http_status = context.http_status
    record.end(time.monotonic(), error_code)
    metrics.UPSTREAM_SECONDS.labels(record.host, error_code or "").observe(record.seconds or 0.0)


def _output(result: UpstreamResult, parameters: Mapping[str, Any], context: RequestContext) -> ToolOutput:
    """Return the output of a successful request, with its format for a UI, and whether it may be stored.

    Raises the error of a response that has nothing to show.
    """
    if isinstance(result, NothingToShow):
        context.clear()
        raise result.error
    if parameters.get("respondWith") == "markdown":
        result = replace(result, state={**result.state, "format": "markdown"})
    if parameters.get("doNotTrack"):
        result = replace(result, may_store=False)
    return result
