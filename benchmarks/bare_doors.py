"""Bare Starlette and MCP servers that do nothing but the upstream request: what the doors are compared with."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from openapi_tool.local.executor import LoopbackResolver

_SCHEMA = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}


class _Upstream:
    """Client of the upstream."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._session: aiohttp.ClientSession | None = None

    async def page(self, url: str) -> str:
        """Return the text of a page."""
        if self._session is None:
            tls = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
            connector = aiohttp.TCPConnector(ssl=tls, resolver=LoopbackResolver(self._port), limit=64)
            self._session = aiohttp.ClientSession(connector=connector)
        headers = {"Authorization": f"Bearer {os.environ['JINA_API_KEY']}", "Accept": "application/json"}
        async with self._session.post("https://r.jina.ai/", json={"url": url}, headers=headers) as response:
            data = await response.json()
        return str(data["data"]["content"])


class _McpEndPoint:
    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)


def main() -> None:
    """Serve on the port that the second argument names; the first one is the double's."""
    upstream_port, port = map(int, sys.argv[1:3])
    upstream = _Upstream(upstream_port)

    async def read(request: Request) -> JSONResponse:
        return JSONResponse({"content": await upstream.page((await request.json())["url"])})

    async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name="jina_read", input_schema=_SCHEMA)])

    async def call_tool(_context: Any, params: CallToolRequestParams) -> CallToolResult:
        text = await upstream.page((params.arguments or {})["url"])
        return CallToolResult(content=[TextContent(text=text)])

    server = Server[Any]("bare", on_list_tools=list_tools, on_call_tool=call_tool)
    manager = StreamableHTTPSessionManager(server, stateless=True)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with manager.run():
            yield

    routes = [
        Route("/v1/tools/jina_read", read, methods=["POST"]),
        Route("/mcp", _McpEndPoint(manager), methods=["POST"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    # The door's parser of HTTP, which is the one that bounds a request's head; httptools is not installed with `mcp`.
    uvicorn.run(app, host="127.0.0.1", port=port, http="h11", access_log=False, log_level="error")


if __name__ == "__main__":
    main()
