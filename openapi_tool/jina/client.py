"""HTTP client that sends an upstream request within limits of size, memory and time."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

import httpx
from pydantic import SecretStr

from openapi_tool.concurrency.long_steps import without_other_long_steps
from openapi_tool.isolation.pool import PoolBusy, TaskKilled, WorkerPool
from openapi_tool.jina.byte_semaphore import RequestContext, memory_to_hold
from openapi_tool.jina.failures import ONCE, SOME, too_late
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.response import (
    READ_RESPONSE,
    MayHoldSecret,
    Received,
    UpstreamResult,
    read_response,
    response_result,
    response_task,
    unread_failure,
)
from openapi_tool.jina.transport import ON_CONNECTED, PROJECT, CertificateRefused, OwnResponseRefused, ResponseRefused
from openapi_tool.open_files import OUT_OF_FILES, is_out_of_files
from openapi_tool.protocol.errors import ResponseTooLarge, ToolError, ToolTimeout, UpstreamUnavailable
from openapi_tool.protocol.payload import Payload
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.inline_bounds import LONG_BODY_BYTES, SMALL, body_fits_inline

log = logging.getLogger(__name__)

_MAX_LENGTH_DIGITS = 19  # bounds the time of int()
_PACE_BYTES, _PACE_S = 256 * 1024, 10.0
"""Minimum rate of a large response: bytes within seconds (210 kbit/s). A stall of the event loop does not count."""

_READ_ON_S = 2.0  # for the cost at the end of a body that is too large
_TAIL_BYTES = 4 * 1024
_COST = re.compile(rb'"meta"\s*:\s*\{\s*"usage"\s*:\s*\{\s*"tokens"\s*:\s*([0-9]{1,9})\s*\}\s*\}\s*\}\s*$')
"""The end of each response: what it cost. A text in the response cannot look like it, as its quotes are escaped."""

_LARGE_READS = 8
"""Maximum chunks of large responses read in one iteration of the event loop; more would delay all other calls."""


class JinaClient:
    """Client of the upstream.

    `max_response_bytes` limits the responses of one call together. Responses that may be costly to read are read by
    `pool`; without one all are read inline. Only tests pass `pace_s`.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        max_response_bytes: int,
        pool: WorkerPool | None = None,
        pace_s: float = _PACE_S,
    ) -> None:
        self._transport = transport
        self._pace_s = pace_s
        self.max_response_bytes = max_response_bytes
        self._pool = pool
        self._large_reads = asyncio.Semaphore(_LARGE_READS)

    async def fetch(
        self,
        request: UpstreamRequest,
        api_key: SecretStr,
        deadline: Deadline,
        context: RequestContext,
        on_connected: Callable[[], None] | None = None,
    ) -> UpstreamResult:
        """Send a request, read its response and return the outcome. Raises ToolError if the request failed.

        `on_connected` is called once the request has a connection; from then on it counts as sent. In the end `context`
        holds the memory that the response needs until its commit.
        """
        if log.isEnabledFor(logging.DEBUG):
            _log_request(request)
        try:
            async with deadline.limit():
                return await self._exchange(request, api_key, deadline, context, on_connected)
        except TimeoutError as error:
            raise (_no_free_file() if is_out_of_files(error) else too_late()) from None
        except httpx.TransportError as error:
            raise _network_failure(error, request.host) from error

    async def reach(self, host: str) -> None:
        """Request a host's front page, without a key. Raises ToolError if this fails."""
        try:
            response = await self._transport.handle_async_request(httpx.Request("GET", f"https://{host}/"))
        except httpx.TransportError as error:
            raise _network_failure(error, host) from error
        await response.aclose()

    async def _exchange(
        self,
        request: UpstreamRequest,
        api_key: SecretStr,
        deadline: Deadline,
        context: RequestContext,
        on_connected: Callable[[], None] | None,
    ) -> UpstreamResult:
        context.call.secrets_sent.update((api_key, *request.secrets))  # first, so that no response goes unmasked
        extensions = {PROJECT: context.call.project, ON_CONNECTED: on_connected}
        response = await self._transport.handle_async_request(_outgoing(request, api_key, extensions))
        context.http_status = status = response.status_code
        try:
            body = await self._read(response, context, deadline)
        finally:
            await response.aclose()
        log.debug(
            "response of the upstream",
            extra={"action": "upstream.response", "http_status": status, "bytes": len(body)},
        )
        secrets = frozenset(secret.get_secret_value() for secret in context.call.secrets_sent)
        received = Received(status, response.headers.get("retry-after"), secrets)
        return await self._result(body, request, received, deadline, context)

    async def _result(
        self,
        body: bytearray,
        request: UpstreamRequest,
        received: Received,
        deadline: Deadline,
        context: RequestContext,
    ) -> UpstreamResult:
        """Read a body in a worker process, or here if that is cheap; then empty it. Raises ToolError."""
        try:
            await context.hold(memory_to_hold(body))
            if self._pool is None:
                return read_response(body, request.expected, received)
            if body_fits_inline(body, len(received.secrets)):
                await without_other_long_steps(len(body), LONG_BODY_BYTES)
                with suppress(MayHoldSecret):
                    return read_response(body, request.expected, received, inline=True)
            answer = await self._read_in_worker(self._pool, body, request, received, deadline, context)
        finally:
            # Free the bytes; a traceback would keep them during a retry's wait. The closing socket of a task that was
            # given up may still refer to them.
            with suppress(BufferError):
                body.clear()
        await without_other_long_steps(answer.size)
        return response_result(answer)

    async def _read_in_worker(
        self,
        pool: WorkerPool,
        body: bytearray,
        request: UpstreamRequest,
        received: Received,
        deadline: Deadline,
        context: RequestContext,
    ) -> Payload:
        task = response_task(body, request.expected, received)
        try:
            return await pool.run(READ_RESPONSE, task, project=context.call.project or "", wait_s=deadline.remaining())
        except TaskKilled:
            raise unread_failure(request.expected, received) or ResponseTooLarge(
                "The response takes too much time or memory to read; ask for less: fewer results, no lists of links or "
                "images, a target_selector, or another page."
            ) from None
        except PoolBusy:
            raise ToolTimeout(
                "This service was too busy to read the response within the time of this call; call again."
            ) from None

    async def _read(self, response: httpx.Response, context: RequestContext, deadline: Deadline) -> bytearray:
        """Return the body. Raises ToolError, and httpx.TransportError."""
        encoding = response.headers.get("content-encoding", "")
        if encoding.strip().lower() not in ("", "identity"):
            raise UpstreamUnavailable("The service answered in an encoding that was not asked for; try again later.")
        body = bytearray()
        chunks = aiter(cast("httpx.AsyncByteStream", response.stream))
        try:
            await self._fill(body, chunks, response.headers.get("content-length", ""), context)
        except BaseException as error:
            tail = bytes(body[-_TAIL_BYTES:])
            body.clear()  # a traceback in a reference cycle keeps this frame alive until the next garbage collection
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
        """Read the body into `body`; reserve memory in doubling steps as bytes arrive.

        Reserving the declared size at once would let an upstream block memory by a header alone. For the same reason a
        response that has reserved memory must arrive at a minimum rate: other calls may wait for that memory.
        Raises TimeoutError if it is too slow, ResponseTooLarge.
        """
        async for chunk in chunks:
            self._count_bytes(body, chunk, context)
            if context.body_bytes > SMALL:  # smaller responses reserve nothing, so they never wait behind large ones
                await self._fill_large(body, chunk, chunks, declared, context)
            else:
                body += chunk

    async def _fill_large(
        self, body: bytearray, chunk: bytes, chunks: AsyncIterator[bytes], declared: str, context: RequestContext
    ) -> None:
        """Append `chunk` and the rest of the body, whose `declared` size limits the memory to reserve."""
        max_bytes = self.max_response_bytes
        if declared.isascii() and declared.isdigit():
            max_bytes = min(int(declared[:_MAX_LENGTH_DIGITS]), max_bytes)
        held = SMALL  # bytes that `context` holds, or need not hold
        next_check_bytes = 0  # length of the body at which its time limit begins anew
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(None) as pace:
            while chunk:
                if context.body_bytes > held:
                    held = max(min(2 * held, max_bytes), context.body_bytes)
                    next_check_bytes = 0
                    pace.reschedule(None)  # do not count the wait for memory against the upstream
                    await context.hold(held)
                body += chunk
                if len(body) >= next_check_bytes:
                    next_check_bytes = len(body) + _PACE_BYTES
                    pace.reschedule(clock() + self._pace_s)
                async with self._large_reads:  # at most _LARGE_READS responses continue in one iteration
                    await asyncio.sleep(0)
                chunk = await anext(chunks, b"")
                self._count_bytes(body, chunk, context)

    async def _cost_at_the_end(self, chunks: AsyncIterator[bytes], tail: bytes, seconds: float) -> int:
        """Read on in a body that is too large, without keeping it; return the tokens that its end states, else 0.

        `tail` is the end of what was read. At most as much again as a body may have is read, for at most `seconds`.
        """
        left = self.max_response_bytes
        with suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(seconds):
                async for chunk in chunks:
                    tail = (tail + chunk)[-_TAIL_BYTES:]
                    left -= len(chunk)
                    if left < 0:
                        return 0
                    async with self._large_reads:
                        await asyncio.sleep(0)
        stated = _COST.search(tail)
        return int(stated[1]) if stated else 0

    def _count_bytes(self, body: bytearray, chunk: bytes, context: RequestContext) -> None:
        """Count the bytes of a chunk. Raises ResponseTooLarge; `body` then ends with those of the chunk."""
        context.add_body_bytes(len(chunk))
        if context.call_body_bytes > self.max_response_bytes:
            body += chunk[-_TAIL_BYTES:]  # may state the cost
            raise ResponseTooLarge(
                f"The response is larger than {self.max_response_bytes:,} bytes, all pages of a call together; "
                "ask for less: a smaller page or fewer of them, a target_selector, fewer results, or max_tokens."
            )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()


def _outgoing(request: UpstreamRequest, api_key: SecretStr, extensions: dict[str, Any]) -> httpx.Request:
    """Return the request with every header: with `content` httpx would build, copy and search them several times."""
    url = _url(request.host, request.target)
    body = request.body or b""
    headers = [(b"Host", url.netloc)]
    headers += [(name.encode("ascii"), value.encode("ascii")) for name, value in request.headers.items()]
    headers.append((b"Authorization", f"Bearer {api_key.get_secret_value()}".encode("ascii")))
    if request.body is not None:
        headers.append((b"Content-Length", b"%d" % len(body)))
    outgoing = httpx.Request(request.method, url, headers=headers, stream=httpx.ByteStream(body), extensions=extensions)
    outgoing.read()  # sets `content`, which the transport sends
    return outgoing


@lru_cache(maxsize=64)
def _url(host: str, target: str) -> httpx.URL:
    return httpx.URL(f"https://{host}{target}")


def _log_request(request: UpstreamRequest) -> None:
    log.debug(
        "request to the upstream",
        extra={
            "action": "upstream.request",
            "method": request.method,
            "host": request.host,
            "target": request.target,
            "headers": dict(request.headers),
            "body": request.body.decode() if request.body else None,
        },
    )


def _no_free_file() -> ToolTimeout:
    """Return the error for a request that was not sent, because the process could open no connection in time."""
    return ToolTimeout(
        "Nothing was sent within the time of this call, because this service has too many connections open; try again "
        "later, or ask an operator to raise its limit.",
        detail={"cause": OUT_OF_FILES},
    )


def _network_failure(error: httpx.TransportError, host: str) -> ToolError:
    """Return the error for a model; causes are logged for the operator, without the library's text with addresses."""
    if isinstance(error, CertificateRefused):
        refusal = getattr(error.__cause__, "certificate_error", error.__cause__)
        reason = getattr(refusal, "verify_message", type(refusal).__name__)
        log.error(
            "cannot verify the certificate of %s: %s; check the clock, TLS-intercepting proxies and egress.ca_file",
            host,
            reason,
            extra={"action": "egress.certificate_refused", "host": host, "reason": reason},
        )
        return UpstreamUnavailable(
            "The service's certificate could not be verified, so nothing was sent; an operator must act first.",
            detail={"kind": "certificate"},
            retryable=False,
        )
    if isinstance(error, ResponseRefused):
        return UpstreamUnavailable(
            "The service's response was refused: its headers or framing are malformed or too large; try again, ask for "
            "less or use another source.",
            detail={"kind": type(error).__name__},
            max_retries=0 if isinstance(error, OwnResponseRefused) else ONCE,
        )
    cause = network_cause(error)
    log.log(
        # A broken connection is mostly retried with success; without any nothing works until somebody acts.
        logging.WARNING if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else logging.INFO,
        "a request to %s failed: %s",
        host,
        cause,
        extra={"action": "upstream.unreachable", "host": host, "cause": cause},
    )
    return UpstreamUnavailable(
        "The service could not be reached, or the connection broke; try again in a moment.",
        detail={"kind": type(error).__name__, "cause": cause},
        max_retries=SOME,
    )


_NETWORK_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "the host's name cannot be resolved"),
    (ConnectionRefusedError, "connection refused"),
    (ssl.SSLError, "the TLS handshake failed"),
    (ConnectionResetError, "the connection was reset"),
    (httpx.ConnectTimeout, "no connection in time"),
    (httpx.ReadTimeout, "no response in time"),
    (httpx.ConnectError, "no connection"),
    (httpx.TransportError, "the connection ended before the response"),
)
"""The first whose exception is in the chain of causes counts."""


def network_cause(error: BaseException) -> str:
    """Return why an httpx.TransportError came."""
    chain = [error]
    while (inner := error.__cause__ or getattr(error, "os_error", error.__context__)) and inner not in chain:
        chain.append(error := inner)
    return next(text for kind, text in _NETWORK_CAUSES if any(isinstance(one, kind) for one in chain))
