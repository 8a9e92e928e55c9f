"""The OpenAPI 3.1 document of the tools that a caller may use: one operation per tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from openapi_tool import __version__
from openapi_tool.gateway.results import STRUCTURE
from openapi_tool.gateway.tools import GatewayTool
from openapi_tool.http.problems import PROBLEM_TYPE, STATUS_OF_CODE
from openapi_tool.http.strict import strict_schema

_JSON_TYPE = "application/json"

_PROBLEM: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What happened, and what to do instead."},
        "code": {"type": "string", "enum": sorted({*STATUS_OF_CODE, "unauthorized", "forbidden", "unavailable"})},
        "retryable": {"type": "boolean", "description": "Whether the same call may work later."},
        "details": {
            "type": "object",
            "description": "Numbers and names behind `detail`, such as `retry_after_s`, or `limit` and `used`.",
        },
        "tool_call_id": {"type": "string"},
    },
    "required": ["type", "title", "status", "detail", "code"],
}

_STATUSES_OF_PROBLEMS = {
    *STATUS_OF_CODE.values(),
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.CONFLICT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.SERVICE_UNAVAILABLE,
}
"""Statuses of problems that a client should know."""

_RESULT: Mapping[str, Any] = {
    **STRUCTURE,
    "properties": {
        "tool_call_id": {"type": "string", "description": "Id of the call, for the gateway's operator."},
        **STRUCTURE["properties"],
    },
}


def document(tools: Sequence[GatewayTool], server_url: str, *, needs_token: bool) -> dict[str, Any]:
    """Return the document. A client sends its requests to `server_url`, with a token if it needs one."""
    security: dict[str, list[str]] = {"token": []} if needs_token else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "openapi-tool",
            "version": __version__,
            "description": "Search the web and read pages through Jina.",
        },
        "servers": [{"url": server_url}],
        "security": [security],
        "paths": {f"/v1/tools/{tool.name}": {"post": _operation(tool)} for tool in tools},
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Result": _RESULT, "Problem": _PROBLEM},
            "responses": {"Problem": _response("Why there is no result.", PROBLEM_TYPE, "Problem")},
        },
    }


def _operation(tool: GatewayTool) -> dict[str, Any]:
    statuses = sorted(str(int(status)) for status in _STATUSES_OF_PROBLEMS)
    problems = {status: {"$ref": "#/components/responses/Problem"} for status in (*statuses, "default")}
    return {
        "operationId": tool.name,
        "summary": tool.shown.title,
        "description": tool.shown.description,
        "requestBody": {"required": True, "content": {_JSON_TYPE: {"schema": strict_schema(tool)}}},
        "responses": {
            "200": _response("The result: a text for a model, and what is known of it.", _JSON_TYPE, "Result"),
            **problems,
        },
    }


def _response(description: str, media_type: str, schema: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}
