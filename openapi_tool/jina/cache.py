"""Answers kept for a while, and one request for identical calls in flight, within one owner's session only."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from cachetools import TTLCache

from openapi_tool.jina.budget import Room, memory_of
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.protocol.errors import ToolTimeout
from openapi_tool.protocol.jsontext import dumps, loads, storable
from openapi_tool.steps import SMALL, Steps, Turns
from openapi_tool.telemetry import metrics
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.result import ToolOutput, Usage

_OVERHEAD_BYTES = 600  # of an entry beside its answer: its key, its links, its places in dictionaries
_COPIES = 5  # its JSON, that with the version of jsonb, and the buffers of driver and transport
_HASH_KEY = secrets.token_bytes(32)


def cache_key(definition: ToolDefinition, arguments: Arguments, request: UpstreamRequest) -> bytes:
    """A keyed hash of everything that changes the answer, and of whose it is (protocol section 5).

    The session's identity stands for project, agent and session alias; the tool's name for the key
    that it is asked with. A hash, because a body may hold secrets and a cache key may not.
    """
    parts = (
        arguments.session,
        definition.tool_name,
        definition.mode,
        request.method,
        request.host,
        request.target,
        sorted(request.headers.items()),
        request.body,
    )
    return hashlib.blake2b(repr(parts).encode(), key=_HASH_KEY, digest_size=32).digest()


@dataclass(slots=True)
class _Flight:
    """A request that is on its way, and how many calls wait for it."""

    key: bytes
    task: asyncio.Task[ToolOutput]
    waiting: int = 0


class AnswerCache:
    """Successes by key, for `ttl_s` seconds (0 keeps none) and up to `max_bytes` of memory in all.

    An answer is kept as its JSON: one object instead of dozens, and its size is known.
    """

    def __init__(self, ttl_s: float, max_bytes: int, turns: Turns | None = None) -> None:
        self._turns = turns or Turns()
        self._answers: TTLCache[bytes, bytes] = TTLCache(max_bytes, ttl_s, getsizeof=_size)
        self._keeps = ttl_s > 0
        self._max_bytes = max_bytes
        self._flights: dict[bytes, _Flight] = {}

    async def get(
        self, key: bytes, deadline: Deadline, ask: Callable[[], Coroutine[Any, Any, ToolOutput]], room: Room
    ) -> ToolOutput:
        """The answer that is there or on its way, which costs nothing, else that of `ask`. Raises its ToolError.

        `room` holds the memory for an answer that is there or on its way; `ask` takes its own.
        """
        if not self._keeps:
            return await ask()
        if (kept := self._answers.get(key)) is not None:
            await _hold(room, memory_of(kept) if len(kept) > SMALL else 0, deadline)
            metrics.CACHED.inc()
            return await self._turns.run(_unpacked(kept), len(kept))
        flight, joined = self._flights.get(key), True
        if flight is None:
            flight, joined = self._start(key, ask), False
        try:
            output = await self._wait(flight, deadline)
        except ToolTimeout:
            if not joined or deadline.remaining() <= 0:
                raise
            return await self.get(key, deadline, ask, room)  # the call that was joined had less time than this one
        if not joined:
            return output
        if not room.try_hold(needed := _memory_beside(output)):
            del output, flight  # once the call that was joined ends, its memory is accounted for no longer
            await _hold(room, needed, deadline)
            return await self.get(key, deadline, ask, room)
        metrics.CACHED.inc()
        return replace(output, cached=True, usage=Usage())

    def _start(self, key: bytes, ask: Callable[[], Coroutine[Any, Any, ToolOutput]]) -> _Flight:
        flight = self._flights[key] = _Flight(key, asyncio.create_task(self._fly(key, ask)))
        flight.task.add_done_callback(lambda _: self._landed(flight))
        return flight

    async def _fly(self, key: bytes, ask: Callable[[], Coroutine[Any, Any, ToolOutput]]) -> ToolOutput:
        output = await ask()
        chars = sum(map(len, output.blocks))
        if chars <= self._max_bytes:
            packed = await self._turns.run(_packed(output), chars)
            if _size(packed) <= self._max_bytes:
                self._answers[key] = packed
                metrics.CACHE_BYTES.set(self._answers.currsize)
        return output

    def _landed(self, flight: _Flight) -> None:
        self._forget(flight)
        if not flight.task.cancelled():
            flight.task.exception()  # seen, also where nobody waits any more

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _wait(self, flight: _Flight, deadline: Deadline) -> ToolOutput:
        flight.waiting += 1
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await asyncio.shield(flight.task)
        except TimeoutError:
            raise _too_late() from None
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._forget(flight)  # before it has ended: nobody may join what is broken off
                flight.task.cancel()


async def _hold(room: Room, size: int, deadline: Deadline) -> None:
    try:
        async with asyncio.timeout(deadline.remaining()):
            await room.hold(size)
    except TimeoutError:
        raise _too_late() from None


def _memory_beside(output: ToolOutput) -> int:
    """Bytes that a call needs to store an answer whose text it shares with another; a small one needs none."""
    size = sum(map(sys.getsizeof, output.blocks))
    return _COPIES * size if size > SMALL else 0


def _too_late() -> ToolTimeout:
    return ToolTimeout("The service did not answer within the time of this call; try again, or ask for less.")


def _packed(output: ToolOutput) -> Steps[bytes]:
    """What is kept of an answer, all of it storable as its result will be; the rest is made anew."""
    yield
    parts = {"blocks": output.blocks, "state": output.state, "whole": output.whole}
    try:
        packed = dumps(parts)
    except TypeError:
        packed = dumps(storable(parts))
    return bytes(memoryview(packed))  # a copy of the right size: orjson's own keeps its buffer of up to ten times that


def _unpacked(packed: bytes) -> Steps[ToolOutput]:
    yield
    parts = loads(packed)
    return ToolOutput(tuple(parts["blocks"]), parts["state"], whole=parts["whole"], cached=True)


def _size(packed: bytes) -> int:
    """About how many bytes of memory an entry takes."""
    return len(packed) + _OVERHEAD_BYTES
