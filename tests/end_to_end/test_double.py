"""The Jina double's own knobs, through the executor's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from openapi_tool.jina.budget import ByteBudget
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressTransport, tls_context
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.transport import AiohttpTransport
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.errors import RateLimited, ToolError, UpstreamRejected
from openapi_tool.tools.deadline import Deadline
from tests.promises import requirement

HEADERS = {"Accept": "application/json", "Content-Type": "application/json"}
BODY = {"q": "hello world", "num": 3, "respondWith": "no-content"}


@pytest.fixture
async def client(stack: EmbeddedStack) -> AsyncIterator[JinaClient]:
    stack.upstream.rules()
    stack.upstream.forget()
    tls = tls_context(str(stack.certificates.ca))
    client = JinaClient(EgressTransport(AiohttpTransport(tls, 10, LoopbackResolver(stack.upstream.port))), 10_000_000)
    yield client
    await client.aclose()
    stack.upstream.rules()


def search(**changes: Any) -> UpstreamRequest:
    values = {
        "method": "POST",
        "host": "s.jina.ai",
        "target": "/",
        "headers": HEADERS,
        "body": json.dumps(BODY).encode(),
    }
    return UpstreamRequest(**(values | changes))


async def ask(client: JinaClient, stack: EmbeddedStack, request: UpstreamRequest | None = None) -> dict[str, Any]:
    key = SecretStr(stack.upstream.keys["JINA_API_KEY"])
    return await client.fetch(request or search(), key, Deadline.after(10), ByteBudget(10_000_000).grant().room())


@requirement("local.double")
async def test_a_recorded_question_gets_its_recorded_answer(client: JinaClient, stack: EmbeddedStack) -> None:
    assert [item["title"] for item in (await ask(client, stack))["data"]] == [
        f"Result {number} for hello world" for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    "request_of",
    [
        search(headers={**HEADERS, "Accept": "application/json, text/plain"}),
        search(headers={"Content-Type": "application/json"}),
        search(headers={"Accept": "application/json", "Content-Type": "text/plain"}),
        search(body=b"{broken"),
        search(body=json.dumps({**BODY, "session_id": "s"}).encode()),
        search(body=json.dumps({**BODY, "num": 4}).encode()),
        search(body=b"{}"),
        search(host="r.jina.ai"),
        search(target="/elsewhere?q=x"),
    ],
)
@requirement("local.double")
async def test_a_request_that_it_does_not_know_is_refused(
    request_of: UpstreamRequest, client: JinaClient, stack: EmbeddedStack
) -> None:
    with pytest.raises(UpstreamRejected) as refused:
        await ask(client, stack, request_of)
    assert refused.value.http_status == 501


@requirement("local.double")
async def test_a_script_of_statuses_is_played_once(client: JinaClient, stack: EmbeddedStack) -> None:
    stack.upstream.rules({"statuses": [429, 503], "retry_after": "7"})
    with pytest.raises(RateLimited) as limited:
        await ask(client, stack)
    assert limited.value.retry_after == 7.0
    with pytest.raises(ToolError):
        await ask(client, stack)
    assert (await ask(client, stack))["code"] == 200


@requirement("local.double")
async def test_a_rate_limit_is_enforced(client: JinaClient, stack: EmbeddedStack) -> None:
    stack.upstream.rules({"rate_per_minute": 3})
    answers = await asyncio.gather(*(ask(client, stack) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(answer, RateLimited) for answer in answers) == 2


@requirement("local.double")
async def test_a_body_can_have_any_size(client: JinaClient, stack: EmbeddedStack) -> None:
    stack.upstream.rules({"body_bytes": 1_000_000})
    assert len((await ask(client, stack))["data"][0]["content"]) == 1_000_000
