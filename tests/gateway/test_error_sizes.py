"""However large a value is, the error that quotes it is short: plain HTTP, and MCP by HTTP and by stdio."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from openapi_tool.local.stack import UpstreamDouble
from tests.gateway.conftest import PAGE, Serve
from tests.gateway.test_mcp_http import MODERN, modern_message
from tests.gateway.test_stdio import raw_client
from tests.requirements import requirement

MAX_BYTES = 2_000
HUGE = "x" * 70_000
NEEDED: dict[str, dict[str, Any]] = {
    "jina_search": {"query": "q"},
    "jina_search_many": {"queries": ["q"]},
    "jina_read": {"url": PAGE},
    "jina_read_many": {"urls": [PAGE]},
}
"""Arguments that each tool requires."""


def huge_values() -> Iterator[Any]:
    """Yield values that no argument may have, each of them large in another way."""
    yield from (HUGE, "a b " * 17_000, "\u0416" * 30_000, "\0" * 9_000, "\ud800" * 9_000)
    yield from (f"{HUGE}://a", f"https://{HUGE}.test/", f"https://{HUGE}@a.test/", f"https://a.test:{'9' * 70_000}/")
    yield from (f"https://[{'1' * 70_000}]/", f"https://site.fixture.test/{HUGE}", int("9" * 4_000))
    yield from ([HUGE], ["a" * 3_500] * 20, [f"https://a.test:{'9' * 1_900}"] * 20, {HUGE: 1}, {"a": {HUGE: HUGE}})


@requirement("errors.bounded", "gateway.http")
@pytest.mark.parametrize("tool", NEEDED)
async def test_no_argument_makes_a_problem_long(serve: Serve, tool: str) -> None:
    needed = NEEDED[tool]
    failed = 0
    async with serve() as served, served.client() as client:
        listed = {each["name"]: each for each in (await client.get("/v1/tools")).json()["tools"]}
        for name in (*listed[tool]["parameters"]["properties"], "unknown", HUGE):
            for value in huge_values():
                answer = await client.post(f"/v1/tools/{tool}", content=json.dumps({**needed, name: value}).encode())
                assert answer.status_code == 200 or len(answer.content) < MAX_BYTES, (name[:20], answer.text[:200])
                failed += answer.status_code != 200
    assert failed > 100


@requirement("errors.bounded", "gateway.http")
async def test_no_name_or_value_brings_a_control_character_into_a_problem(serve: Serve) -> None:
    hostile = "a\x9b31mred\u202e\x1b]0;t\x07"
    given: list[dict[str, Any]] = [{hostile: 1}, {"url": hostile}, {"url": PAGE, hostile: {hostile: 1}}]
    async with serve() as served, served.client() as client:
        answers = [await client.post("/v1/tools/jina_read", json=arguments) for arguments in given]
    for answer in answers:
        assert answer.status_code == 400
        assert json.dumps(answer.json(), ensure_ascii=False).isprintable()
        assert not any(map(answer.text.__contains__, "\x9b\u202e"))
    assert "a\\x9b31mred\\u202e" in answers[0].json()["detail"]


def messages() -> Iterator[dict[str, Any]]:
    """Yield requests of MCP with a huge value in one place."""
    yield {"method": HUGE}
    yield {"method": HUGE, "params": {HUGE: HUGE}}
    for params in (
        {HUGE: HUGE},
        {"name": HUGE, "arguments": {}},
        {"name": {HUGE: HUGE}},
        {"name": "jina_read", "arguments": HUGE},
        {"name": "jina_read", "arguments": {HUGE: HUGE}},
        {"name": "jina_read", "arguments": {"url": HUGE}},
        {"name": "jina_read", "arguments": {"cursor": HUGE}},
    ):
        yield {"method": "tools/call", "params": params}
    yield {"method": "tools/list", "params": {"_meta": HUGE}}
    yield {"method": "tools/list", "params": {"_meta": {"io.modelcontextprotocol/protocolVersion": HUGE}}}
    yield {"method": "resources/read", "params": {"uri": HUGE}}
    yield {"method": "logging/setLevel", "params": {"level": HUGE}}


@requirement("errors.bounded", "gateway.mcp")
async def test_no_message_makes_an_error_of_mcp_over_http_long(serve: Serve) -> None:
    async with serve() as served, served.client() as client:
        for message in messages():
            params = message.get("params", {})
            body, headers = modern_message(message["method"], params)
            headers["Mcp-Name"] = str(params.get("name", ""))[:1_000]
            for version in ("2025-06-18", MODERN):
                changed = headers | {"MCP-Protocol-Version": version, "Mcp-Method": message["method"][:1_000]}
                if version != MODERN:
                    body = json.dumps({"jsonrpc": "2.0", "id": 1, **message}).encode()
                answer = await client.post("/mcp", content=body, headers=changed)
                is_error = '"tools":' not in answer.text
                assert not is_error or len(answer.content) < MAX_BYTES, answer.text[:200]


@requirement("errors.bounded", "mcp.hostile")
def test_no_message_makes_an_error_of_mcp_over_stdio_long(double: UpstreamDouble, environment: dict[str, str]) -> None:
    with raw_client(double, environment, ":memory:") as client:
        for number, message in enumerate(messages(), start=1_000):
            line = orjson.dumps({"jsonrpc": "2.0", "id": number, **message})
            client.stdin.write(line + b"\n")
            client.stdin.flush()
            answer = client.receive()
            assert "tools" in answer.get("result", {}) or len(orjson.dumps(answer)) < MAX_BYTES, str(answer)[:200]
