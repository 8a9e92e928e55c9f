"""HTTP client of the upstream: sends one request and returns what its response says.

`attempts.py` calls it once for each attempt. `body_reader.py` receives the bytes of the body, and `response.py` reads
what they say: in a worker process, or in the event loop if that is cheap. `network_failures.py` has the errors of
requests that got no response.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import httpx
from pydantic import SecretStr

from openapi_tool.concurrency.long_steps import without_other_long_steps
from openapi_tool.isolation.pool import PoolBusy, TaskKilled, WorkerPool
from openapi_tool.jina.body_reader import PACE_S, BodyReader
from openapi_tool.jina.failures import too_late
from openapi_tool.jina.memory_estimates import memory_to_hold
from openapi_tool.jina.network_failures import network_failure, no_free_file
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.request_context import RequestContext
from openapi_tool.jina.response import MayHoldSecret, Received, UpstreamResult, read_response, unread_failure
from openapi_tool.jina.response_task import READ_RESPONSE, response_result, response_task
from openapi_tool.jina.transport import ON_CONNECTED, PROJECT
from openapi_tool.open_files import is_out_of_files
from openapi_tool.protocol.errors import ResponseTooLarge, ToolError, ToolTimeout
from openapi_tool.protocol.payload import Payload
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.inline_bounds import LONG_BODY_BYTES, body_fits_inline

log = logging.getLogger(__name__)


class JinaClient:
    """Client of the upstream.

    - `max_response_bytes` limits the responses of one call together.
    - `pool` has the worker processes; without a pool this process reads all responses itself.
    - Only tests pass `pace_s` (`body_reader.PACE_S`).
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        max_response_bytes: int,
        pool: WorkerPool | None = None,
        pace_s: float = PACE_S,
    ) -> None:
        self.max_response_bytes = max_response_bytes
        self._transport = transport
        self._bodies = BodyReader(max_response_bytes, pace_s)
        self._pool = pool

    async def fetch(
        self,
        request: UpstreamRequest,
        api_key: SecretStr,
        deadline: Deadline,
        context: RequestContext,
        on_connected: Callable[[], None] | None = None,
    ) -> UpstreamResult:
        """Send a request once, and return what its response says. Raises ToolError if the request failed.

        `on_connected` is called once the request has a connection; from then on the request counts as sent. At the end
        `context` holds the memory that the response needs until its result is stored.
        """
        if log.isEnabledFor(logging.DEBUG):
            _log_request(request)
        try:
            async with deadline.limit():
                return await self._exchange(request, api_key, deadline, context, on_connected)
        except TimeoutError as error:
            raise (no_free_file() if is_out_of_files(error) else too_late()) from None
        except httpx.TransportError as error:
            raise network_failure(error, request.host) from error

    async def reach(self, host: str) -> None:
        """Request a host's front page, without a key. Raises ToolError if this fails."""
        try:
            response = await self._transport.handle_async_request(httpx.Request("GET", f"https://{host}/"))
        except httpx.TransportError as error:
            raise network_failure(error, host) from error
        await response.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    async def _exchange(
        self,
        request: UpstreamRequest,
        api_key: SecretStr,
        deadline: Deadline,
        context: RequestContext,
        on_connected: Callable[[], None] | None,
    ) -> UpstreamResult:
        """Send the request, read the body of its response, then what the body says."""
        context.call.secrets_sent.update((api_key, *request.secrets))  # first, so that no response goes unmasked
        extensions = {PROJECT: context.call.project, ON_CONNECTED: on_connected}
        response = await self._transport.handle_async_request(_outgoing(request, api_key, extensions))
        context.http_status = response.status_code
        try:
            body = await self._bodies.read(response, context, deadline)
        finally:
            await response.aclose()
        log.debug(
            "response of the upstream",
            extra={"action": "upstream.response", "http_status": response.status_code, "bytes": len(body)},
        )
        return await self._result(body, request, _received(response, context), deadline, context)

    async def _result(
        self,
        body: bytearray,
        request: UpstreamRequest,
        received: Received,
        deadline: Deadline,
        context: RequestContext,
    ) -> UpstreamResult:
        """Return what a body says, read in a worker process, or here if that is cheap. Empties the body.

        Raises ToolError.
        """
        try:
            await context.hold(memory_to_hold(body))
            if self._pool is None:
                return read_response(body, request.expected, received)
            if body_fits_inline(body, len(received.secrets)):
                await without_other_long_steps(len(body), LONG_BODY_BYTES)
                try:
                    return read_response(body, request.expected, received, inline=True)
                except MayHoldSecret:
                    pass  # a worker reads it, as masking may take long
            answer = await self._read_in_worker(self._pool, body, request, received, deadline, context)
        finally:
            # Free the bytes now: if the request failed, a traceback would keep them while a retry waits. They cannot be
            # freed while the closing socket of a task that was given up still refers to them.
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
        """Return the answer of the worker that read the body. Raises ToolError."""
        task = response_task(body, request.expected, received)
        try:
            return await pool.run(READ_RESPONSE, task, project=context.call.project or "", wait_s=deadline.remaining())
        except TaskKilled:
            unread: ToolError = ResponseTooLarge(
                "The response takes too much time or memory to read; ask for less: fewer results, no lists of links or "
                "images, a target_selector, or another page."
            )
        except PoolBusy:
            unread = ToolTimeout(
                "This service was too busy to read the response within the time of this call; call again."
            )
        raise unread_failure(request.expected, received) or unread


def _received(response: httpx.Response, context: RequestContext) -> Received:
    """Return what `read_response` needs of a response beside its body."""
    secrets = frozenset(secret.get_secret_value() for secret in context.call.secrets_sent)
    return Received(response.status_code, response.headers.get("retry-after"), secrets)


def _outgoing(request: UpstreamRequest, api_key: SecretStr, extensions: dict[str, Any]) -> httpx.Request:
    """Return the request for the transport, with its key.

    To save CPU, all headers are given here, and the body as a stream. From `content`, httpx would derive the headers of
    the body, and for that copy and search all others several times.
    """
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
