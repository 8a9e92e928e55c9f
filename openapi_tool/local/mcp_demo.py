"""`demo --door mcp`: an MCP client that starts the server as a real one does, against the double or the real Jina."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp_types import TextContent

from openapi_tool.environment import DEFAULT_AUTH_ENV, PREFIX
from openapi_tool.local.guard import Guard
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import CALLS, MAX_RESULT_CHARS, UpstreamDouble, make_certificates

_CALL_TIMEOUT_S = 60.0
_CURSOR = 'with only cursor "'


@dataclass(frozen=True, slots=True)
class McpCall:
    """One call of the demo, and what the model would read."""

    tool: str
    arguments: Mapping[str, Any]
    failed: bool
    text: str


@dataclass(frozen=True, slots=True)
class McpDemo:
    """What the client has seen."""

    protocol: str
    tools: list[str]
    calls: list[McpCall]


async def play(upstream: str) -> McpDemo:
    """List the tools, run the calls of the demo, and read the second part of the last result. Raises ServerFailed."""
    with _server(upstream) as server:
        async with Client(server, read_timeout_seconds=_CALL_TIMEOUT_S) as client:
            tools = [tool.name for tool in (await client.list_tools()).tools]
            calls = [await _call(client, name, arguments) for name, arguments in CALLS[upstream]]
            if cursor := calls[-1].text.rpartition(_CURSOR)[2].partition('"')[0]:
                calls.append(await _call(client, "jina_read", {"cursor": cursor}))
            return McpDemo(client.session.protocol_version or "", tools, calls)


async def _call(client: Client, name: str, arguments: dict[str, Any]) -> McpCall:
    result = await client.call_tool(name, arguments)
    texts = [content.text for content in result.content if isinstance(content, TextContent)]
    return McpCall(name, arguments, bool(result.is_error), "\n".join(texts))


@contextmanager
def _server(upstream: str) -> Iterator[StdioServerParameters]:
    """Yield how to start the server; the double, if one is needed, runs meanwhile."""
    settings = {f"{PREFIX}TOOLS__MAX_RESULT_CHARS": str(MAX_RESULT_CHARS), "PATH": os.environ.get("PATH", "")}
    options = ["--state", ":memory:"]
    if upstream == "real":
        key = {DEFAULT_AUTH_ENV: os.environ[DEFAULT_AUTH_ENV]}
        arguments = ["-m", "openapi_tool", "mcp", *options]
        yield StdioServerParameters(command=sys.executable, args=arguments, env=settings | key)
        return
    guard = Guard(())
    folder = Path(tempfile.mkdtemp(prefix="openapi-tool-"))
    guard.delete_at_end(folder)
    certificates = make_certificates(folder)
    double = UpstreamDouble(folder, certificates, guard, (DEFAULT_AUTH_ENV,))
    try:
        double.start()
        settings |= {**double.keys, "SSL_CERT_FILE": str(certificates.ca)}
        settings[f"{PREFIX}URL_POLICY__ALLOW"] = RECORDED_HOSTS
        module = ["-m", "openapi_tool.local.mcp_server", "--upstream-port", str(double.port)]
        yield StdioServerParameters(command=sys.executable, args=[*module, *options], env=settings)
    finally:
        double.stop()
        guard.close()
