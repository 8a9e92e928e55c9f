"""MCP over streamable HTTP, without sessions: any process of the gateway may answer any request of a client."""

from __future__ import annotations

from http import HTTPStatus

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import INVALID_REQUEST, ErrorData, JSONRPCError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.calls import Gateway
from openapi_tool.http.bodies import MAX_BODY_BYTES, with_body
from openapi_tool.http.calls import caller_of
from openapi_tool.mcp.messages import problem_of
from openapi_tool.mcp.server import Context, McpServer

PATH = "/mcp"


class McpDoor:
    """The end point `/mcp`; `manager.run()` is entered while it is served.

    `structured`: tools and results have a structure beside the text.
    """

    def __init__(self, gateway: Gateway, *, structured: bool) -> None:
        self.server = McpServer(gateway, _caller_in, structured=structured)
        # Without instructions for models, which describe tools: they are the same for all clients, and each caller has
        # tools of its own. Host, origin and size are checked by `Access`, not here.
        without_instructions = self.server.server([])
        self.manager = StreamableHTTPSessionManager(
            without_instructions, stateless=True, max_request_body_size=MAX_BODY_BYTES
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["method"] == "POST":
            body = await Request(scope, receive).body()
            problem = problem_of(body)
            if problem:
                refusal = _refusal(problem)
                await refusal(scope, receive, send)
                return
            receive = with_body(body, receive)  # for the SDK, which reads it again
        await self.manager.handle_request(scope, receive, send)


def _refusal(problem: str) -> Response:
    error = JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=INVALID_REQUEST, message=problem))
    body = error.model_dump_json(by_alias=True, exclude_unset=True)
    return Response(body, HTTPStatus.BAD_REQUEST, media_type="application/json")


def _caller_in(context: Context) -> Caller:
    """Return the caller of the HTTP request that an MCP request came with."""
    request = context.request
    assert isinstance(request, Request)  # noqa: S101 - what this transport gives
    return caller_of(request)
