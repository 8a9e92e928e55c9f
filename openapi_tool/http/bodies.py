"""Bodies of requests: read whole, up to a size, before the app gets them."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from openapi_tool.http.problems import Problem

MAX_BODY_BYTES = 2**20
"""Largest body: four times the largest arguments of a tool."""

_MAX_READ_BYTES = 16 * 2**20
"""So much is read of a body that is too large, and dropped: most clients send all of it before they read an answer."""


async def read_body(headers: Headers, receive: Receive, count_bytes: Callable[[int], None]) -> bytes | None:
    """Return the body of a request, None if its client is gone. Raises Problem if it is too large.

    `count_bytes` gets the size of each part before it is kept. It raises Problem if the sender has too many.
    """
    declared = headers.get("content-length", "0")
    too_large = declared.isdigit() and int(declared) > MAX_BODY_BYTES  # known before the first byte
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
            count_bytes(len(part))
            body += part
        if not message.get("more_body", False) or received > _MAX_READ_BYTES:
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
    """Return a `receive` for an app: it returns the body that was read already, and then what `receive` returns."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
