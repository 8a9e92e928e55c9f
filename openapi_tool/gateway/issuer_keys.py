"""Public keys of an external issuer, by which the signatures of its access tokens are checked.

The issuer publishes them as a JWKS: a JSON document with a list of keys, each with an id (`kid`) and a type (`kty`). It
replaces them from time to time, so they are read again and again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt
import orjson
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from openapi_tool.concurrency.background import in_background
from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)

FRESH_S = 600.0
"""Age from which the keys are read again."""

RETRY_S = 30.0
"""Shortest time between two attempts to read the keys, also for an unknown key."""

_MIN_RSA_BITS = 2_048  # RFC 7518, section 3.3

_ALGORITHMS = {"RSA": "RS256", "EC": "ES256"}
"""Algorithm with which keys of a type (`kty`) sign; no other one is accepted."""

_PUBLIC_FIELDS = ("kty", "n", "e", "crv", "x", "y")
"""Fields of the public part of a key; all others are ignored."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key of the issuer, as `jwt.decode` takes it, and the one algorithm with which it signs, such as `RS256`."""

    key: Any
    algorithm: str


class IssuerKeys:
    """Public keys of the issuer.

    `read` returns the issuer's JWKS. It is read again if the keys are older than `FRESH_S`, or if a key is unknown. If
    it cannot be read, the known keys stay in use for `grace_s` more seconds.
    """

    def __init__(
        self, read: Callable[[], Awaitable[bytes]], grace_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._grace_s = grace_s
        self._clock = clock
        self._keys: dict[str, PublicKey] = {}  # by id
        self._read_at = -math.inf  # when they were read last
        self._tried_at = -math.inf  # when reading them began last, also in vain
        self._loading: asyncio.Task[None] | None = None  # the task that reads the keys now

    async def find(self, key_id: str) -> PublicKey | None:
        """Return a key, None if the issuer has none of this id. Raises Unavailable if they were not read for too long.

        The issuer may not answer. So this waits for it only if the key is unknown, or all are too old; otherwise the
        keys are read again in the background.
        """
        is_known = key_id in self._keys
        should_load = not is_known or self._age_s > FRESH_S
        may_load = self._loading is None and self._clock() - self._tried_at >= RETRY_S
        if should_load and may_load:
            self._loading = in_background(self._load(), "keys of the issuer")
        must_wait = not is_known or self._is_outdated
        if must_wait and self._loading is not None:
            await asyncio.shield(self._loading)  # others may wait for the same task
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
        """Read the keys; if that fails, keep the known ones."""
        self._tried_at = self._clock()
        try:
            self._keys = usable_keys(await self._read())
            self._read_at = self._clock()
        except Unavailable as error:
            log.error(  # noqa: TRY400 - no defect
                "cannot read the keys of the issuer: %s", error, extra={"action": "oauth.keys_not_read"}
            )
        finally:
            self._loading = None


def usable_keys(document: bytes) -> dict[str, PublicKey]:
    """Return the keys of a JWKS that may sign access tokens, by id. Raises Unavailable."""
    entries = {str(entry["kid"]): entry for entry in _entries(document) if isinstance(entry, dict) and entry.get("kid")}
    keys = {}
    unusable = 0
    for key_id, entry in entries.items():
        algorithm = _signing_algorithm(entry)
        if algorithm is None:
            continue
        try:
            keys[key_id] = PublicKey(_public_key(entry), algorithm)
        except (jwt.exceptions.InvalidKeyError, ValueError, TypeError):
            unusable += 1
    if unusable:
        log.warning("%s keys of the issuer cannot be used", unusable, extra={"action": "oauth.key_unusable"})
    return keys


def _entries(document: bytes) -> list[Any]:
    """Return the entries of a JWKS, unchecked. Raises Unavailable."""
    try:
        entries = orjson.loads(document)["keys"]
    except (ValueError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, list):
        raise Unavailable("it is no JWKS: an object with a list `keys`")
    return entries


def _signing_algorithm(entry: Mapping[str, Any]) -> str | None:
    """Return the algorithm of a key; None if the key is not for signatures, or for another algorithm of its type."""
    algorithm = _ALGORITHMS.get(str(entry.get("kty")))
    is_for_signatures = entry.get("use", "sig") == "sig"
    is_for_algorithm = entry.get("alg", algorithm) == algorithm
    return algorithm if is_for_signatures and is_for_algorithm else None


def _public_key(entry: Mapping[str, Any]) -> Any:
    """Return the public part of a key. Raises InvalidKeyError, ValueError, TypeError."""
    public = {name: value for name, value in entry.items() if name in _PUBLIC_FIELDS}
    if entry["kty"] == "EC":
        if entry.get("crv") != "P-256":
            raise ValueError("ES256 needs P-256")
        return ECAlgorithm.from_jwk(public)
    key = RSAAlgorithm.from_jwk(public)
    if key.key_size < _MIN_RSA_BITS:
        raise ValueError("it is too short")
    return key
