"""Access tokens of an external issuer: JWTs, checked with the issuer's public keys."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jwt
import orjson
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from openapi_tool.concurrency.background import in_background
from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.jwt_errors import ClaimUnusable, JwtRefused
from openapi_tool.gateway.token_record import MAX_AGENT_CHARS
from openapi_tool.options.oauth import OauthOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import is_token

log = logging.getLogger(__name__)

FRESH_S = 600.0
"""Age from which the keys are read again."""

RETRY_S = 30.0
"""Shortest time between two attempts to read the keys, also for an unknown key."""

LEEWAY_S = 30.0
"""By how much the clocks of issuer and gateway may differ."""

_MAX_JWT_CHARS = 8_192  # bounds the work for a text that a stranger sends
_MIN_RSA_BITS = 2_048  # RFC 7518, section 3.3
_DOTS = 2  # between header, claims and signature of a JWT

_ALGORITHMS = {"RSA": "RS256", "EC": "ES256"}
"""Algorithm with which keys of a type (`kty`) sign; no other one is accepted."""

_PUBLIC_FIELDS = ("kty", "n", "e", "crv", "x", "y")


class Keys:
    """Public keys of the issuer. Each has an id and one algorithm.

    `read` returns the issuer's document of keys, a JWKS. It is read again if the keys are older than `FRESH_S`, or if a
    key is unknown. If it cannot be read, the known keys stay in use for `grace_s` more seconds.
    """

    def __init__(
        self, read: Callable[[], Awaitable[bytes]], grace_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._grace_s = grace_s
        self._clock = clock
        self._keys: dict[str, tuple[Any, str]] = {}  # key and algorithm by the key's id
        self._read_at = -math.inf  # when they were read last
        self._tried_at = -math.inf  # when reading them began last, also in vain
        self._loading: asyncio.Task[None] | None = None  # the task that reads the keys now

    async def find(self, key_id: str) -> tuple[Any, str] | None:
        """Return a key and its algorithm. Raises Unavailable if the keys could not be read for too long.

        Only an unknown key waits for the issuer, which may not answer: known ones are read again in the background.
        """
        is_known = key_id in self._keys
        should_load = not is_known or self._age_s > FRESH_S
        may_load = self._loading is None and self._clock() - self._tried_at >= RETRY_S
        if should_load and may_load:
            self._loading = in_background(self._load(), "keys of the issuer")
        must_wait = not is_known or self._is_outdated
        if must_wait and self._loading is not None:
            await asyncio.shield(self._loading)
        if self._is_outdated:
            raise Unavailable("the keys of the issuer cannot be read")
        return self._keys.get(key_id)

    @property
    def _is_outdated(self) -> bool:
        """Whether the keys are so old that they are accepted no more."""
        return self._age_s > FRESH_S + self._grace_s

    @property
    def _age_s(self) -> float:
        return self._clock() - self._read_at

    async def _load(self) -> None:
        self._tried_at = self._clock()
        try:
            await self._read_keys()
        finally:
            self._loading = None

    async def _read_keys(self) -> None:
        try:
            self._keys = usable_keys(await self._read())
        except Unavailable as error:
            log.error(  # noqa: TRY400 - no defect
                "cannot read the keys of the issuer: %s", error, extra={"action": "oauth.keys_not_read"}
            )
            return
        self._read_at = self._clock()


def usable_keys(document: bytes) -> dict[str, tuple[Any, str]]:
    """Return the keys of a JWKS that may sign access tokens: key and algorithm by the key's id. Raises Unavailable."""
    given = {str(key["kid"]): key for key in _listed(document) if isinstance(key, dict) and key.get("kid")}
    keys = {}
    unusable = 0
    for key_id, key in given.items():
        algorithm = _signing_algorithm(key)
        if algorithm is None:
            continue
        try:
            keys[key_id] = _public_key(key), algorithm
        except (jwt.exceptions.InvalidKeyError, ValueError, TypeError):
            unusable += 1
    if unusable:
        log.warning("%s keys of the issuer cannot be used", unusable, extra={"action": "oauth.key_unusable"})
    return keys


def _listed(document: bytes) -> list[Any]:
    """Return the entries of a JWKS. Raises Unavailable."""
    try:
        listed = orjson.loads(document)["keys"]
    except (ValueError, KeyError, TypeError):
        listed = None
    if not isinstance(listed, list):
        raise Unavailable("it is no JWKS: an object with a list `keys`")
    return listed


def _signing_algorithm(key: Mapping[str, Any]) -> str | None:
    """Return the algorithm of a key; None if the key is not for signatures, or for another algorithm of its type."""
    algorithm = _ALGORITHMS.get(str(key.get("kty")))
    is_for_signatures = key.get("use", "sig") == "sig"
    is_for_algorithm = key.get("alg", algorithm) == algorithm
    return algorithm if is_for_signatures and is_for_algorithm else None


def _public_key(key: Mapping[str, Any]) -> Any:
    """Return the public part of a key. Raises InvalidKeyError, ValueError, TypeError."""
    public = {name: value for name, value in key.items() if name in _PUBLIC_FIELDS}
    if key["kty"] == "EC":
        if key.get("crv") != "P-256":
            raise ValueError("ES256 needs P-256")
        return ECAlgorithm.from_jwk(public)
    loaded = RSAAlgorithm.from_jwk(public)
    if loaded.key_size < _MIN_RSA_BITS:
        raise ValueError("it is too short")
    return loaded


class Jwts:
    """Finds the callers of JWTs."""

    def __init__(self, options: OauthOptions, keys: Keys) -> None:
        self.options = options
        self._keys = keys

    @staticmethod
    def is_one(text: str) -> bool:
        """Return whether a text has the form of a JWT, which no token of `openapi-tool tokens` has."""
        return text.count(".") == _DOTS

    async def caller(self, text: str) -> tuple[Caller, float]:
        """Return who calls, and until when the JWT is valid, in seconds since the epoch.

        Raises JwtRefused, ClaimUnusable, and Unavailable if the JWT cannot be checked now.
        """
        claims = await self._claims(text)
        try:
            expires = float(claims["exp"])
        except OverflowError:  # a whole number of several hundred digits
            raise JwtRefused from None
        project = _name(claims, self.options.project_claim)
        agent = _name(claims, self.options.agent_claim)
        return Caller(project, agent), expires + LEEWAY_S

    async def _claims(self, text: str) -> Mapping[str, Any]:
        """Return the claims of a JWT whose signature, issuer, audience and time are right. Raises JwtRefused."""
        if len(text) > _MAX_JWT_CHARS:
            raise JwtRefused
        try:
            key_id = jwt.get_unverified_header(text).get("kid")
            found = await self._keys.find(key_id) if isinstance(key_id, str) else None
            if found is None:
                raise JwtRefused
            key, algorithm = found
            claims: Mapping[str, Any] = jwt.decode(
                text,
                key,
                algorithms=[algorithm],  # the key's own, whatever the token says
                audience=self.options.audience or self.options.resource,
                issuer=self.options.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError):
            raise JwtRefused from None
        return claims


def _name(claims: Mapping[str, Any], name: str) -> str:
    """Return the name of a project or an agent in a claim. Raises ClaimUnusable."""
    value = claims.get(name)
    if not isinstance(value, str) or not is_token(value) or len(value) > MAX_AGENT_CHARS:
        raise ClaimUnusable(
            f"The claim {name!r} must be a text of 1 to {MAX_AGENT_CHARS} characters without blanks and `.*>`; "
            "let the issuer add it, or name another one in gateway.oauth."
        )
    return value
