"""A bare Starlette server that does nothing but the upstream request: what the HTTP door is compared with."""

from __future__ import annotations

import os
import ssl
import sys

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from openapi_tool.local.executor import LoopbackResolver


def main() -> None:
    """Serve on the port that the second argument names; the first one is the double's."""
    upstream_port, port = map(int, sys.argv[1:3])
    sessions: list[aiohttp.ClientSession] = []

    async def read(request: Request) -> JSONResponse:
        if not sessions:
            tls = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
            sessions.append(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls, resolver=LoopbackResolver(upstream_port)))
            )
        headers = {"Authorization": f"Bearer {os.environ['JINA_API_KEY']}", "Accept": "application/json"}
        body = {"url": (await request.json())["url"]}
        async with sessions[0].post("https://r.jina.ai/", json=body, headers=headers) as response:
            data = await response.json()
        return JSONResponse({"content": data["data"]["content"]})

    app = Starlette(routes=[Route("/v1/tools/jina_read", read, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_level="error")


if __name__ == "__main__":
    main()
