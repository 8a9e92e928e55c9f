"""Reads the body of an upstream response within limits of size, memory and time.

A body of up to 64 kB (`SMALL`) is read at once and reserves no memory, so it never waits behind large ones. From there
on a body is *large*:

- Its memory is reserved in doubling steps as its bytes arrive. To reserve the size that its header declares would let
  an upstream block memory by a header alone.
- It must arrive at a minimum rate, because other calls may wait for the memory that it has reserved.
- Few large bodies are read in one iteration of the event loop, because many would delay all other calls.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import cast

import httpx

from openapi_tool.jina.request_context import RequestContext
from openapi_tool.protocol.errors import ResponseTooLarge, UpstreamUnavailable
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.inline_bounds import SMALL

PACE_S = 10.0
_PACE_BYTES = 256 * 1024
"""Minimum rate of a large body: these bytes within PACE_S seconds (210 kbit/s). Waits of this process do not count."""

LARGE_READS = 8
"""Maximum chunks of large bodies that are read in one iteration of the event loop."""

_MAX_LENGTH_DIGITS = 19  # of Content-Length that are read; bounds the time of int()

# The end of a body states what it cost. Of a body that is too large, the rest is read only for that.
_READ_ON_S = 2.0  # maximum time to read the rest
_TAIL_BYTES = 4 * 1024  # at the end of a body, which contain the cost
# `"meta": {"usage": {"tokens": 1234}}}` at the end of each response. A text in it cannot look like this, as its quotes
# are escaped.
_COST = re.compile(rb'"meta"\s*:\s*\{\s*"usage"\s*:\s*\{\s*"tokens"\s*:\s*([0-9]{1,9})\s*\}\s*\}\s*\}\s*$')


class BodyReader:
    """Reads bodies; `max_bytes` limits the bodies of one call together. Only tests pass another `pace_s`."""

    def __init__(self, max_bytes: int, pace_s: float = PACE_S) -> None:
        self._max_bytes = max_bytes
        self._pace_s = pace_s
        self._large_reads = asyncio.Semaphore(LARGE_READS)

    async def read(self, response: httpx.Response, context: RequestContext, deadline: Deadline) -> bytearray:
        """Return the body, whose memory `context` holds. Raises ToolError, and httpx.TransportError."""
        encoding = response.headers.get("content-encoding", "")
        if encoding.strip().lower() not in ("", "identity"):
            raise UpstreamUnavailable("The service answered in an encoding that was not asked for; try again later.")
        body = bytearray()
        chunks = aiter(cast("httpx.AsyncByteStream", response.stream))
        try:
            await self._fill(body, chunks, response.headers.get("content-length", ""), context)
        except BaseException as error:
            tail = bytes(body[-_TAIL_BYTES:])
            body.clear()  # free it now: the error's traceback may keep this frame alive until a garbage collection
            if isinstance(error, TimeoutError):
                raise UpstreamUnavailable(
                    "The response arrived too slowly and was given up; try again, ask for less or use another source."
                ) from None
            if isinstance(error, ResponseTooLarge):
                error.tokens = await self._cost_at_the_end(chunks, tail, min(_READ_ON_S, deadline.remaining() / 2))
            raise
        return body

    async def _fill(
        self, body: bytearray, chunks: AsyncIterator[bytes], declared: str, context: RequestContext
    ) -> None:
        """Read all chunks into `body`; `declared` is the header Content-Length.

        Raises ResponseTooLarge, and TimeoutError if they arrive too slowly.
        """
        async for chunk in chunks:
            self._count(body, chunk, context)
            if context.body_bytes > SMALL:
                await self._fill_large(body, chunk, chunks, self._max_size(declared), context)
            else:
                body += chunk

    async def _fill_large(
        self, body: bytearray, chunk: bytes, chunks: AsyncIterator[bytes], max_size: int, context: RequestContext
    ) -> None:
        """Append `chunk` and the rest of a large body; reserve at most `max_size` in advance."""
        reserved = SMALL  # memory of `context` for the body; the first SMALL bytes need none
        next_goal = 0  # size that the body must have within `pace_s`
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(None) as pace:
            while chunk:
                if context.body_bytes > reserved:
                    reserved = max(min(2 * reserved, max_size), context.body_bytes)
                    next_goal = 0
                    pace.reschedule(None)  # do not count the wait for memory against the upstream
                    await context.hold(reserved)
                body += chunk
                if len(body) >= next_goal:
                    next_goal = len(body) + _PACE_BYTES
                    pace.reschedule(clock() + self._pace_s)
                await self._next_iteration()
                chunk = await anext(chunks, b"")
                self._count(body, chunk, context)

    async def _cost_at_the_end(self, chunks: AsyncIterator[bytes], tail: bytes, seconds: float) -> int:
        """Read on in a body that is too large, without keeping it; return the tokens that its end states, else 0.

        `tail` is the end of what was read so far. The rest is read for at most `seconds`, and up to `max_bytes`.
        """
        left = self._max_bytes
        with suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(seconds):
                async for chunk in chunks:
                    tail = (tail + chunk)[-_TAIL_BYTES:]
                    left -= len(chunk)
                    if left < 0:
                        return 0
                    await self._next_iteration()
        stated = _COST.search(tail)
        return int(stated[1]) if stated else 0

    async def _next_iteration(self) -> None:
        """Wait for the next iteration of the event loop in which fewer than LARGE_READS bodies are read on."""
        async with self._large_reads:
            await asyncio.sleep(0)

    def _count(self, body: bytearray, chunk: bytes, context: RequestContext) -> None:
        """Count the bytes of a chunk. Raises ResponseTooLarge, after it has appended the chunk's end to `body`."""
        context.add_body_bytes(len(chunk))
        if context.call_body_bytes > self._max_bytes:
            body += chunk[-_TAIL_BYTES:]  # may state the cost
            raise ResponseTooLarge(
                f"The response is larger than {self._max_bytes:,} bytes, all pages of a call together; "
                "ask for less: a smaller page or fewer of them, a target_selector, fewer results, or max_tokens."
            )

    def _max_size(self, declared: str) -> int:
        """Return the most bytes that a body can have, by its header Content-Length if that is a number."""
        if declared.isascii() and declared.isdigit():
            return min(int(declared[:_MAX_LENGTH_DIGITS]), self._max_bytes)
        return self._max_bytes
