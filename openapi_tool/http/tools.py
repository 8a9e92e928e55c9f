"""Plain HTTP: tools as operations, and what they have cost their caller."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openapi_tool.gateway.call import Answer
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.results import structure
from openapi_tool.http.calls import ClientGone, caller_of, json_object, while_connected
from openapi_tool.http.idempotency import Idempotency
from openapi_tool.http.openapi import document
from openapi_tool.http.problems import Problem, failed_call
from openapi_tool.http.senders import NOBODY
from openapi_tool.protocol.errors import Unavailable

_DAY_S = 86_400.0
_MAX_DAYS = 90  # for which rows of calls are kept


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
        shown = [tool.shown for tool in self._gateway.tools_of(caller_of(request))]
        return json_response(
            {
                "tools": [
                    {
                        "name": tool.name,
                        "title": tool.title,
                        "description": tool.description,
                        "parameters": tool.parameters,
                    }
                    for tool in shown
                ]
            }
        )

    async def openapi(self, request: Request) -> Response:
        """Describe the tools of the caller in OpenAPI 3.1."""
        caller = caller_of(request)
        url = str(request.base_url).rstrip("/")
        return json_response(document(self._gateway.tools_of(caller), url, needs_token=caller is not NOBODY))

    async def usage(self, request: Request) -> Response:
        """Return what the caller's calls have cost."""
        days = request.query_params.get("days", "1")
        if not (days.isascii() and days.isdigit() and len(days) <= len(str(_MAX_DAYS)) and 1 <= int(days) <= _MAX_DAYS):
            raise Problem(HTTPStatus.BAD_REQUEST, "bad_request", f"days must be a whole number from 1 to {_MAX_DAYS}.")
        caller = caller_of(request)
        try:
            rows = await self._gateway.usage_of(caller, time.time() - int(days) * _DAY_S)
        except Unavailable:
            raise _no_state() from None
        return json_response(
            {"project": caller.project_id, "agent": caller.agent_id, "days": int(days), "by_tool": rows}
        )

    async def budget(self, request: Request) -> Response:
        """Return what is left of the caller's budgets."""
        caller = caller_of(request)
        budgets = await self._gateway.budget_of(caller)
        return json_response({"project": caller.project_id, "agent": caller.agent_id, "budgets": budgets})

    async def call(self, request: Request) -> Response:
        """Run a tool."""
        arguments = await json_object(request)
        caller = caller_of(request)
        name = str(request.path_params["name"])
        key = request.headers.get("idempotency-key")
        try:
            if key is None or not self._gateway.may_call(caller, name):
                return self._response(await self._answer(request, name, arguments))
            with self._idempotency.request(caller, key, name, arguments) as once:
                if (body := await once.result()) is not None:
                    return Response(body, media_type="application/json", headers={"Idempotent-Replayed": "true"})
                answer = await self._answer(request, name, arguments)
                response = self._response(answer)
                if answer.may_store and answer.fields.error is None:
                    await once.store(bytes(response.body))
                return response
        except ClientGone:
            return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)

    async def _answer(self, request: Request, name: str, arguments: dict[str, Any]) -> Answer:
        answer, is_connected = await while_connected(request, self._gateway.call(caller_of(request), name, arguments))
        if not is_connected:
            self._gateway.keep_soon(answer)
        return answer

    def _response(self, answer: Answer) -> Response:
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
