"""Bodies of requests: read whole, up to a size, before the app gets them."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from openapi_tool.http.problems import Problem

MAX_BODY_BYTES = 2**20
"""Four times the largest arguments."""

_DISCARDED_BYTES = 16 * 2**20
"""What is read and dropped of a body that is too large: most clients send all of it before they read an answer."""


async def read_body(headers: Headers, receive: Receive, hold: Callable[[int], None]) -> bytes | None:
    """Return the body of a request, None if its client is gone. Raises Problem if it is too large.

    `hold` gets the size of each part before it is kept, and may raise.
    """
    declared = headers.get("content-length", "0")
    too_large = declared.isdigit() and int(declared) > MAX_BODY_BYTES
    body = bytearray()
    received = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        received += len(part)
        too_large = too_large or received > MAX_BODY_BYTES
        if not too_large:
            hold(len(part))
            body += part
        if not message.get("more_body", False) or received > _DISCARDED_BYTES:
            break
    if too_large:
        raise Problem(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "bad_request",
            f"The body is larger than {MAX_BODY_BYTES:,} bytes; send less.",
            close=True,
        )
    return bytes(body)


def with_body(body: bytes, receive: Receive) -> Receive:
    """Return what an app receives: the body, and then the end of the connection."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
