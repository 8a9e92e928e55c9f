"""Response cache: equal calls of one session share a response, also while its request runs.

The call that comes first *starts* the request, and equal calls that come meanwhile *join* it. The request runs in a
task of its own, so it goes on while any of these calls waits for it. Its cost is reported by one call, the first whose
wait ends.
"""

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
from openapi_tool.jina.failures import too_late
from openapi_tool.jina.memory_estimates import memory_to_hold
from openapi_tool.jina.options import CacheOptions
from openapi_tool.jina.packed_output import pack_output, unpack_output
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.request_context import RequestContext
from openapi_tool.protocol.errors import ToolError, ToolTimeout, without_traceback
from openapi_tool.protocol.payload import unpack
from openapi_tool.telemetry import metrics
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.inline_bounds import SMALL
from openapi_tool.tools.output import COPIES_OF_COMMIT, NO_USAGE, Meter, ToolOutput, items_chars, texts

_ENTRY_OVERHEAD_BYTES = 480  # of an entry beside its response: key, links, dictionary slots
_CANCEL_GRACE_S = 1.0  # that a cancelled request gets to end
_HASH_KEY = secrets.token_bytes(32)  # of this process: the cache is in its memory

Fetch = Callable[[Meter], Coroutine[Any, Any, ToolOutput]]
"""Sends a request and returns its output; it counts the cost in the meter."""


def cache_key(definition: ToolDefinition, arguments: Arguments, request: UpstreamRequest) -> bytes:
    """Return a hash of all that determines a response and who may see it (protocol 5).

    - The session identity stands for project, agent and session.
    - The tool's name stands for its API key.
    - The hash is keyed, since the body may contain secrets that a plain hash would let others guess.
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
    """A request that runs, and that calls share.

    - `task` returns the outcome. It returns a ToolError instead of raising it, since each call raises a copy.
    - `meter` has the cost that no call has reported yet.
    - `waiting` is the number of calls that wait for the outcome.
    """

    key: bytes
    task: asyncio.Task[ToolOutput | ToolError]
    meter: Meter
    waiting: int = 0


class ResponseCache:
    """Outputs of successful requests by key: for `ttl_s` seconds (0 disables the cache), and of at most `max_bytes`.

    An output is stored as packed bytes, whose size is known; as objects it would be dozens of them.
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
        """Return the cached output, that of an equal request in flight, or that of `fetch`. Raises ToolError.

        `fetch` reserves the memory of its response itself; for any other output `context` holds the memory. `meter`
        gets the cost of the request if this call is the one that reports it.
        """
        if not self._options.ttl_s > 0:
            return await fetch(meter)
        cached = self._responses.get(key)
        if cached is not None:
            await _hold(context, memory_to_hold(cached), deadline)
            await without_other_long_steps(len(cached))
            metrics.CACHE_HITS.inc()
            return replace(unpack_output(unpack(cached)), usage=NO_USAGE, cached=True)
        joined = key in self._in_flight
        pending = self._in_flight[key] if joined else self._start(key, fetch)
        outcome = await self._wait(pending, deadline, meter)
        if joined and isinstance(outcome, ToolTimeout) and deadline.remaining() > 0:
            # The request ended at the deadline of the call that started it. This call has more time: try again.
            return await self.get(key, deadline, fetch, context, meter)
        if isinstance(outcome, ToolError):
            raise copy.copy(outcome)
        if not joined:
            return outcome
        needed = _commit_memory(outcome)
        if not context.try_hold(needed):
            # The output is in the memory of the call that started the request, until this call holds memory of its own.
            # Do not keep it there while this call waits for memory: drop it, and look it up afterwards.
            del outcome, pending
            await _hold(context, needed, deadline)
            return await self.get(key, deadline, fetch, context, meter)
        metrics.CACHE_HITS.inc()
        return replace(outcome, cached=True, usage=NO_USAGE)

    def _start(self, key: bytes, fetch: Fetch) -> _InFlightRequest:
        """Start a request that equal calls can join."""
        metrics.CACHE_MISSES.inc()
        meter = Meter()
        task = asyncio.create_task(self._run(key, fetch(meter)))
        pending = self._in_flight[key] = _InFlightRequest(key, task, meter)
        pending.task.add_done_callback(lambda _: self._on_done(pending))
        return pending

    async def _run(self, key: bytes, request: Coroutine[Any, Any, ToolOutput]) -> ToolOutput | ToolError:
        """Wait for the request, and store its output if the cache has room for it. Return output or error."""
        try:
            output = await request
        except ToolError as error:
            return without_traceback(error)
        size = items_chars(output.items)
        if size <= self._options.max_bytes:  # else its bytes are even more
            with suppress(asyncio.CancelledError):  # it is paid, so store it all the same
                await without_other_long_steps(size)
            packed = pack_output(output)
            if _size(packed) <= self._options.max_bytes:
                self._responses[key] = packed
                metrics.CACHE_BYTES.set(self._responses.currsize)
        return output

    def _on_done(self, pending: _InFlightRequest) -> None:
        self._remove(pending)
        if not pending.task.cancelled():
            pending.task.exception()  # asyncio logs an exception that nobody asks for, and perhaps no call waits

    def _remove(self, pending: _InFlightRequest) -> None:
        if self._in_flight.get(pending.key) is pending:
            del self._in_flight[pending.key]

    async def _wait(self, pending: _InFlightRequest, deadline: Deadline, meter: Meter) -> ToolOutput | ToolError:
        """Return the outcome of a shared request. Raises ToolTimeout if the deadline comes first.

        The last call that gives up waiting cancels the request. The first whose wait ends takes the cost into `meter`.
        """
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
                if pending.task.cancel():  # it still ran
                    await shielded(asyncio.wait([pending.task]), _CANCEL_GRACE_S)  # then its cost is known
            meter.add(pending.meter.take())


async def _hold(context: RequestContext, size: int, deadline: Deadline) -> None:
    """Wait until `context` holds `size` bytes. Raises ToolTimeout at the deadline."""
    try:
        async with deadline.limit():
            await context.hold(size)
    except TimeoutError:
        raise too_late() from None


def _commit_memory(output: ToolOutput) -> int:
    """Return the bytes that a call needs to commit a response that it shares: none for a small one."""
    size = sum(map(sys.getsizeof, texts(output.items)))
    return COPIES_OF_COMMIT * size if size > SMALL else 0


def _size(packed: bytes) -> int:
    """Return the bytes that an entry of the cache takes."""
    return len(packed) + _ENTRY_OVERHEAD_BYTES
