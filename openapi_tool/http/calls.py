"""What end points do with a request: find its caller, read its JSON, and run a call while its client is connected."""

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
    """Return who sent a request; `Access` has put it there."""
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
        text = (await request.body()).decode()  # here, as a parser might guess another encoding than UTF-8
        value = loads(text or "{}")
    except ValueError:
        raise Problem(HTTPStatus.BAD_REQUEST, "bad_request", "The body is no JSON in UTF-8; correct it.") from None
    if not isinstance(value, dict):
        raise Problem(
            HTTPStatus.BAD_REQUEST, "bad_request", "The body must be a JSON object that holds the arguments by name."
        )
    return value


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Return the result of `work`, and whether the client is still connected.

    As soon as the client is gone, `work` is cancelled. Raises ClientGone if it has no result by then.
    """
    working = asyncio.create_task(work, name="request")
    leaving = asyncio.create_task(_until_disconnected(request), name="end of a client")
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        is_connected = not leaving.done()
        return working.result(), is_connected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])


async def _until_disconnected(request: Request) -> None:
    await request.body()  # what the server sends before anything else
    while (await request.receive())["type"] != "http.disconnect":
        pass
