"""The tools themselves: a definition and arguments in, an output out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from openapi_tool.jina.batch import batch_items, batch_output, item_arguments, without_secrets
from openapi_tool.jina.budget import ByteBudget, Grant, Room, most_memory
from openapi_tool.jina.cache import AnswerCache, cache_key
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.content import Masks, page_steps, search_steps
from openapi_tool.jina.failures import NOTHING_SECRET
from openapi_tool.jina.plan import Plan, plan_call
from openapi_tool.jina.request import UpstreamRequest, build_request
from openapi_tool.jina.retry import RetryOptions, with_retries
from openapi_tool.jina.stages import longest_s, within
from openapi_tool.jina.targets import TargetRules, checked_target
from openapi_tool.protocol.errors import ToolError
from openapi_tool.steps import Steps, Turns
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.redact import Redactor, of_call
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.catalogue import Mode
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.result import ToolOutput


@dataclass(frozen=True, slots=True)
class JinaOptions:
    """How requests are repeated, how many items a batch may have, how long answers are kept (seconds, bytes)."""

    retry: RetryOptions
    max_batch_items: int
    body_budget_bytes: int
    cache_ttl_s: float
    cache_bytes: int
    targets: TargetRules


class JinaTools:
    """Runs search and reader calls, of one item or of a batch.

    Answers are rendered without what was sent with their call, errors without anything that `redactor` knows.
    """

    def __init__(
        self,
        client: JinaClient,
        options: JinaOptions,
        redactor: Redactor = NOTHING_SECRET,
        turns: Turns | None = None,
    ) -> None:
        self._client = client
        self._options = options
        self._redactor = redactor
        self._turns = turns or Turns()
        self.budget = ByteBudget(options.body_budget_bytes, most_memory(client.max_response_bytes))
        self._cache = AnswerCache(options.cache_ttl_s, options.cache_bytes, self._turns)

    def memory(self) -> Grant:
        """What one call may hold of the memory for answers; a context manager, left once its result is committed."""
        return self.budget.grant()

    async def run(
        self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, memory: Grant
    ) -> ToolOutput:
        """Ask the upstream and render its answer, which `memory` then has room for. Raises ToolError."""
        items = batch_items(definition, arguments, self._options.max_batch_items)
        if items is None:
            return await self._run_one(definition, arguments, deadline, memory)
        async with asyncio.TaskGroup() as group:
            tasks = {
                item: group.create_task(
                    self._try(definition, item_arguments(definition, arguments, item), deadline, memory)
                )
                for item in dict.fromkeys(items)
            }
        outcomes = {item: task.result() for item, task in tasks.items()}
        return batch_output(items, outcomes, _masks_of(arguments, self._redactor).answer)

    async def _try(
        self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, memory: Grant
    ) -> ToolOutput | ToolError:
        """One item of a batch, whose failure is not that of its siblings."""
        try:
            return await self._run_one(definition, arguments, deadline, memory)
        except ToolError as error:
            return without_secrets(error, self._redactor)

    async def _run_one(
        self, definition: ToolDefinition, arguments: Arguments, deadline: Deadline, memory: Grant
    ) -> ToolOutput:
        plan = plan_call(definition, arguments)
        plan = _with_checked_target(plan, self._options.targets)
        deadline = deadline.shortened(definition.timeout_s).shortened(plan.timeout_s)
        deadline = deadline.shortened(longest_s(plan, definition.mode))

        request = build_request(definition, plan)

        async def ask() -> ToolOutput:
            with memory:  # also where this call is given up, but another waits for the same answer
                return await self._ask(definition, plan, request, arguments, deadline, memory.room())

        if plan.parameters.get("noCache") or plan.parameters.get("doNotTrack"):
            return await ask()
        return await self._cache.get(cache_key(definition, arguments, request), deadline, ask, memory.room())

    async def _ask(
        self,
        definition: ToolDefinition,
        plan: Plan,
        request: UpstreamRequest,
        arguments: Arguments,
        deadline: Deadline,
        room: Room,
    ) -> ToolOutput:
        """The answer, whatever number of requests it takes; all of them are counted, also where it fails.

        Each is `request` with the time that the upstream still has.
        """
        asked = 0

        async def fetch() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            metrics.UPSTREAM_REQUESTS.inc()
            timed = within(plan, definition.mode, deadline.remaining())
            sent = request if timed is plan else build_request(definition, timed)
            try:
                return await self._client.fetch(sent, arguments.api_key, deadline, room)
            except ToolError as error:
                room.clear()  # before the wait for the next request
                raise _without_frames(error) from None

        masks = _masks_of(arguments, self._redactor)
        try:
            rendering = _output(plan, definition.mode, await with_retries(fetch, self._options.retry, deadline), masks)
            output = await self._turns.run(rendering, room.body_bytes)
        except ToolError as error:
            room.clear()
            error.requests = asked
            metrics.UPSTREAM_TOKENS.inc(error.tokens)
            raise _without_frames(error) from None
        metrics.UPSTREAM_TOKENS.inc(output.usage.tokens)
        keep = not plan.parameters.get("doNotTrack")
        return replace(output, usage=replace(output.usage, requests=asked), keep=keep)


def _without_frames(error: ToolError) -> ToolError:
    """The error without the frames that it came through, whose variables are the answer.

    Error, traceback, task and waiting calls are a cycle, which lives on until garbage is collected.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _output(plan: Plan, mode: Mode, envelope: Mapping[str, Any], masks: Masks) -> Steps[ToolOutput]:
    if mode == "search":
        with_pages = plan.parameters.get("respondWith") != "no-content"
        return search_steps(envelope, str(plan.parameters.get("q", "")), with_pages=with_pages, masks=masks)
    return page_steps(envelope, masks)


def _masks_of(arguments: Arguments, redactor: Redactor) -> Masks:
    sent = (arguments.api_key, *arguments.secrets.values())
    return Masks(of_call(secret.get_secret_value() for secret in sent), redactor)


def _with_checked_target(plan: Plan, rules: TargetRules) -> Plan:
    """The plan with the address that is asked for; a search has none. Raises BadRequest or TargetRefused."""
    url = plan.parameters.get("url")
    if not isinstance(url, str):
        return plan
    return replace(plan, parameters={**plan.parameters, "url": checked_target(url, rules)})
