"""Run calls for the requests of clients, as long as they are connected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request

from openapi_tool.gateway.call import Caller
from openapi_tool.http.problems import Problem
from openapi_tool.protocol.jsontext import loads

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer."""


def caller_of(request: Request) -> Caller:
    """Return who sent a request, as `Access` has found."""
    caller: Caller = request.state.caller
    return caller


async def json_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request, {} for an empty body. Raises Problem."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "bad_request", "Send the arguments as Content-Type: application/json."
        )
    try:
        value = loads((await request.body()).decode() or "{}")  # decoded here: a parser may guess another encoding
    except ValueError:
        raise Problem(HTTPStatus.BAD_REQUEST, "bad_request", "The body is no JSON in UTF-8; correct it.") from None
    if not isinstance(value, dict):
        raise Problem(
            HTTPStatus.BAD_REQUEST, "bad_request", "The body must be a JSON object that holds the arguments by name."
        )
    return value


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Return the result of `work`, and whether its client is still there; cancel it as soon as that one is gone.

    Raises ClientGone.
    """
    working = asyncio.create_task(work, name="request")
    gone = asyncio.create_task(_disconnected(request), name="end of a client")
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result(), not gone.done()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait([working, gone])


async def _disconnected(request: Request) -> None:
    await request.body()
    while (await request.receive())["type"] != "http.disconnect":
        pass
