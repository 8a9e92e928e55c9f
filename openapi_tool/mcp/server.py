"""MCP server over a gateway, for any transport and both protocol eras.

Clients of the version 2026-07-28 send requests without a handshake, and subscribe to changes. Clients of the versions
of 2025 begin with a handshake; the last of them that has listed the tools is notified of changes. The SDK (package
`mcp`) does the protocol; `McpServer` has the functions that it calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.session import ServerSession
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types import (
    METHOD_NOT_FOUND,
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
from openapi_tool.tools.wording import short

NAME = "openapi-tool"
_PROGRESS_S = 1.0  # between two reports of a call's progress
_MAX_METHOD_CHARS = 200  # of a name that an error may repeat

Context = ServerRequestContext[Any, Any]
"""What the SDK knows of a request: its id, its session, and what the transport adds."""

OnAnswer = Callable[[RequestId, Answer], None]
"""Called with the id of a request and its answer, before it is sent: the transport finds out whether it is taken."""


class McpServer:
    """MCP server over a gateway.

    - `caller_of`: returns who calls, from what the transport knows of a request.
    - `structured`: whether tools and results have a structure beside the text.
    - `on_answer`: is called with each answer before it is sent.
    """

    def __init__(
        self,
        gateway: Gateway,
        caller_of: Callable[[Context], Caller],
        *,
        structured: bool = False,
        on_answer: OnAnswer | None = None,
    ) -> None:
        self._gateway = gateway
        self._caller_of = caller_of
        self._structured = structured
        self._on_answer = on_answer
        self._events = InMemorySubscriptionBus()
        self._listeners = ListenHandler(self._events)
        # Of the last client with a handshake that has listed the tools. Over stdio there is only one client.
        self._session_with_handshake: ServerSession | None = None

    def server(self, described: Sequence[GatewayTool]) -> Server[Any]:
        """Return the SDK's server. Its instructions for models describe these tools; without any it has none."""
        shown = [tool.shown for tool in described]
        server: Server[Any] = Server(
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
        server.middleware.append(_refuse_long_method)
        return server

    async def _list_tools(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        del params  # all tools are one page
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            self._session_with_handshake = context.session
        tools = self._gateway.tools_of(self._caller_of(context))
        return ListToolsResult(tools=[as_mcp_tool(tool, structured=self._structured) for tool in tools])

    async def _call_tool(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        caller = self._caller_of(context)
        async with _reported(context) as started:
            answer = await self._gateway.call(caller, params.name, params.arguments, started)
        if self._on_answer is not None and context.request_id is not None:
            self._on_answer(context.request_id, answer)
        return as_mcp_result(answer, structured=self._structured)

    async def _listen(self, context: Context, params: SubscriptionsListenRequestParams) -> SubscriptionsListenResult:
        """Serve a subscription to changes of the tools, as nothing else can change.

        A client says in a filter of which changes it wants to know. The rest of the filter may be as large as a
        megabyte, and is neither kept nor sent back.
        """
        tools_alone = SubscriptionFilter(tools_list_changed=params.notifications.tools_list_changed)
        return await self._listeners(context, params.model_copy(update={"notifications": tools_alone}))

    def _schema_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the schema of a tool's arguments, with which the SDK checks the headers of a call.

        Without this function the SDK would list all tools for each call.
        """
        for tool in self._gateway.tools:
            if tool.name == name:
                return tool.shown.parameters
        return None

    async def tools_changed(self) -> None:
        """Notify the clients that have subscribed, and the last one with a handshake that has listed the tools."""
        await self._events.publish(ToolsListChanged())
        if self._session_with_handshake is not None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the client is gone
                await self._session_with_handshake.send_tool_list_changed()

    def end_subscriptions(self) -> None:
        """End the open streams of clients that have subscribed; called when the server is about to stop."""
        self._listeners.close()


async def _refuse_long_method(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Refuse a request by a name that is too long for any method; the SDK's error would repeat it whole."""
    if ctx.request_id is not None and len(ctx.method) > _MAX_METHOD_CHARS:
        raise MCPError(METHOD_NOT_FOUND, "Method not found", short(ctx.method))
    return await call_next(ctx)


def initialization(server: Server[Any]) -> InitializationOptions:
    """Return the options of the handshake: the tools may change while the server runs."""
    return server.create_initialization_options(NotificationOptions(tools_changed=True))


@asynccontextmanager
async def _reported(context: Context) -> AsyncIterator[Callable[[RunningCall], None]]:
    """Yield a function that is called with the call once it runs. Its progress is reported until the context ends.

    The SDK sends a report only to a client that has asked for progress.
    """
    reporting: list[asyncio.Task[None]] = []  # empty until the call runs, then one task

    def started(running: RunningCall) -> None:
        reporting.append(asyncio.create_task(_report(context.session, running), name="progress"))

    try:
        yield started
    finally:
        for task in reporting:
            task.cancel()


async def _report(session: ServerSession, running: RunningCall) -> None:
    """Report the progress of a call every second.

    An item is one of the pages or searches of the call. MCP wants progress to grow with each report. So each report
    counts a part of the item that is not done yet.
    """
    done = 0  # items at the last report
    reports_of_item = 0  # reports since the last item was done
    with suppress(Exception):  # the client is gone, which ends the call, too
        while True:
            await asyncio.sleep(_PROGRESS_S)
            progress = running.progress
            reports_of_item = reports_of_item + 1 if progress.done == done else 1
            done = progress.done
            if done == progress.items:
                continue  # the call ends soon
            part_of_item = reports_of_item / (reports_of_item + 10)  # grows with each report, and stays below 1
            await session.report_progress(done + part_of_item, progress.items, _message(progress))


def _message(progress: CallProgress) -> str:
    parts = []
    if progress.items > 1:
        parts.append(f"{progress.done} of {progress.items} done")
    if progress.is_waiting:
        parts.append("waiting for a permit of the rate limit, or for a retry")
    return ", ".join(parts) or "waiting for the upstream"
