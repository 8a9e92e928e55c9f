"""MCP over streamable HTTP with real clients of both eras, and two agents that share a key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from openapi_tool.local.stack import UpstreamDouble
from tests.gateway.conftest import PAGE, Serve, Served
from tests.gateway.test_http import READ, raw
from tests.gateway.test_mcp import CUSTOM, ERAS, text_of
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

MODERN = "2026-07-28"


@asynccontextmanager
async def connected(
    served: Served, token: str | None = None, era: Any = "auto", **options: Any
) -> AsyncIterator[Client]:
    """Yield a client of `mcp` over HTTP."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(headers=headers, timeout=WAIT_S, trust_env=False) as http:
        transport = streamable_http_client(f"{served.url}/mcp", http_client=http)
        async with Client(transport, mode=era, read_timeout_seconds=30, **options) as client:
            yield client


def modern_message(method: str, params: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request of a client of today."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params | {"_meta": meta}}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": MODERN,
        "Mcp-Method": method,
    }
    return json.dumps(message).encode(), headers


def modern_call(name: str, arguments: dict[str, Any], token: str = "") -> bytes:
    """Return the request of a client of today as bytes."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": name, "arguments": arguments, "_meta": meta}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    lines = [
        "POST /mcp HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Accept: application/json, text/event-stream",
        f"MCP-Protocol-Version: {MODERN}",
        "Mcp-Method: tools/call",
        f"Mcp-Name: {name}",
        *([f"Authorization: Bearer {token}"] if token else []),
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def legacy_call(name: str, arguments: dict[str, Any]) -> bytes:
    """Return the same of a client with a handshake."""
    body = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    ).encode()
    head = (
        "POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: 2025-06-18\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@requirement("gateway.mcp", "gateway.tokens")
@pytest.mark.parametrize("era", ERAS)
async def test_a_client_of_either_era_lists_and_calls_the_tools_of_its_token(serve: Serve, era: str) -> None:
    async with serve() as served:
        token = await served.token("p", "a", "jina_read*")
        async with connected(served, token, era) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["jina_read", "jina_read_many"]
            assert (client.session.protocol_version == MODERN) == (era == "auto")
            result = await client.call_tool("jina_read", {"url": PAGE})
            assert not result.is_error
            assert "A Fixture Article" in text_of(result)
            failed = await client.call_tool("jina_search", {"query": "x"})
            assert (failed.is_error, "not_found" in text_of(failed)) == (True, True)
        async with served.client(token) as http:
            [row] = (await http.get("/v1/usage")).json()["by_tool"]
            assert (row["tool"], row["calls"]) == ("jina_read", 1)


@requirement("gateway.mcp")
@pytest.mark.parametrize("era", ERAS)
async def test_many_clients_of_either_era_are_served_at_once(serve: Serve, era: str) -> None:
    async with serve() as served:

        async def one(number: int) -> None:
            async with connected(served, era=era) as client:
                result = await client.call_tool("jina_read", {"url": f"{PAGE}?{number % 2}"})
                assert not result.is_error, text_of(result)

        await asyncio.gather(*map(one, range(10)))


@requirement("gateway.mcp", "gateway.access")
async def test_a_subscription_to_what_is_not_offered_is_neither_kept_nor_sent_back(serve: Serve) -> None:
    wanted = {"toolsListChanged": True, "promptsListChanged": True, "resourceSubscriptions": ["test://a"] * 1_000}
    body, headers = modern_message("subscriptions/listen", {"notifications": wanted})
    async with (
        asyncio.timeout(WAIT_S),
        serve() as served,
        served.client() as client,
        client.stream("POST", "/mcp", content=body, headers=headers) as answer,
    ):
        data = await anext(line async for line in answer.aiter_lines() if line.startswith("data: {"))
    acknowledged = json.loads(data.removeprefix("data: "))
    assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
    assert acknowledged["params"]["notifications"] == {"toolsListChanged": True}


@requirement("gateway.mcp", "mcp.progress")
@pytest.mark.parametrize("era", ERAS)
async def test_progress_reaches_a_client_over_http(serve: Serve, double: UpstreamDouble, era: str) -> None:
    double.rules({"match": "article", "delay_s": 2.6})
    reports: list[float] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        reports.append(progress)

    async with serve() as served, connected(served, era=era) as client:
        assert not (await client.call_tool("jina_read", {"url": PAGE}, progress_callback=hear)).is_error
    assert len(reports) >= 2
    assert reports == sorted(set(reports))


@requirement("gateway.mcp", "mcp.cancellation")
@pytest.mark.parametrize("request_of", [modern_call, legacy_call])
async def test_a_client_that_disconnects_stops_its_upstream_request_and_its_cost_is_settled(
    serve: Serve, double: UpstreamDouble, request_of: Any
) -> None:
    double.rules({"match": "article", "hang": True})
    async with serve(budgets={"project_day_tokens": 1_000_000}) as served:
        async with raw(served) as (_, writer):
            writer.write(request_of("jina_read", {"url": PAGE}))
            await until(lambda: len(double.requests()) == 1)
        await until(lambda: not served.gateway.running)
        async with served.client() as client:
            [row] = (await client.get("/v1/usage")).json()["by_tool"]
            assert (row["calls"], row["errors"], row["requests"]) == (1, 1, 1)
            [budget] = (await client.get("/v1/budget")).json()["budgets"]
            assert budget["tokens_left"] < 1_000_000


@requirement("gateway.mcp")
async def test_a_subscribed_client_hears_of_changed_tools_and_its_stream_ends_with_the_drain(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "docs.yaml").write_text(CUSTOM)
    async with serve() as served, connected(served) as client, client.listen(tools_list_changed=True) as events:
        await served.door.mcp.server.tools_changed()
        async with asyncio.timeout(WAIT_S):
            await anext(events)
            await served.door.drain()


@requirement("gateway.mcp")
async def test_changed_tools_disturb_no_client_with_a_handshake(serve: Serve) -> None:
    async with serve() as served, connected(served, era="legacy") as client:
        await client.list_tools()
        await served.door.mcp.server.tools_changed()
        assert len((await client.list_tools()).tools) == 4


@requirement("gateway.mcp")
@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_there_are_no_sessions_to_open_or_end(serve: Serve, method: str) -> None:
    async with serve() as served, served.client() as client:
        headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
        assert (await client.request(method, "/mcp", headers=headers)).status_code == 405


@requirement("gateway.mcp", "mcp.hostile")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 500_000,
        b'{"jsonrpc": "2.0", "id": 1}',
        b"\xff\xfe",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
@pytest.mark.parametrize("version", [MODERN, "2025-06-18", "x" * 1_000])
async def test_no_message_disturbs_others(serve: Serve, body: bytes, version: str) -> None:
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": version,
    }
    async with serve() as served, served.client() as client:
        refused = await client.post("/mcp", content=body, headers=headers)
        assert 400 <= refused.status_code < 500
        assert (await client.get("/v1/tools")).status_code == 200


@requirement("gateway.mcp")
@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", MODERN])
@pytest.mark.parametrize("request_id", ["null", "1.5", "true", "{}", "[]"])
async def test_a_request_whose_id_is_none_is_told_so(serve: Serve, request_id: str, version: str) -> None:
    """Taken for a notification, it would get no answer."""
    body = f'{{"jsonrpc": "2.0", "id": {request_id}, "method": "tools/list", "params": {{}}}}'.encode()
    refused = await _posted(serve, body, version)
    assert refused["error"] == {"code": -32600, "message": "the id of a request must be a text or a whole number"}


@requirement("gateway.mcp")
@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", MODERN])
async def test_several_messages_in_one_are_refused_in_our_words(serve: Serve, version: str) -> None:
    body = json.dumps([{"jsonrpc": "2.0", "id": number, "method": "tools/list"} for number in (1, 2)]).encode()
    refused = await _posted(serve, body, version)
    assert refused["error"]["message"] == "several messages in one are not served; send each by itself"


@requirement("gateway.mcp")
@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", MODERN])
async def test_json_that_is_no_message_is_refused_in_our_words(serve: Serve, version: str) -> None:
    valid = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    others: list[Any] = [
        {},
        "text",
        5,
        None,
        True,
        {"id": 1, "method": "tools/list"},
        {**valid, "jsonrpc": "1.0"},
        {**valid, "method": 5},
        {**valid, "params": "x" * 70_000},
        {"jsonrpc": "2.0", "id": 1},
        {"jsonrpc": "2.0", "id": 1, "error": {}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": 5},
    ]
    for value in others:
        refused = await _posted(serve, json.dumps(value).encode(), version)
        assert refused["error"] == {
            "code": -32600,
            "message": "the body is no JSON-RPC message; send an object with jsonrpc: 2.0, a method, and an id to get "
            "an answer",
        }


async def _posted(serve: Serve, body: bytes, version: str) -> dict[str, Any]:
    """Return the error of a message that is refused."""
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": version,
        "Mcp-Method": "tools/list",
    }
    async with serve() as served, served.client() as client:
        answer = await client.post("/mcp", content=body, headers=headers)
    assert answer.status_code == 400
    found: dict[str, Any] = answer.json()
    assert found["id"] is None
    return found


@requirement("gateway.shared")
async def test_agents_of_a_project_share_its_budget_and_have_one_each_through_both_doors(serve: Serve) -> None:
    budgets = {"agent_day_requests": 2, "project_day_requests": 3}
    async with serve(budgets=budgets, cache={"ttl_s": 0}) as served:
        first, second = await served.token("p", "a"), await served.token("p", "b")
        async with served.client(first) as http, connected(served, second) as client:
            assert (await http.post(READ, json={"url": PAGE})).status_code == 200
            assert (await http.post(READ, json={"url": PAGE})).status_code == 200
            refused = await http.post(READ, json={"url": PAGE})
            assert (refused.status_code, refused.json()["code"]) == (402, "budget_exceeded")
            assert not (await client.call_tool("jina_read", {"url": PAGE})).is_error
            over = await client.call_tool("jina_read", {"url": PAGE})
            assert (over.is_error, "budget_exceeded" in text_of(over)) == (True, True)


@requirement("gateway.shared")
async def test_a_flood_of_one_token_leaves_the_other_its_turns(serve: Serve, double: UpstreamDouble) -> None:
    double.rules({"match": "article", "delay_s": 0.3})
    async with serve(executor={"concurrency": 8}, cache={"ttl_s": 0}) as served:
        flooding, quiet = await served.token("flood", "a"), await served.token("quiet", "a")
        done: list[str] = []

        async def call(client: httpx.AsyncClient, name: str) -> None:
            assert (await client.post(READ, json={"url": PAGE})).status_code == 200
            done.append(name)

        limits = httpx.Limits(max_connections=200)
        async with (
            served.client(quiet) as client,
            httpx.AsyncClient(
                base_url=served.url, headers={"Authorization": f"Bearer {flooding}"}, limits=limits, timeout=60
            ) as flood,
        ):
            calls = [asyncio.create_task(call(flood, "flood")) for _ in range(80)]
            await until(lambda: served.gateway.running >= 60)
            for _ in range(3):
                await call(client, "quiet")
            before = done.index("quiet", done.index("quiet") + 1), len(done)
            await asyncio.gather(*calls)
        assert before[1] < 60, done


@requirement("gateway.shared")
async def test_floods_of_several_projects_leave_places_for_another(serve: Serve, double: UpstreamDouble) -> None:
    double.rules({"match": "article", "delay_s": 2.0})
    executor = {"concurrency": 2, "max_held": 12}
    async with serve(executor=executor, cache={"ttl_s": 0}) as served:
        clients = [served.client(await served.token(f"flood{number}")) for number in range(3)]
        calls = [asyncio.create_task(client.post(READ, json={"url": PAGE})) for client in clients for _ in range(12)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.2)
        async with served.client(await served.token("quiet")) as client:
            assert (await client.post(READ, json={"url": PAGE})).status_code == 200
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200, 429}
        for client in clients:
            await client.aclose()


@requirement("gateway.shared")
async def test_agents_of_one_project_take_turns_for_the_slots_of_calls(serve: Serve, double: UpstreamDouble) -> None:
    double.rules({"match": "article", "delay_s": 0.3})
    async with serve(executor={"concurrency": 4}, cache={"ttl_s": 0}) as served:
        flooding, quiet = await served.token("p", "a"), await served.token("p", "b")
        done: list[str] = []

        async def call(client: httpx.AsyncClient, name: str) -> None:
            assert (await client.post(READ, json={"url": PAGE})).status_code == 200
            done.append(name)

        async with served.client(quiet) as client, served.client(flooding) as flood:
            calls = [asyncio.create_task(call(flood, "flood")) for _ in range(40)]
            await until(lambda: served.gateway.running >= 30)
            await call(client, "quiet")
            assert len(done) < 30, done
            await asyncio.gather(*calls)
