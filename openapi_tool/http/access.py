"""Who may call: checks of each request before anything is done for it.

In this order: host, origin, framing, token, share of the running requests, body.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from cachetools import TTLCache
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.jwt_errors import ClaimUnusable, JwtRefused
from openapi_tool.gateway.token_record import MAX_NAME_CHARS, Token
from openapi_tool.gateway.tokens import Tokens
from openapi_tool.host_names import host_of_header, is_internal
from openapi_tool.http.bodies import read_body, with_body
from openapi_tool.http.connections import Connection, Connections
from openapi_tool.http.oauth import ResourceMetadata
from openapi_tool.http.problems import Problem, nothing_there
from openapi_tool.http.request_shares import RequestShares
from openapi_tool.options.gateway import GatewayOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import is_token

if TYPE_CHECKING:
    from openapi_tool.gateway.jwts import Jwts  # which imports what few deployments need

log = logging.getLogger(__name__)

_SINGLE_HEADERS = ("Content-Encoding", "Content-Type", "Idempotency-Key")

FAILED_TRIES = 20
"""Wrong tokens that one address may send, each within `FAILED_TRIES_S` seconds of the one before; more get 429."""
FAILED_TRIES_S = 60.0

_MAX_ADDRESSES = 10_000  # whose wrong tokens are counted
_OUTDATED_RETRY_S = 5  # `Retry-After` while no token can be checked
_TOKEN_CHECK_S = 2.0  # between two checks that the token of a running request is valid
NOBODY = Caller("local", "local")
"""Caller of a gateway without tokens, on loopback; its records are those of `openapi-tool mcp`."""


class FailedTries:
    """Wrong tokens by address: of IPv4 one, of IPv6 a network of 64 bits."""

    def __init__(self) -> None:
        self._tries: TTLCache[str, int] = TTLCache(_MAX_ADDRESSES, FAILED_TRIES_S, time.monotonic)

    def add(self, address: str) -> bool:
        """Count a try; return whether the address has more than it may."""
        try:
            parsed = ip_address(address.partition("%")[0])
        except ValueError:
            pass
        else:
            if isinstance(parsed, IPv6Address):
                address = str(ip_network((parsed, 64), strict=False))
        self._tries[address] = tries = self._tries.get(address, 0) + 1
        return tries > FAILED_TRIES


@dataclass(frozen=True, slots=True)
class _Entry:
    """Who sends a request.

    `counted_as` is the name of its token in `RequestShares`. `has_ended` returns whether the token is valid no longer.
    """

    caller: Caller
    counted_as: str
    has_ended: Callable[[], bool]


class Access:
    """ASGI middleware: checks host, origin, token and size of a request, and gives the app its caller and its body.

    `open_to_all`: nobody needs a token, until there is one. `jwts` finds the callers of an external issuer's tokens.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: GatewayOptions,
        tokens: Tokens,
        connections: Connections,
        *,
        open_to_all: bool,
        jwts: Jwts | None = None,
    ) -> None:
        self._jwts = jwts
        self._metadata = ResourceMetadata(jwts.options) if jwts else None
        self._app = app
        self._options = options
        self._tokens = tokens
        self._connections = connections
        self._open_to_all = open_to_all
        self._failed = FailedTries()
        self._shares = RequestShares(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await self._answer(scope, receive, send)
        except Problem as problem:
            await problem.response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if b"%" in scope["raw_path"]:  # none needs it, and a proxy's rule for paths may not decode it
            raise nothing_there()
        self._check_host(headers)
        self._check_origin(headers)
        if self._metadata and scope["path"] in self._metadata.paths and scope["method"] in ("GET", "HEAD"):
            await self._metadata.response(scope, receive, send)
            return
        _check_framing(headers)
        entry = await self._entry(scope, headers)
        with self._shares.counted(entry.counted_as, entry.caller.project_id) as hold:
            body = await read_body(headers, receive, hold)
            if body is None:
                return  # the client is gone
            if (connection := self._connections.of(scope["client"])) is None:
                return  # it went meanwhile
            connection.received()
            scope.setdefault("state", {})["caller"] = entry.caller
            with _ending_with(entry, connection):
                await self._app(scope, with_body(body, receive), send)

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        host = host_of_header(given[0]) if len(given) == 1 else None
        if not is_internal(host) and host not in self._options.allowed_hosts:
            raise Problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                "bad_request",
                "This gateway is not known by the name in Host: add it to gateway.allowed_hosts.",
                close=True,
            )

    def _check_origin(self, headers: Headers) -> None:
        given = headers.getlist("origin")
        # The gateway has no pages, so a request with its own origin comes from no web page.
        own = (f"{scheme}://{headers.get('host', '')}".lower() for scheme in ("http", "https"))
        if given and (len(given) > 1 or given[0].lower() not in (*own, *self._options.allowed_origins)):
            raise Problem(
                HTTPStatus.FORBIDDEN,
                "forbidden",
                "Web pages of this origin may not call the gateway: add it to gateway.allowed_origins.",
                close=True,
            )

    async def _entry(self, scope: Scope, headers: Headers) -> _Entry:
        """Return who sends the request. Raises Problem."""
        self._open_to_all = self._open_to_all and not len(self._tokens)
        if self._open_to_all:
            return _Entry(NOBODY, "", has_ended=lambda: False)
        given = headers.getlist("authorization")
        scheme, _, text = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        is_bearer = scheme.lower() == "bearer"
        if self._jwts is not None and is_bearer and self._jwts.looks_like_jwt(text):
            return await self._jwt_entry(self._jwts, text.strip(), headers)
        text = text.strip()
        tokens = self._tokens
        found = tokens.find(text) if is_bearer else None
        if found is None and tokens.outdated:
            raise _unchecked("the state of this gateway")
        if found is None:
            raise self._refusal(str(scope["client"][0]), text, tried=bool(given))
        token_id, token = found
        caller = Caller(token.project, _agent_of(token, headers), token.tools)
        return _Entry(caller, token_id, lambda: tokens.find(text) is None and not tokens.outdated)

    async def _jwt_entry(self, jwts: Jwts, text: str, headers: Headers) -> _Entry:
        """Return the caller of a JWT. Raises Problem.

        Wrong ones are not counted: none can be guessed, and behind a proxy many expire at once.
        """
        try:
            caller, valid_until = await jwts.caller(text)
        except ClaimUnusable as unusable:
            raise Problem(HTTPStatus.FORBIDDEN, "forbidden", str(unusable), close=True) from None
        except JwtRefused:
            raise self._unauthorized("invalid_token") from None
        except Unavailable:
            raise _unchecked("the keys of the issuer") from None
        if headers.getlist("x-agent-id") not in ([], [caller.agent_id]):
            raise Problem(
                HTTPStatus.FORBIDDEN,
                "forbidden",
                "This token may not name an agent: leave X-Agent-Id out.",
                close=True,
            )
        ends = valid_until + self._options.call_timeout_s  # a call that began in time is answered
        return _Entry(caller, f"{caller.project_id} {caller.agent_id}", lambda: time.time() > ends)

    def _refusal(self, address: str, token: str, *, tried: bool) -> Problem:
        """Return the problem of a request without a right token; the reason is not told, as it would help to guess."""
        if tried and self._failed.add(address):
            return Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "rate_limited",
                "Too many wrong tokens came from this address; wait a minute.",
                headers={"Retry-After": str(math.ceil(FAILED_TRIES_S))},
                close=True,
            )
        if tried:
            self._log_refusal(address, token)
        return self._unauthorized("invalid_token" if tried else "")

    def _unauthorized(self, error: str) -> Problem:
        source = "the issuer gives you one" if self._metadata else "`openapi-tool tokens create` makes one"
        challenge = self._metadata.challenge(error) if self._metadata else "Bearer"
        return Problem(
            HTTPStatus.UNAUTHORIZED,
            "unauthorized",
            f"Send a token that is neither expired nor revoked as `Authorization: Bearer …`; {source}.",
            headers={"WWW-Authenticate": challenge},
            close=True,
        )

    def _log_refusal(self, address: str, text: str) -> None:
        what, ids = "a wrong token", {}
        if ended := self._tokens.find_ended(text):  # whoever has its secret is no guesser
            token_id, token = ended
            what = f"the token {token_id}, which is {'expired' if token.revoked is None else 'revoked'}"
            ids = {"project_id": token.project, "agent_id": token.agent}
        log.warning("refused %s", what, extra={"action": "token.refused", "address": address, **ids})


def _agent_of(token: Token, headers: Headers) -> str:
    """Return the agent that the request names, else that of its token. Raises Problem."""
    agents = headers.getlist("x-agent-id")
    agent = agents[0] if agents else token.agent
    if len(agents) > 1 or (agents and not (is_token(agent) and len(agent) <= MAX_NAME_CHARS)):
        raise Problem(
            HTTPStatus.BAD_REQUEST,
            "bad_request",
            f"X-Agent-Id must be one id of at most {MAX_NAME_CHARS} characters, without blanks and `.*>`.",
            close=True,
        )
    if agent != token.agent and not token.any_agent:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "forbidden",
            "This token may not name an agent: leave X-Agent-Id out, or create a token with --any-agent.",
            close=True,
        )
    return agent


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
def _ending_with(entry: _Entry, connection: Connection) -> Iterator[None]:
    """While the context is open close the connection once its token has been revoked or has expired.

    Else a stream of MCP would stay open with it.
    """
    call_later = asyncio.get_running_loop().call_later
    next_check: asyncio.TimerHandle

    def check() -> None:
        nonlocal next_check
        if entry.has_ended():
            connection.abort()
        else:
            next_check = call_later(_TOKEN_CHECK_S, check)

    next_check = call_later(_TOKEN_CHECK_S, check)
    try:
        yield
    finally:
        next_check.cancel()


def _unchecked(what: str) -> Problem:
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "unavailable",
        f"No token can be checked, as {what} cannot be read; call again later.",
        headers={"Retry-After": str(_OUTDATED_RETRY_S)},
        close=True,
    )
