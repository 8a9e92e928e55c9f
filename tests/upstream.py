"""Upstream responses as the client gets them, and the rules for every message about a failure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
from pydantic import SecretStr

from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.failures import FAILURES, ONCE, SOME, FailureTable
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.local.recordings import error_classes
from openapi_tool.protocol.errors import ToolError
from openapi_tool.tools.deadline import Deadline

RETRIES = {"no": (False, 0), "once": (True, ONCE), "yes": (True, SOME), "later": (True, 0)}
"""`retryable` and `max_retries` by the words of the error table; `later` is not within the call."""

_REQUEST = UpstreamRequest("POST", "r.jina.ai", "/", {"Accept": "application/json"}, b"{}")
_REMEDY = re.compile(r"\b(try|use|call|ask|read|shorten|correct|wait|change|check|operator)\b")
_TAG = re.compile(r"<[a-z!/]", re.IGNORECASE)
_CLASS_NAME = re.compile(r"\b[A-Z]\w*Error\b|\bError:")


async def fetched(
    status: int, headers: Mapping[str, str], body: bytes, failures: FailureTable = FAILURES
) -> dict[str, Any]:
    """Return the client's result for this answer. Raises ToolError."""
    request = replace(_REQUEST, failures=failures)
    sent = httpx.Headers(dict(headers), encoding="latin-1")
    transport = httpx.MockTransport(lambda _: httpx.Response(status, headers=sent, content=body))
    client = JinaClient(EgressTransport(transport), max_response_bytes=1_000_000)
    try:
        return await client.fetch(
            request,
            SecretStr("a-key-of-the-test"),
            Deadline.after(5),
            ByteSemaphore(10_000_000).for_call().for_request(),
        )
    finally:
        await client.aclose()


def assert_for_a_model(error: ToolError) -> None:
    """Assert that a message is a short sentence that says what to do, without tags, class names, or a line break."""
    assert re.match(r"[A-Z][^\"]{20,200}[.]( The service says: \"[^\"]+\")?$", error.message), error.message
    assert _REMEDY.search(error.message.partition(" The service says: ")[0]), error.message
    assert error.message.isprintable()
    assert len(error.message) < 550
    assert not _TAG.search(error.message)
    assert not _CLASS_NAME.search(error.message)
    assert not any(name in error.message for name in error_classes())


def retry(error: ToolError) -> str:
    """Return the word of the error table for the retries of an error."""
    return next(word for word, decision in RETRIES.items() if decision == (error.retryable, error.max_retries))
