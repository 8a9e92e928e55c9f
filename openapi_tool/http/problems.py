"""Errors of the HTTP door as problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openapi_tool.gateway.call import Answer

PROBLEM_TYPE = "application/problem+json"

STATUS_OF_CODE: Mapping[str, HTTPStatus] = {
    "bad_request": HTTPStatus.BAD_REQUEST,
    "not_found": HTTPStatus.NOT_FOUND,
    "tool_misconfigured": HTTPStatus.INTERNAL_SERVER_ERROR,
    "tool_not_available": HTTPStatus.FORBIDDEN,
    "auth_failed": HTTPStatus.BAD_GATEWAY,
    "rate_limited": HTTPStatus.TOO_MANY_REQUESTS,
    "budget_exceeded": HTTPStatus.PAYMENT_REQUIRED,
    "target_refused": HTTPStatus.UNPROCESSABLE_ENTITY,
    "upstream_rejected": HTTPStatus.UNPROCESSABLE_ENTITY,
    "upstream_unavailable": HTTPStatus.BAD_GATEWAY,
    "response_too_large": HTTPStatus.BAD_GATEWAY,
    "tool_timeout": HTTPStatus.GATEWAY_TIMEOUT,
    "internal_error": HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""HTTP status of each error code of a call."""

_WITH_RETRY_AFTER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses after which clients wait as `Retry-After` says (RFC 6585 and RFC 9110)."""


class Problem(Exception):
    """Why a request is refused before any call. `close` ends its connection: the rest of the request is not read."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})
        if close:
            self.headers["Connection"] = "close"

    @property
    def response(self) -> Response:
        """The response."""
        return _response(self.status, self.code, self.detail, self.headers)


def _response(
    status: HTTPStatus,
    code: str,
    detail: str,
    headers: Mapping[str, str],
    more: Mapping[str, Any] | None = None,
) -> Response:
    """Return the response of a problem, whose body has the members `more`, too."""
    body = {
        "type": f"urn:openapi-tool:problem:{code}",
        "title": code.replace("_", " ").capitalize(),
        "status": int(status),
        "detail": detail,
        "code": code,
        **(more or {}),
    }
    return Response(orjson.dumps(body), status, headers, PROBLEM_TYPE)


def failed_call(answer: Answer) -> Response:
    """Return the response of a failed call, with the members of its error.

    The error's `message` is the `detail` of the problem (RFC 9457, section 3.1.4), and its `detail` becomes `details`.
    """
    more = dict(answer.fields.error or {})
    code = str(more.pop("code"))
    message = str(more.pop("message"))
    details = more.pop("detail", None)
    status = STATUS_OF_CODE.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)
    more["usage"] = (answer.fields.tool_output or {}).get("usage")
    headers = {}
    if details is not None:
        more["details"] = details
        if status in _WITH_RETRY_AFTER and isinstance(details, dict) and "retry_after_s" in details:
            headers["Retry-After"] = str(details["retry_after_s"])
    if answer.call_id is not None:
        more["tool_call_id"] = answer.call_id
    return _response(status, code, message, headers, more)


def nothing_there() -> Problem:
    """Return the problem of a request to an unknown path."""
    return Problem(
        HTTPStatus.NOT_FOUND, "not_found", "There is nothing at this path; /openapi.json lists the operations."
    )


async def on_problem(request: Request, error: Exception) -> Response:
    """Return the response of a refused request. Starlette calls this with a Problem, or with an error of its own."""
    del request
    if isinstance(error, Problem):
        return error.response
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    headers = {}
    if isinstance(error, HTTPException):  # of the router: an unknown path, or another method
        status = HTTPStatus(error.status_code)
        headers = dict(error.headers or {})
    if status is HTTPStatus.NOT_FOUND:
        return nothing_there().response
    return Problem(status, "bad_request", f"{status.phrase}: see /openapi.json.", headers=headers).response
