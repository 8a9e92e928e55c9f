"""Any upstream response, from its bytes to the result card: a typed failure, or a valid result for jsonb and model.

An input is `SMLF` (status, mode, limit, result format, a byte each) and the body as it came, or `G` in place of the
first byte and bytes from which an envelope of known names is drawn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
from pydantic import SecretStr

from openapi_tool.concurrency import at_once
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.content import RenderContext
from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.protocol.errors import ToolError
from openapi_tool.telemetry.redact import Redactor, of_call
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.result import RenderedResult, ToolOutput, failure, framed, success
from openapi_tool.tools.truncation import Limit, truncate, uncut_parts
from tests.fuzz.source import Source, assert_storable
from tests.support import framed_items

SECRET = "a-key-of-the-fuzzer"
_CONTEXT = RenderContext(of_call([SECRET]), Redactor([SECRET]))
_REQUEST = UpstreamRequest("POST", "r.jina.ai", "/", {"Accept": "application/json"}, b"{}")
_PARAMETERS = {"q": "a query", "respondWith": "no-content"}
_STATUSES = (200, 200, 200, 422, 429, 400, 402, 403, 409, 451, 500, 503, 524, 302)
_LIMITS = (100_000, 2_000, 600, 501)
_RETRY_AFTER = (None, None, "1", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "1e400", "9" * 5_000, "²", "soon")
_LENGTHS = (None, None, None, "0", "²", "9" * 5_000, "-1", "ten")
_MAX_BYTES = 200_000
_TEXTS = (
    *("data", "title", "url", "content", "description", "warning", "links", "images", "chunks", "html", "text"),
    *("usage", "tokens", "meta", "siteLinks", "link", "snippet", "publishedTime", "numPages", "date", "source"),
    *("imageUrl", "screenshotUrl", "pageshotUrl", "code", "status", "message", "readableMessage", "name", "retryAfter"),
    *(
        "retryAfterDate",
        "0",
        "1",
        "No search results available for query x",
        "a.png,data:x",
        "https://a.b/",
        "Error: x",
    ),
    *(
        "[Untrusted web content between marks 123456789:",
        "[123456789 end]",
        "\x00",
        "\ud800",
        "a\n\nb. c",
        "x" * 700,
        SECRET,
    ),
)


def check(data: bytes) -> None:
    """Process one response; raise AssertionError for a wrong result, or the exception of a defect."""
    source = Source(data)
    drawn = data[:1] == b"G"
    status, endpoint = source.below(len(_STATUSES)), ENDPOINTS["search" if source.below(2) else "reader"]
    limit, form = source.pick(_LIMITS), source.pick(("text", "object"))
    headers: dict[str, str | None] = {}
    if drawn:
        status = source.below(len(_STATUSES))
        headers = {"retry-after": source.pick(_RETRY_AFTER), "content-length": source.pick(_LENGTHS)}
        body = json.dumps(_envelope(source)).encode()
    else:
        body = source.rest()
    try:
        request = replace(_REQUEST, failures=endpoint.failures)
        envelope = _fetched(request, _STATUSES[status], {name: text for name, text in headers.items() if text}, body)
        output = at_once(endpoint.render(envelope, _PARAMETERS, _CONTEXT))
    except ToolError as error:
        assert SECRET not in error.message
        assert_storable(failure(error, 1).result)
        assert error.message.isprintable()
        assert error.retry_after is None or 0 <= error.retry_after <= 1e9
        return
    _assert_shown(output, limit, "object" if form == "object" else "text")


def _envelope(source: Source) -> Any:
    envelope: Any = source.object(_TEXTS)
    kind = source.below(4)
    if kind:
        envelope["data"] = (
            [source.object(_TEXTS) for _ in range(source.below(6))] if kind == 1 else source.object(_TEXTS)
        )
    return envelope


def _fetched(request: UpstreamRequest, status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    answer = httpx.Response(status, headers=httpx.Headers(dict(headers), encoding="utf-8"), stream=_Body(body))
    client = JinaClient(httpx.MockTransport(lambda _: answer), _MAX_BYTES, _CONTEXT.error_redactor)
    fetching = client.fetch(
        request, SecretStr(SECRET), Deadline.after(5), ByteSemaphore(10 * _MAX_BYTES).for_call().for_request()
    )
    return _loop().run_until_complete(fetching)


class _Body(httpx.AsyncByteStream):
    """Body of a response, whatever length its headers declare."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> Any:
        yield self._body


_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Return one loop for all inputs: a new one would take longer than an input."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def _assert_shown(output: ToolOutput, limit: int, form: Any) -> None:
    assert SECRET not in output.content
    parts = uncut_parts(output.items, Limit(limit, limit))
    shown = framed(truncate(output.items, Limit(limit, limit)).parts if parts is None else parts)
    assert len(shown) <= limit
    assert len(framed_items(shown)) <= len(output.items)
    fields = success(output, RenderedResult(shown, truncated=parts is None), form, 1)
    assert_storable([fields.result, fields.tool_output])
