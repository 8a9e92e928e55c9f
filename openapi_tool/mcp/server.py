"""MCP server over a gateway, for any transport and both protocol eras (2026-07-28, and 2025 with its handshake)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.session import ServerSession
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    RequestId,
    SubscriptionFilter,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from openapi_tool import __version__
from openapi_tool.gateway.call import Answer, Caller, CallProgress, RunningCall
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.tools import GatewayTool
from openapi_tool.mcp.results import as_mcp_result, as_mcp_tool
from openapi_tool.tools.exports import system_role

NAME = "openapi-tool"
_PROGRESS_S = 1.0  # between two notifications of the progress of a call

Context = ServerRequestContext[Any, Any]
OnAnswer = Callable[[RequestId, Answer], None]
"""Called with each answer before it is sent, so that a transport can say that nobody took it."""


class McpServer:
    """MCP server whose callers are named by `caller_of`, from what a transport knows of a request.

    With `structured` tools and results have a structure beside the text. `on_answer` is the transport's.
    """

    def __init__(
        self,
        gateway: Gateway,
        caller_of: Callable[[Context], Caller],
        *,
        structured: bool = False,
        on_answer: OnAnswer = lambda _id, _answer: None,
    ) -> None:
        self._gateway = gateway
        self._caller_of = caller_of
        self._structured = structured
        self._on_answer = on_answer
        self._events = InMemorySubscriptionBus()
        self._listeners = ListenHandler(self._events)
        self._handshaken: ServerSession | None = None  # of the last client with a handshake that has listed the tools

    def server(self, described: Sequence[GatewayTool]) -> Server[Any]:
        """Return the low-level server, whose instructions for models describe these tools."""
        shown = [tool.shown for tool in described]
        return Server(
            NAME,
            version=__version__,
            title="Web search and reading",
            description="Search the web and read pages through Jina.",
            instructions=system_role(shown) if shown else None,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_subscriptions_listen=self._listen,
            get_tool_input_schema=self._schema_of,
        )

    def _schema_of(self, name: str) -> Mapping[str, Any] | None:
        """Return a tool's schema, for the SDK's check of headers; else it would list all tools for each call."""
        return next((tool.shown.parameters for tool in self._gateway.tools if tool.name == name), None)

    async def tools_changed(self) -> None:
        """Notify the clients that want to hear of it; those of 2026-07-28 subscribe."""
        await self._events.publish(ToolsListChanged())
        if self._handshaken is not None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._handshaken.send_tool_list_changed()

    def end_subscriptions(self) -> None:
        """End the open streams of clients that subscribed, as the server is about to stop."""
        self._listeners.close()

    async def _listen(self, context: Context, params: SubscriptionsListenRequestParams) -> SubscriptionsListenResult:
        """Serve a subscription to what can change, the tools: a filter of a megabyte is neither kept nor sent back."""
        tools_alone = SubscriptionFilter(tools_list_changed=params.notifications.tools_list_changed)
        return await self._listeners(context, params.model_copy(update={"notifications": tools_alone}))

    async def _list_tools(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        del params  # all tools are one page
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            self._handshaken = context.session
        tools = self._gateway.tools_of(self._caller_of(context))
        return ListToolsResult(tools=[as_mcp_tool(tool, structured=self._structured) for tool in tools])

    async def _call_tool(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        caller = self._caller_of(context)
        async with _reported(context) as started:
            answer = await self._gateway.call(caller, params.name, params.arguments, started)
        if context.request_id is not None:
            self._on_answer(context.request_id, answer)
        return as_mcp_result(answer, structured=self._structured)


def initialization(server: Server[Any]) -> InitializationOptions:
    """Return the options of the handshake: the tools may change while the server runs."""
    return server.create_initialization_options(NotificationOptions(tools_changed=True))


@asynccontextmanager
async def _reported(context: Context) -> AsyncIterator[Callable[[RunningCall], None]]:
    """Report the progress of the call that the yielded function gets; nothing is sent to a client that did not ask."""
    reporting: list[asyncio.Task[None]] = []

    def started(running: RunningCall) -> None:
        reporting.append(asyncio.create_task(_report(context.session, running), name="progress"))

    try:
        yield started
    finally:
        for task in reporting:
            task.cancel()


async def _report(session: ServerSession, running: RunningCall) -> None:
    """Report every second. Progress must grow each time, so the time that an item takes counts as a part of it."""
    done = 0
    waited = 0  # reports since the last item was done
    with suppress(Exception):  # the client is gone: the call itself ends by that
        while True:
            await asyncio.sleep(_PROGRESS_S)
            progress = running.progress
            waited = waited + 1 if progress.done == done else 1
            done = progress.done
            if done == progress.items:
                continue
            part_of_item = waited / (waited + 10)  # grows with each report, and stays below 1
            await session.report_progress(done + part_of_item, progress.items, _message(progress))


def _message(progress: CallProgress) -> str:
    of = f"{progress.done} of {progress.items} done" if progress.items > 1 else ""
    waits = "waiting for a permit of the rate limit, or for a retry" if progress.waits else ""
    return ", ".join(filter(None, (of, waits))) or "waiting for the upstream"
