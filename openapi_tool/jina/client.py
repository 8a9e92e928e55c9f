"""One request to the upstream and its decoded answer, within a deadline and a size."""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from typing import Any, cast

import httpx
from pydantic import SecretStr

from openapi_tool.jina.answer_json import counted, decoded
from openapi_tool.jina.budget import Room, memory_of
from openapi_tool.jina.failures import NOTHING_SECRET, ONCE, SOME, found_nothing, upstream_failure
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.protocol.errors import ResponseTooLarge, ToolError, ToolTimeout, UpstreamUnavailable
from openapi_tool.steps import SMALL, Turns
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.deadline import Deadline

log = logging.getLogger(__name__)

_OK = 200
_MAX_LENGTH_DIGITS = 19


class JinaClient:
    """Sends requests through the egress transport, which follows, retries and remembers nothing.

    `redactor` knows what no error may show; `turns` are those of the process, in which large answers are parsed.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        max_response_bytes: int,
        redactor: Redactor = NOTHING_SECRET,
        turns: Turns | None = None,
    ) -> None:
        self._transport = transport
        self.max_response_bytes = max_response_bytes
        self._turns = turns or Turns()
        self._redactor = redactor

    async def fetch(
        self, request: UpstreamRequest, api_key: SecretStr, deadline: Deadline, room: Room
    ) -> dict[str, Any]:
        """The success envelope of a request (`{code, status, data, meta}`), as it came.

        `room` then holds the memory that the answer needs until it is committed.

        Raises ToolError: a typed failure of the upstream, its transport, its size or the deadline.
        """
        if log.isEnabledFor(logging.DEBUG):
            _log_request(request)
        try:
            async with asyncio.timeout(deadline.remaining()):
                outcome = await self._outcome(*await self._exchange(request, api_key, room), room)
        except TimeoutError:
            raise ToolTimeout(
                "The service did not answer within the time of this call; try again, ask for less, or use another page."
            ) from None
        except httpx.TransportError as error:
            raise _network_failure(error) from error
        if isinstance(outcome, ToolError):
            raise outcome  # here, where no traceback keeps the answer alive while the next request waits
        return outcome

    async def _exchange(
        self, request: UpstreamRequest, api_key: SecretStr, room: Room
    ) -> tuple[int, str | None, bytearray]:
        headers = {**request.headers, "Authorization": f"Bearer {api_key.get_secret_value()}"}
        url = _url(request.host, request.target)
        outgoing = httpx.Request(request.method, url, headers=headers, content=request.body)
        response = await self._transport.handle_async_request(outgoing)
        try:
            body = await self._read(response, room)
        finally:
            await response.aclose()
        return response.status_code, response.headers.get("retry-after"), body

    def _largest(self, response: httpx.Response) -> int:
        """How many bytes an answer says that it has; where it does not, as many as are allowed."""
        declared = response.headers.get("content-length", "")
        if not (declared.isascii() and declared.isdigit()):
            return self.max_response_bytes
        return min(int(declared[:_MAX_LENGTH_DIGITS]), self.max_response_bytes)

    async def _read(self, response: httpx.Response, room: Room) -> bytearray:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise UpstreamUnavailable("The service answered in an encoding that was not asked for; try again later.")
        body = bytearray()
        try:
            await self._fill(body, response, room)
        except BaseException:
            body.clear()  # a traceback that is part of a cycle keeps this frame until garbage is collected
            raise
        return body

    async def _fill(self, body: bytearray, response: httpx.Response, room: Room) -> None:
        held = SMALL  # so much needs no memory of the budget, and never waits behind what is large
        async for chunk in cast("httpx.AsyncByteStream", response.stream):
            if room.count(len(chunk)) > self.max_response_bytes:
                raise ResponseTooLarge(
                    f"The answer is larger than {self.max_response_bytes:,} bytes, all pages of a call together; "
                    "ask for less: a smaller page or fewer of them, a target_selector, fewer results, or max_tokens."
                )
            if room.body_bytes > held:
                held = self._largest(response) if held == SMALL else self.max_response_bytes
                await room.hold(held)
            body += chunk

    async def _outcome(
        self, status: int, retry_after: str | None, body: bytearray, room: Room
    ) -> dict[str, Any] | ToolError:
        log.debug(
            "the upstream answered",
            extra={"action": "upstream.response", "http_status": status, "bytes": len(body)},
        )
        try:
            values = await self._turns.run(counted(body), len(body))
            await room.hold(memory_of(body, values) if len(body) > SMALL else 0)
            value = await self._turns.run(decoded(body), len(body))
        except ResponseTooLarge as error:
            return error if status == _OK else _judged(status, retry_after, None, self._redactor)
        finally:
            body.clear()  # what came of it is all that is needed
        return _judged(status, retry_after, value, self._redactor)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()


@lru_cache(maxsize=64)
def _url(host: str, target: str) -> httpx.URL:
    return httpx.URL(f"https://{host}{target}")


def _log_request(request: UpstreamRequest) -> None:
    log.debug(
        "asking the upstream",
        extra={
            "action": "upstream.request",
            "method": request.method,
            "host": request.host,
            "target": request.target,
            "headers": dict(request.headers),
            "body": request.body.decode() if request.body else None,
        },
    )


def _network_failure(error: httpx.TransportError) -> ToolError:
    """A failure of the network, without texts that may show addresses."""
    return UpstreamUnavailable(
        "The service could not be reached, or the connection broke; try again in a moment.",
        detail={"kind": type(error).__name__},
        repeats=SOME,
    )


def _judged(status: int, retry_after: str | None, value: Any, redactor: Redactor) -> dict[str, Any] | ToolError:
    """The success envelope, or the failure that an answer is."""
    if found_nothing(status, value):
        return {"code": _OK, "data": []}
    if status != _OK:
        return upstream_failure(status, value, retry_after, redactor)
    if not isinstance(value, dict):
        return UpstreamUnavailable("The service's answer was not the JSON that was asked for; try again.", repeats=ONCE)
    inner = value.get("code", _OK)
    if isinstance(inner, int) and inner != _OK:
        return upstream_failure(inner, value, retry_after, redactor)
    return value
