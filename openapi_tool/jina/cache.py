"""Response cache: equal calls of one session share a response, also while its request runs.

The call that comes first *starts* the request, and equal calls that come meanwhile *join* it. The request runs in a
task of its own, so it goes on while any of these calls waits for it. One call reports its cost, the first whose wait
ends; for all others the response is free.
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

_ENTRY_OVERHEAD_BYTES = 480  # of an entry beside its response: the key, and what TTLCache keeps about it
_CANCEL_GRACE_S = 1.0  # that a cancelled request gets to end
_HASH_KEY = secrets.token_bytes(32)  # of this process: the cache is in its memory

Fetch = Callable[[Meter], Coroutine[Any, Any, ToolOutput]]
"""Sends a request and returns its output; it counts the cost in the meter."""


def cache_key(definition: ToolDefinition, arguments: Arguments, request: UpstreamRequest) -> bytes:
    """Return a hash of all that determines a response and who may see it (protocol 5).

    - The session identity stands for project, agent and session.
    - The tool's name stands for its API key.
    - The hash has a secret key. Without it, somebody who saw the hash could try guesses at secrets in the body.
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
class _InFlight:
    """A request that runs, and that calls share.

    - `task` returns the outcome. A ToolError is returned, not raised: each call raises a copy, which it may change.
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
        self._in_flight: dict[bytes, _InFlight] = {}

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
        packed = self._responses.get(key)
        if packed is not None:
            return await _cached_output(packed, deadline, context)
        joined = key in self._in_flight
        in_flight = self._in_flight[key] if joined else self._start(key, fetch)
        outcome = await self._wait(in_flight, deadline, meter)
        if joined and isinstance(outcome, ToolTimeout) and deadline.remaining() > 0:
            # The request ended at the deadline of the call that started it. This call has more time: try again.
            return await self.get(key, deadline, fetch, context, meter)
        if isinstance(outcome, ToolError):
            raise copy.copy(outcome)
        if not joined:  # `fetch` holds the memory
            return outcome
        needed_bytes = _commit_memory(outcome)
        if not context.try_hold(needed_bytes):
            # The output still counts as memory of the call that started the request. That call may end, and release the
            # memory, while this one waits for some of its own. So drop the output, and look it up afterwards.
            del outcome, in_flight
            await _hold(context, needed_bytes, deadline)
            return await self.get(key, deadline, fetch, context, meter)
        metrics.CACHE_HITS.inc()
        return replace(outcome, cached=True, usage=NO_USAGE)

    def _start(self, key: bytes, fetch: Fetch) -> _InFlight:
        """Start a request that equal calls can join."""
        metrics.CACHE_MISSES.inc()
        meter = Meter()
        task = asyncio.create_task(self._run(key, fetch(meter)))
        in_flight = self._in_flight[key] = _InFlight(key, task, meter)
        in_flight.task.add_done_callback(lambda _: self._on_done(in_flight))
        return in_flight

    async def _run(self, key: bytes, request: Coroutine[Any, Any, ToolOutput]) -> ToolOutput | ToolError:
        """Wait for the request, and store its output if the cache has room for it. Return output or error."""
        try:
            output = await request
        except ToolError as error:
            return without_traceback(error)
        chars = items_chars(output.items)
        if chars <= self._options.max_bytes:  # else do not pack it, as its bytes are even more
            with suppress(asyncio.CancelledError):  # it is paid, so store it even if nobody waits any more
                await without_other_long_steps(chars)
            packed = pack_output(output)
            if _size(packed) <= self._options.max_bytes:
                self._responses[key] = packed
                metrics.CACHE_BYTES.set(self._responses.currsize)
        return output

    def _on_done(self, in_flight: _InFlight) -> None:
        """Let no further call join a request that has ended."""
        self._remove(in_flight)
        if not in_flight.task.cancelled():
            in_flight.task.exception()  # asyncio logs an exception that nobody asks for, and perhaps no call waits

    def _remove(self, in_flight: _InFlight) -> None:
        if self._in_flight.get(in_flight.key) is in_flight:
            del self._in_flight[in_flight.key]

    async def _wait(self, in_flight: _InFlight, deadline: Deadline, meter: Meter) -> ToolOutput | ToolError:
        """Return the outcome of a shared request. Raises ToolTimeout if the deadline comes first.

        The last call that gives up waiting cancels the request. The first whose wait ends takes the cost into `meter`.
        """
        in_flight.waiting += 1
        try:
            async with deadline.limit():
                return await asyncio.shield(in_flight.task)
        except TimeoutError:
            raise too_late() from None
        finally:
            in_flight.waiting -= 1
            if not in_flight.waiting:
                self._remove(in_flight)  # first, so that no call joins a cancelled request
                still_ran = in_flight.task.cancel()
                if still_ran:  # wait for its end, which puts its cost into the meter
                    await shielded(asyncio.wait([in_flight.task]), _CANCEL_GRACE_S)
            meter.add(in_flight.meter.take())


async def _cached_output(packed: bytes, deadline: Deadline, context: RequestContext) -> ToolOutput:
    """Return a stored output, once `context` holds memory for it. Raises ToolTimeout at the deadline."""
    await _hold(context, memory_to_hold(packed), deadline)
    await without_other_long_steps(len(packed))
    metrics.CACHE_HITS.inc()
    return replace(unpack_output(unpack(packed)), usage=NO_USAGE, cached=True)


async def _hold(context: RequestContext, size: int, deadline: Deadline) -> None:
    """Wait until `context` holds `size` bytes. Raises ToolTimeout at the deadline."""
    try:
        async with deadline.limit():
            await context.hold(size)
    except TimeoutError:
        raise too_late() from None


def _commit_memory(output: ToolOutput) -> int:
    """Return the bytes of memory that a call needs to commit an output that it shares: none for a small one."""
    size = sum(map(sys.getsizeof, texts(output.items)))
    return COPIES_OF_COMMIT * size if size > SMALL else 0


def _size(packed: bytes) -> int:
    """Return the bytes that an entry of the cache takes."""
    return len(packed) + _ENTRY_OVERHEAD_BYTES
