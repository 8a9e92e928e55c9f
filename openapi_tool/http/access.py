"""Checks of each request before anything is done for it.

In this order: host, origin, framing, token (`senders.py`), share of the running requests (`request_shares.py`), body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from openapi_tool.host_names import host_of_header, is_internal
from openapi_tool.http.bodies import read_body, with_body
from openapi_tool.http.connections import Connection, Connections
from openapi_tool.http.oauth import ResourceMetadata
from openapi_tool.http.problems import Problem, nothing_there
from openapi_tool.http.request_shares import RequestShares
from openapi_tool.http.senders import Sender, Senders
from openapi_tool.options.gateway import GatewayOptions

_SINGLE_HEADERS = ("Content-Encoding", "Content-Type", "Idempotency-Key")
_TOKEN_CHECK_S = 2.0  # between two checks that the token of a running request is valid


class Access:
    """ASGI middleware that checks a request, and gives the app its caller (`request.state.caller`) and its body.

    `metadata` tells clients of an external issuer where they get tokens; None without such an issuer.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: GatewayOptions,
        senders: Senders,
        connections: Connections,
        metadata: ResourceMetadata | None,
    ) -> None:
        self._app = app
        self._options = options
        self._senders = senders
        self._connections = connections
        self._metadata = metadata
        self._shares = RequestShares(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await self._answer(scope, receive, send)
        except Problem as problem:
            await problem.response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and let the app answer it. Raises Problem."""
        headers = Headers(scope=scope)
        # No path of a gateway needs an escaped character, and a rule of a proxy for a path might not match it.
        if b"%" in scope["raw_path"]:
            raise nothing_there()
        self._check_host(headers)
        self._check_origin(headers)
        if self._metadata is not None and self._metadata.is_requested(scope):
            await self._metadata.response(scope, receive, send)
            return
        _check_framing(headers)
        sender = await self._senders.find(str(scope["client"][0]), headers)
        with self._shares.counted(sender.counted_as, sender.caller.project_id) as count_bytes:
            body = await read_body(headers, receive, count_bytes)
            if body is None:
                return  # the client is gone
            connection = self._connections.of(scope["client"])
            if connection is None:
                return  # it is gone, too
            connection.body_received()
            scope.setdefault("state", {})["caller"] = sender.caller
            with _closed_once_ended(connection, sender):
                await self._app(scope, with_body(body, receive), send)

    def _check_host(self, headers: Headers) -> None:
        """Refuse a foreign host name: a web page can have its own name resolve to this gateway. Raises Problem."""
        given = headers.getlist("host")
        host = host_of_header(given[0]) if len(given) == 1 else None  # of several none counts
        if not is_internal(host) and host not in self._options.allowed_hosts:
            raise Problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                "bad_request",
                "This gateway is not known by the name in Host: add it to gateway.allowed_hosts.",
                close=True,
            )

    def _check_origin(self, headers: Headers) -> None:
        """Refuse a request of a web page from elsewhere. Raises Problem."""
        given = headers.getlist("origin")
        if not given:
            return  # browsers send an origin with each request that a page of another one makes
        host = headers.get("host", "").lower()
        # The gateway has no pages, so a request with its own origin comes from no web page.
        allowed = (f"http://{host}", f"https://{host}", *self._options.allowed_origins)
        if len(given) > 1 or given[0].lower() not in allowed:
            raise Problem(
                HTTPStatus.FORBIDDEN,
                "forbidden",
                "Web pages of this origin may not call the gateway: add it to gateway.allowed_origins.",
                close=True,
            )


def _check_framing(headers: Headers) -> None:
    """Refuse what a proxy before the gateway might understand in another way, and a compressed body. Raises Problem."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise Problem(
            HTTPStatus.BAD_REQUEST,
            "bad_request",
            "The request has both Content-Length and Transfer-Encoding; send one of them.",
            close=True,
        )
    for name in _SINGLE_HEADERS:
        if len(headers.getlist(name)) > 1:
            raise Problem(
                HTTPStatus.BAD_REQUEST,
                "bad_request",
                f"The request has several {name} headers; send one.",
                close=True,
            )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "bad_request", "The body must not be compressed.", close=True)


@contextmanager
def _closed_once_ended(connection: Connection, sender: Sender) -> Iterator[None]:
    """While the context is open close the connection once the sender's token has been revoked or has expired.

    Otherwise a stream of MCP, which may be open for days, would outlive the token.
    """
    call_later = asyncio.get_running_loop().call_later
    next_check: asyncio.TimerHandle

    def check() -> None:
        nonlocal next_check
        if sender.has_ended():
            connection.abort()
        else:
            next_check = call_later(_TOKEN_CHECK_S, check)

    next_check = call_later(_TOKEN_CHECK_S, check)
    try:
        yield
    finally:
        next_check.cancel()
