"""Clients of other projects: LangChain's adapters, mcpo, one of 2025-03-26, the inspector; and schemathesis."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from openapi_tool.local.stack import UpstreamDouble
from tests.gateway.clients import program, script_of_node
from tests.gateway.conftest import PAGE, Serve
from tests.gateway.test_stdio import command
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.long

NAMES = ["jina_search", "jina_search_many", "jina_read", "jina_read_many"]
DOORS = ["stdio", "http"]

LANGCHAIN = """
import asyncio, json, sys
from langchain_mcp_adapters.client import MultiServerMCPClient

async def main():
    tools = await MultiServerMCPClient({"web": json.loads(sys.argv[1])}).get_tools()
    read = next(tool for tool in tools if tool.name == "jina_read")
    page, failed = await read.ainvoke({"url": sys.argv[2]}), await read.ainvoke({"url": "ftp://x"})
    print(json.dumps({"tools": [tool.name for tool in tools], "page": str(page), "failed": str(failed)}))

asyncio.run(main())
"""

OLD = """
import asyncio, json, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client

async def main():
    server = json.loads(sys.argv[1])
    kind = server.pop("transport")
    opened = stdio_client(StdioServerParameters(**server)) if kind == "stdio" else streamablehttp_client(**server)
    async with opened as streams, ClientSession(*streams[:2]) as session:
        version = (await session.initialize()).protocolVersion
        tools = [tool.name for tool in (await session.list_tools()).tools]
        page = await session.call_tool("jina_read", {"url": sys.argv[2]})
        failed = await session.call_tool("jina_read", {"url": "ftp://x"})
        assert failed.isError and not page.isError
        texts = {"page": page.content[0].text, "failed": failed.content[0].text}
        print(json.dumps({"version": version, "tools": tools, **texts}))

asyncio.run(main())
"""


async def output_of(*command: str, **environment: str) -> str:
    """Return what a program prints."""
    running = await asyncio.create_subprocess_exec(
        *command,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", ""), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(400):
        output, errors = await running.communicate()
    assert running.returncode == 0, errors.decode()
    return output.decode()


@asynccontextmanager
async def server_of(
    door: str, serve: Serve, double: UpstreamDouble, environment: dict[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """Yield how a client reaches a door, in the form of LangChain's configuration."""
    if door == "stdio":
        first, *rest = command(double, ":memory:")
        yield {"transport": "stdio", "command": first, "args": rest, "env": environment}
        return
    async with serve() as served:
        headers = {"Authorization": f"Bearer {await served.token()}"}
        yield {"transport": "streamable_http", "url": f"{served.url}/mcp", "headers": headers}


@requirement("gateway.mcp", "mcp.eras")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("folder", "script"), [("langchain", LANGCHAIN), ("mcp-2025-03-26", OLD)])
async def test_a_client_lists_the_tools_reads_a_page_and_is_told_why_another_cannot_be_read(
    serve: Serve, double: UpstreamDouble, environment: dict[str, str], door: str, folder: str, script: str
) -> None:
    python = str(program(f"{folder}/bin/python"))
    async with server_of(door, serve, double, environment) as server:
        found = json.loads(await output_of(python, "-c", script, json.dumps(server), PAGE))
    assert found["tools"] == NAMES
    assert "A Fixture Article" in found["page"]
    assert "bad_request: url: 'ftp:' cannot be read" in found["failed"]
    assert found.get("version", "2025-03-26") == "2025-03-26"


@requirement("gateway.mcp", "mcp.eras")
@pytest.mark.parametrize("door", DOORS)
async def test_mcpo_offers_the_tools_over_plain_http(
    serve: Serve, double: UpstreamDouble, environment: dict[str, str], tmp_path: Path, door: str
) -> None:
    mcpo = str(program("mcpo/bin/mcpo"))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    async with server_of(door, serve, double, environment) as server:
        server["type"] = server.pop("transport").replace("_", "-")
        (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"web": server}}))
        with (tmp_path / "log").open("wb") as log:
            running = await asyncio.create_subprocess_exec(
                *(mcpo, "--host", "127.0.0.1", "--port", str(port), "--config", str(tmp_path / "servers.json")),
                stdout=log,
                stderr=log,
            )
        try:
            await until(lambda: b"running on" in (tmp_path / "log").read_bytes())
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}/web", timeout=WAIT_S, trust_env=False
            ) as client:
                document = (await client.get("/openapi.json")).json()
                assert list(document["paths"]) == [f"/{name}" for name in NAMES]
                assert "A Fixture Article" in (await client.post("/jina_read", json={"url": PAGE})).text
                failed = await client.post("/jina_read", json={"url": "ftp://x"})
                assert (failed.status_code, "bad_request: url:" in failed.text) == (500, True)
        finally:
            running.terminate()
            await running.wait()


@requirement("gateway.mcp", "mcp.eras")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("method", ["tools/list", "tools/call"])
async def test_the_inspector_of_the_protocol_is_served(
    serve: Serve, double: UpstreamDouble, environment: dict[str, str], tmp_path: Path, door: str, method: str
) -> None:
    node, inspector = script_of_node("@modelcontextprotocol/inspector/clients/launcher/build/index.js")
    call = ["--tool-name", "jina_read", "--tool-arg", f"url={PAGE}"] if method == "tools/call" else ["--strict"]
    async with server_of(door, serve, double, environment) as server:
        if door == "stdio":
            variables = [part for name, value in server["env"].items() for part in ("-e", f"{name}={value}")]
            reached = [*variables, server["command"], *server["args"]]
        else:
            [(name, value)] = server["headers"].items()
            reached = [server["url"], "--transport", "http", "--header", f"{name}: {value}"]
        path = f"{Path(node).parent}{os.pathsep}{os.environ['PATH']}"
        options = [*reached, "--method", method, *call]
        shown = json.loads(await output_of(node, inspector, "--cli", *options, HOME=str(tmp_path), PATH=path))
    if method == "tools/call":
        assert "A Fixture Article" in shown["content"][0]["text"]
    else:
        assert [tool["name"] for tool in shown["tools"]] == NAMES


@requirement("gateway.http")
async def test_the_operations_do_what_the_document_says(serve: Serve, tmp_path: Path) -> None:
    schemathesis = str(program("schemathesis/bin/schemathesis"))
    configuration = Path(__file__).parent / "schemathesis.toml"
    async with serve() as served:
        options = ["--max-examples", "10", "--seed", "1", "--report-dir", str(tmp_path)]
        await output_of(
            *(schemathesis, "--config-file", str(configuration)), "run", f"{served.url}/openapi.json", *options
        )
