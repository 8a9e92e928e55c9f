"""Response cache with single-flight: identical concurrent calls of one session share one request."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import secrets
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cachetools import TTLCache

from openapi_tool.concurrency.cancellation import shielded
from openapi_tool.concurrency.long_steps import without_other_long_steps
from openapi_tool.jina.byte_semaphore import RequestContext, memory_to_hold
from openapi_tool.jina.failures import too_late
from openapi_tool.jina.options import CacheOptions
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.response import pack_output, unpack_output
from openapi_tool.protocol.errors import ToolError, ToolTimeout, without_traceback
from openapi_tool.protocol.payload import unpack
from openapi_tool.telemetry import metrics
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.inline_bounds import SMALL
from openapi_tool.tools.output import COPIES_OF_COMMIT, NO_USAGE, Meter, ToolOutput, items_chars, texts

_ENTRY_OVERHEAD_BYTES = 480  # of an entry beside its response: key, links, dictionary slots
_END_S = 1.0  # of a cancelled request, if its call is cancelled again
_HASH_KEY = secrets.token_bytes(32)

Fetch = Callable[[Meter], Coroutine[Any, Any, ToolOutput]]


def cache_key(definition: ToolDefinition, arguments: Arguments, request: UpstreamRequest) -> bytes:
    """Return a keyed hash, as the body may contain secrets, of all that determines response and owner (protocol 5).

    The session identity stands for project, agent and session alias; the tool's name stands for its API key.
    """
    parts = (
        arguments.session_identity,
        definition.tool_name,
        definition.operation.name,
        request.method,
        request.host,
        request.target,
        sorted(request.headers.items()),
        request.body,
    )
    return hashlib.blake2b(repr(parts).encode(), key=_HASH_KEY, digest_size=32).digest()


@dataclass(slots=True)
class _InFlightRequest:
    """Shared request, number of calls `waiting` for it, and in `meter` its cost that none of them has reported yet.

    Its task returns a ToolError instead of raising it: each call that waits raises a copy of its own.
    """

    key: bytes
    task: asyncio.Task[ToolOutput | ToolError]
    meter: Meter
    waiting: int = 0


class ResponseCache:
    """Successful responses by key, for `ttl_s` seconds (0 disables the cache), at most `max_bytes` in all.

    Responses are cached packed: one object of known size instead of dozens.
    """

    def __init__(self, options: CacheOptions) -> None:
        self._responses: TTLCache[bytes, bytes] = TTLCache(options.max_bytes, options.ttl_s, getsizeof=_size)
        self._options = options
        self._in_flight: dict[bytes, _InFlightRequest] = {}

    async def get(
        self,
        key: bytes,
        deadline: Deadline,
        fetch: Fetch,
        context: RequestContext,
        meter: Meter,
    ) -> ToolOutput:
        """Return the cached response, that of an identical request in flight, or that of `fetch`. Raises ToolError.

        `context` holds the memory of a cached or shared response; `fetch` reserves memory itself. Of calls that share a
        request, the first to end gets the cost so far in its `meter`, so each request is reported once.
        """
        if not self._options.ttl_s > 0:
            return await fetch(meter)
        if (cached := self._responses.get(key)) is not None:
            await _hold(context, memory_to_hold(cached), deadline)
            await without_other_long_steps(len(cached))
            metrics.CACHE_HITS.inc()
            return replace(unpack_output(unpack(cached)), usage=NO_USAGE, cached=True)
        joined = key in self._in_flight
        pending = self._in_flight[key] if joined else self._start(key, fetch)
        outcome = await self._wait(pending, deadline, meter)
        if joined and isinstance(outcome, ToolTimeout) and deadline.remaining() > 0:
            # The request ended at the deadline of the call that started it, which was earlier than this one: try again.
            return await self.get(key, deadline, fetch, context, meter)
        if isinstance(outcome, ToolError):
            raise copy.copy(outcome)
        if not joined:
            return outcome
        needed = _commit_memory(outcome)
        if not context.try_hold(needed):
            # Until this call holds memory of its own, the output occupies that of the call that started the request. So
            # drop the output, and look it up after the wait.
            del outcome, pending
            await _hold(context, needed, deadline)
            return await self.get(key, deadline, fetch, context, meter)
        metrics.CACHE_HITS.inc()
        return replace(outcome, cached=True, usage=NO_USAGE)

    def _start(self, key: bytes, fetch: Fetch) -> _InFlightRequest:
        metrics.CACHE_MISSES.inc()
        meter = Meter()
        task = asyncio.create_task(self._run(key, fetch(meter)))
        pending = self._in_flight[key] = _InFlightRequest(key, task, meter)
        pending.task.add_done_callback(lambda _: self._on_done(pending))
        return pending

    async def _run(self, key: bytes, request: Coroutine[Any, Any, ToolOutput]) -> ToolOutput | ToolError:
        try:
            output = await request
        except ToolError as error:
            return without_traceback(error)
        if (size := items_chars(output.items)) <= self._options.max_bytes:
            with suppress(asyncio.CancelledError):  # it is paid for, so store it all the same
                await without_other_long_steps(size)
            packed = pack_output(output)
            if _size(packed) <= self._options.max_bytes:
                self._responses[key] = packed
                metrics.CACHE_BYTES.set(self._responses.currsize)
        return output

    def _on_done(self, pending: _InFlightRequest) -> None:
        self._remove(pending)
        if not pending.task.cancelled():
            pending.task.exception()  # mark as retrieved, else asyncio logs it if no call waits any more

    def _remove(self, pending: _InFlightRequest) -> None:
        if self._in_flight.get(pending.key) is pending:
            del self._in_flight[pending.key]

    async def _wait(self, pending: _InFlightRequest, deadline: Deadline, meter: Meter) -> ToolOutput | ToolError:
        """Return the outcome of a shared request. Raises ToolTimeout if the deadline comes first."""
        pending.waiting += 1
        try:
            async with deadline.limit():
                return await asyncio.shield(pending.task)
        except TimeoutError:
            raise too_late() from None
        finally:
            pending.waiting -= 1
            if not pending.waiting:
                self._remove(pending)  # first, so that no call joins a cancelled request
                if pending.task.cancel():
                    await shielded(asyncio.wait([pending.task]), _END_S)  # then its cost is known
            meter.add(pending.meter.take())


async def _hold(context: RequestContext, size: int, deadline: Deadline) -> None:
    try:
        async with deadline.limit():
            await context.hold(size)
    except TimeoutError:
        raise too_late() from None


def _commit_memory(output: ToolOutput) -> int:
    """Return the bytes that a call needs to commit a shared response."""
    size = sum(map(sys.getsizeof, texts(output.items)))
    return COPIES_OF_COMMIT * size if size > SMALL else 0


def _size(packed: bytes) -> int:
    return len(packed) + _ENTRY_OVERHEAD_BYTES
