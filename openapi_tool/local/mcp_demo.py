"""`demo --door mcp`: an MCP client that starts the server as a real one does, against the double or the real Jina."""

from __future__ import annotations

from typing import Any

from mcp import Client, StdioServerParameters
from mcp_types import TextContent

from openapi_tool.local.door_demo import CALL_TIMEOUT_S, DoorDemo, ShownCall, cursor_in, door_command
from openapi_tool.local.sample_arguments import SAMPLE_CALLS


async def play(upstream: str) -> DoorDemo:
    """List the tools, run the calls of the demo, and read the second part of the last result. Raises ServerFailed."""
    with door_command(upstream, "mcp") as command:
        program, *arguments = command.words
        server = StdioServerParameters(command=program, args=arguments, env=command.environment)
        async with Client(server, read_timeout_seconds=CALL_TIMEOUT_S) as client:
            tools = [tool.name for tool in (await client.list_tools()).tools]
            calls = [await _call(client, name, arguments) for name, arguments in SAMPLE_CALLS[upstream]]
            cursor = cursor_in(calls[-1].text)
            if cursor:
                calls.append(await _call(client, "jina_read", {"cursor": cursor}))
            return DoorDemo(f"MCP {client.session.protocol_version or ''} over stdio", tools, calls)


async def _call(client: Client, name: str, arguments: dict[str, Any]) -> ShownCall:
    result = await client.call_tool(name, arguments)
    texts = [content.text for content in result.content if isinstance(content, TextContent)]
    return ShownCall(name, arguments, bool(result.is_error), "\n".join(texts))
