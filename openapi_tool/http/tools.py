"""Plain HTTP: end points that list and run the tools, and say what calls have cost and what budgets are left."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openapi_tool.gateway.call import Answer
from openapi_tool.gateway.call_row import CALLS_DAYS
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.results import structure
from openapi_tool.http.calls import ClientGone, caller_of, json_object, while_connected
from openapi_tool.http.idempotency import Idempotency
from openapi_tool.http.openapi import document
from openapi_tool.http.problems import Problem, failed_call
from openapi_tool.http.senders import NOBODY
from openapi_tool.protocol.errors import Unavailable

_DAY_S = 86_400.0


def json_response(value: Any) -> Response:
    """Return a response with a JSON value."""
    return Response(orjson.dumps(value), media_type="application/json")


class ToolRoutes:
    """End points of plain HTTP."""

    def __init__(self, gateway: Gateway, idempotency: Idempotency) -> None:
        self._gateway = gateway
        self._idempotency = idempotency

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/v1/tools", self.tools, methods=["GET"]),
            Route("/v1/tools/{name}", self.call, methods=["POST"]),
            Route("/v1/usage", self.usage, methods=["GET"]),
            Route("/v1/budget", self.budget, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def tools(self, request: Request) -> Response:
        """List the tools of the caller."""
        tools = [
            {
                "name": tool.name,
                "title": tool.shown.title,
                "description": tool.shown.description,
                "parameters": tool.shown.parameters,
            }
            for tool in self._gateway.tools_of(caller_of(request))
        ]
        return json_response({"tools": tools})

    async def call(self, request: Request) -> Response:
        """Run a tool."""
        arguments = await json_object(request)
        caller = caller_of(request)
        name = str(request.path_params["name"])
        key = request.headers.get("idempotency-key")
        try:
            # Who may not call the tool (any more) gets no stored result: the call itself says why.
            if key is None or not self._gateway.may_call(caller, name):
                return _response(await self._answer(request, name, arguments))
            with self._idempotency.request(caller, key, name, arguments) as idempotent:
                stored_body = await idempotent.result()
                if stored_body is not None:
                    return Response(stored_body, media_type="application/json", headers={"Idempotent-Replayed": "true"})
                answer = await self._answer(request, name, arguments)
                response = _response(answer)
                if answer.may_store and answer.fields.error is None:
                    await idempotent.store(bytes(response.body))
                return response
        except ClientGone:
            return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)  # which nobody reads

    async def _answer(self, request: Request, name: str, arguments: dict[str, Any]) -> Answer:
        """Run a call and return its answer. Raises ClientGone."""
        answer, is_connected = await while_connected(request, self._gateway.call(caller_of(request), name, arguments))
        if not is_connected:
            self._gateway.keep_soon(answer)  # the client may repeat the call
        return answer

    async def usage(self, request: Request) -> Response:
        """Return what the caller's calls have cost."""
        days = _days_of(request)
        caller = caller_of(request)
        try:
            by_tool = await self._gateway.usage_of(caller, time.time() - days * _DAY_S)
        except Unavailable:
            raise _no_state() from None
        return json_response({"project": caller.project_id, "agent": caller.agent_id, "days": days, "by_tool": by_tool})

    async def budget(self, request: Request) -> Response:
        """Return what is left of the caller's budgets."""
        caller = caller_of(request)
        budgets = await self._gateway.budget_of(caller)
        return json_response({"project": caller.project_id, "agent": caller.agent_id, "budgets": budgets})

    async def openapi(self, request: Request) -> Response:
        """Describe the tools of the caller in OpenAPI 3.1."""
        caller = caller_of(request)
        url = str(request.base_url).rstrip("/")
        return json_response(document(self._gateway.tools_of(caller), url, needs_token=caller is not NOBODY))


def _days_of(request: Request) -> int:
    """Return the parameter `days`, by default 1. Raises Problem."""
    days = request.query_params.get("days", "1")
    # `int` would take digits of other scripts, and needs long for thousands of digits.
    is_short_number = days.isascii() and days.isdigit() and len(days) <= len(str(CALLS_DAYS))
    if not is_short_number or not 1 <= int(days) <= CALLS_DAYS:
        raise Problem(HTTPStatus.BAD_REQUEST, "bad_request", f"days must be a whole number from 1 to {CALLS_DAYS}.")
    return int(days)


def _response(answer: Answer) -> Response:
    if answer.fields.error is not None:
        return failed_call(answer)
    return json_response({"tool_call_id": answer.call_id, **structure(answer)})


def _no_state() -> Problem:
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "unavailable",
        "The state cannot be read now; try again later.",
        headers={"Retry-After": "1"},
    )
