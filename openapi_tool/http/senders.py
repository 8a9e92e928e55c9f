"""Who sends a request: its caller, by the token in its `Authorization` header.

A token is one of `openapi-tool tokens` (`gateway/tokens.py`), or a JWT of an external issuer (`gateway/jwts.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from cachetools import TTLCache
from starlette.datastructures import Headers

from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.jwt_errors import ClaimUnusable, JwtRefused
from openapi_tool.gateway.token_record import MAX_NAME_CHARS, Token
from openapi_tool.gateway.tokens import FoundToken, Tokens
from openapi_tool.http.oauth import ResourceMetadata
from openapi_tool.http.problems import Problem
from openapi_tool.options.gateway import GatewayOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import is_token as is_subject_token

if TYPE_CHECKING:
    from openapi_tool.gateway.jwts import Jwts  # which imports what few deployments need

log = logging.getLogger(__name__)

NOBODY = Caller("local", "local")
"""Caller of a gateway without tokens, on loopback; its records are those of `openapi-tool mcp`."""

FAILED_TRIES = 20
"""Wrong tokens that one address may send, each within `FAILED_TRIES_S` seconds of the one before; more get 429."""
FAILED_TRIES_S = 60.0

_MAX_ADDRESSES = 10_000  # whose wrong tokens are counted
_OUTDATED_RETRY_S = 5  # `Retry-After` while no token can be checked


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends a request.

    `counted_as` is the name under which `RequestShares` counts the requests of its token. `has_ended` returns whether
    running requests of the token must end, as it has been revoked or has expired.
    """

    caller: Caller
    counted_as: str
    has_ended: Callable[[], bool]


class Senders:
    """Finds out who sends a request, and refuses requests without a right token.

    `open_to_all`: nobody needs a token, until there is one. `jwts` and `metadata` are for the tokens of an external
    issuer; None without one.
    """

    def __init__(
        self,
        options: GatewayOptions,
        tokens: Tokens,
        *,
        open_to_all: bool,
        jwts: Jwts | None,
        metadata: ResourceMetadata | None,
    ) -> None:
        self._options = options
        self._tokens = tokens
        self._open_to_all = open_to_all
        self._jwts = jwts
        self._metadata = metadata
        self._failed_tries = FailedTries()

    async def find(self, address: str, headers: Headers) -> Sender:
        """Return who sends a request from an address. Raises Problem."""
        # Once there is a token, the gateway stays closed, even if all tokens are deleted.
        self._open_to_all = self._open_to_all and not len(self._tokens)
        if self._open_to_all:
            return Sender(NOBODY, "", has_ended=lambda: False)
        given = headers.getlist("authorization")
        authorization = given[0] if len(given) == 1 else ""  # of several none counts
        scheme, _, text = authorization.partition(" ")
        text = text.strip()
        is_bearer = scheme.lower() == "bearer"
        if self._jwts is not None and is_bearer and self._jwts.looks_like_jwt(text):
            return await self._sender_of_jwt(self._jwts, text, headers)
        found = self._tokens.find(text) if is_bearer else None
        if found is not None:
            return self._sender_of_token(found, text, headers)
        if self._tokens.outdated:
            raise _unchecked("the state of this gateway")
        raise self._refusal(address, text, has_token=bool(given))

    def _sender_of_token(self, found: FoundToken, text: str, headers: Headers) -> Sender:
        """Return the sender with a token of `openapi-tool tokens`. Raises Problem."""
        tokens = self._tokens
        token = found.record
        caller = Caller(token.project, _agent_of(token, headers), token.tools)
        # While the tokens cannot be read, a running request goes on.
        return Sender(caller, found.id, lambda: tokens.find(text) is None and not tokens.outdated)

    async def _sender_of_jwt(self, jwts: Jwts, text: str, headers: Headers) -> Sender:
        """Return the sender with a JWT. Raises Problem.

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
        named_agents = headers.getlist("x-agent-id")
        if named_agents and named_agents != [caller.agent_id]:
            raise Problem(
                HTTPStatus.FORBIDDEN,
                "forbidden",
                "This token may not name an agent: leave X-Agent-Id out.",
                close=True,
            )
        ends = valid_until + self._options.call_timeout_s  # a call that began in time is answered
        return Sender(caller, f"{caller.project_id} {caller.agent_id}", lambda: time.time() > ends)

    def _refusal(self, address: str, text: str, *, has_token: bool) -> Problem:
        """Return the problem of a request that has no token, or a wrong one.

        What is wrong with a token is not told, as that would help to guess one.
        """
        if has_token and self._failed_tries.add(address):
            return Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "rate_limited",
                "Too many wrong tokens came from this address; wait a minute.",
                headers={"Retry-After": str(math.ceil(FAILED_TRIES_S))},
                close=True,
            )
        if not has_token:
            return self._unauthorized("")
        self._log_refusal(address, text)
        return self._unauthorized("invalid_token")

    def _unauthorized(self, error: str) -> Problem:
        """Return the problem that asks for a token; `error` is a code for the client (RFC 6750), empty without one."""
        source = "`openapi-tool tokens create` makes one"
        challenge = "Bearer"
        if self._metadata is not None:
            source = "the issuer gives you one"
            challenge = self._metadata.challenge(error)
        return Problem(
            HTTPStatus.UNAUTHORIZED,
            "unauthorized",
            f"Send a token that is neither expired nor revoked as `Authorization: Bearer …`; {source}.",
            headers={"WWW-Authenticate": challenge},
            close=True,
        )

    def _log_refusal(self, address: str, text: str) -> None:
        what, ids = "a wrong token", {}
        ended = self._tokens.find_ended(text)
        if ended is not None:  # whoever has its secret is no guesser
            token = ended.record
            reason = "expired" if token.revoked is None else "revoked"
            what = f"the token {ended.id}, which is {reason}"
            ids = {"project_id": token.project, "agent_id": token.agent}
        log.warning("refused %s", what, extra={"action": "token.refused", "address": address, **ids})


def _agent_of(token: Token, headers: Headers) -> str:
    """Return the agent that the request names, else that of its token. Raises Problem."""
    named = headers.getlist("x-agent-id")
    if not named:
        return token.agent
    agent = named[0]
    if len(named) > 1 or not is_subject_token(agent) or len(agent) > MAX_NAME_CHARS:
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


def _unchecked(unread: str) -> Problem:
    """Return the problem of a request whose token cannot be checked now, as something cannot be read."""
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "unavailable",
        f"No token can be checked, as {unread} cannot be read; call again later.",
        headers={"Retry-After": str(_OUTDATED_RETRY_S)},
        close=True,
    )


class FailedTries:
    """Numbers of wrong tokens by address. Those of an IPv6 network of 64 bits count as one, as a host may have all."""

    def __init__(self) -> None:
        self._tries: TTLCache[str, int] = TTLCache(_MAX_ADDRESSES, FAILED_TRIES_S, time.monotonic)

    def add(self, address: str) -> bool:
        """Count a try; return whether the address has more than it may."""
        counted_as = _network_of(address)
        tries = self._tries.get(counted_as, 0) + 1
        self._tries[counted_as] = tries
        return tries > FAILED_TRIES


def _network_of(address: str) -> str:
    """Return the network of an IPv6 address, such as `2001:db8::/64`, and any other address as it is."""
    try:
        parsed = ip_address(address.partition("%")[0])  # without the zone of `fe80::1%eth0`
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return str(ip_network((parsed, 64), strict=False))
    return address
