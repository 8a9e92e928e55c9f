"""Backend of the built-in tools: the part of a call that asks the upstream, for one item or for a batch of them.

The engine calls `JinaBackend.run` (`engine/ports.py`). For each item it does three things:

1. `prepared_item.py`: check the arguments and build the request;
2. `cache.py`: look for the response of an earlier or a concurrent call;
3. `attempts.py`: if there is none, send the request, again after a failure that may pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openapi_tool.concurrency.cancellation import shielded
from openapi_tool.engine.call import Call
from openapi_tool.jina.attempts import UpstreamSender
from openapi_tool.jina.batches import batch_items, batch_output, item_arguments
from openapi_tool.jina.byte_semaphore import ByteSemaphore, ResponseMemory
from openapi_tool.jina.cache import ResponseCache, cache_key
from openapi_tool.jina.call_advice import cost_advice, model_limits_time, time_advice
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.memory_estimates import max_call_memory
from openapi_tool.jina.options import CacheOptions, EgressOptions, RetryOptions
from openapi_tool.jina.prepared_item import prepare_item
from openapi_tool.jina.request_context import RequestContext
from openapi_tool.jina.resolved_parameters import without_unknown
from openapi_tool.jina.retries import Sleep
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.errors import ToolError, without_traceback
from openapi_tool.quotas.budgets import Budgets, CallAccounts, Spender
from openapi_tool.quotas.permits import Permits, Unlimited
from openapi_tool.telemetry import metrics
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import Meter, ToolOutput

_CANCEL_GRACE_S = 1.0  # that the items of a cancelled batch get to end


@dataclass(frozen=True, slots=True)
class JinaBackendOptions:
    """The sections of the settings that calls of the upstream depend on."""

    retry: RetryOptions
    cache: CacheOptions
    tools: ToolOptions
    url_policy: UrlPolicy
    egress: EgressOptions


class JinaBackend:
    """Runs search and reader calls, of one item or of a batch.

    Each request, also a retry, needs one of `permits` and is charged to `budgets`. Without either, nothing is limited.
    Only tests pass `sleep`, which waits between attempts.
    """

    def __init__(
        self,
        client: JinaClient,
        options: JinaBackendOptions,
        sleep: Sleep = asyncio.sleep,
        permits: Permits | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        self._options = options
        self._budgets = budgets
        self._cache = ResponseCache(options.cache)
        self._sender = UpstreamSender(client, permits or Unlimited(), options.retry, sleep)
        self.semaphore = ByteSemaphore(options.egress.body_budget_bytes, max_call_memory(client.max_response_bytes))
        metrics.RESPONSE_BYTES.set_function(lambda: self.semaphore.free_bytes)
        metrics.RESPONSE_WAITING.set_function(lambda: self.semaphore.waiting)

    def call_memory(self, project: str) -> ResponseMemory:
        """Return the memory of a new call, which holds nothing yet (`ToolBackend.call_memory`)."""
        return self.semaphore.for_call(project)

    @staticmethod
    def without_unknown(definition: ToolDefinition, arguments: Arguments) -> Arguments:
        """Drop the model's arguments that nobody knows (`ToolBackend.without_unknown`)."""
        return without_unknown(definition, arguments)

    async def run(self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call) -> ToolOutput:
        """Return the output of a call: of its one item, or of all items of its batch. Raises ToolError.

        The caller has entered `call.memory`.
        """
        call.accounts = self._accounts(definition, arguments, call)
        items = batch_items(definition, arguments, self._options.tools.max_batch_items)
        if items is None:
            output = await self._run_item(definition, arguments, deadline, call)
            return self._with_cost_advice(output, definition, arguments)
        outcomes = await self._run_batch(items, definition, arguments, deadline, call)
        return self._with_cost_advice(batch_output(items, outcomes), definition, arguments, list(outcomes))

    def _accounts(self, definition: ToolDefinition, arguments: Arguments, call: Call) -> CallAccounts | None:
        """Return the accounts that the call is charged to; None if neither settings nor definition set a budget."""
        budgets = self._budgets_of(definition)
        return None if budgets is None else budgets.accounts_of(_spender(definition, arguments, call))

    def known_budget(self, definition: ToolDefinition, arguments: Arguments, call: Call) -> Mapping[str, Any] | None:
        """Return what is known to be left of the call's budgets (`ToolBackend.known_budget`)."""
        budgets = self._budgets_of(definition)
        return None if budgets is None else budgets.known_left(_spender(definition, arguments, call)) or None

    def _budgets_of(self, definition: ToolDefinition) -> Budgets | None:
        """Return the budgets; None if neither settings nor definition set one."""
        budgets = self._budgets
        is_limited = budgets is not None and (budgets.limited or definition.budget is not None)
        return budgets if is_limited else None

    async def _run_batch(
        self, items: Sequence[str], definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call
    ) -> dict[str, ToolOutput | ToolError]:
        """Run all items of a batch at the same time, a repeated one once; return the outcome of each."""

        async def outcome_of(item: str) -> ToolOutput | ToolError:
            try:
                return await self._run_item(definition, item_arguments(definition, arguments, item), deadline, call)
            except ToolError as error:  # the other items continue
                return error

        tasks = {item: asyncio.create_task(outcome_of(item)) for item in dict.fromkeys(items)}
        await _wait_for_all(list(tasks.values()))
        return {item: task.result() for item, task in tasks.items()}

    async def _run_item(
        self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, call: Call
    ) -> ToolOutput:
        """Return the output of one item, from the cache or from the upstream. Raises ToolError.

        Its cost is in the output or in the error; `call.spent` gets the cost also if the item is cancelled.
        """
        options = self._options
        meter = Meter()
        is_limited_by_model = model_limits_time(definition, arguments, deadline)  # first, as the deadline comes nearer
        try:
            item = prepare_item(
                definition, arguments, deadline, call, options.url_policy, options.tools.default_max_tokens
            )
            if item.may_share:
                key = cache_key(definition, arguments, item.request)
                fetch = partial(self._sender.output_of, item)
                output = await self._cache.get(key, item.deadline, fetch, RequestContext(call, item.memory), meter)
            else:
                output = await self._sender.output_of(item, meter)
        except ToolError as error:
            error.tokens, error.requests = meter.tokens, meter.requests
            if error.timed_out:
                error.message += time_advice(definition, arguments, is_limited_by_model=is_limited_by_model)
            raise without_traceback(error) from None
        finally:
            call.spent += meter.usage
        usage = meter.usage
        # Of the calls that share one request, one reports its cost. For that call the output does not count as cached,
        # even if another one has started the request.
        return replace(output, usage=usage, cached=output.cached and not usage.requests)

    def _with_cost_advice(
        self, output: ToolOutput, definition: ToolDefinition, arguments: Arguments, batch: Sequence[str] = ()
    ) -> ToolOutput:
        """Add advice on how to lower a high cost; `batch` are the different items of a batch."""
        tokens = output.usage.tokens
        if tokens <= self._options.tools.cost_note_tokens:
            return output
        return replace(output, cost_advice=cost_advice(definition, arguments, batch, tokens))


def _spender(definition: ToolDefinition, arguments: Arguments, call: Call) -> Spender:
    project, agent = call.quota_agent
    return Spender(project, agent, arguments.session_identity, definition.tool_name, definition.budget)


async def _wait_for_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all tasks; if one raises, or the call is cancelled, cancel the others.

    Not a TaskGroup: before Python 3.13 it leaves its task marked as cancelled after a failure. The call would then be
    handed back, as one that was cancelled, instead of getting an error as its result.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        if not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            await shielded(asyncio.wait(tasks), _CANCEL_GRACE_S)
    # Ask each task for its exception, since asyncio logs those that nobody asks for.
    exceptions = [task.exception() for task in tasks if not task.cancelled()]
    defects = [exception for exception in exceptions if exception is not None]
    if defects:
        raise defects[0]
