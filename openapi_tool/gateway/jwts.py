"""Callers by the access tokens of an external issuer (OAuth): JWTs, which the issuer has signed.

A JWT is the text `HEADER.CLAIMS.SIGNATURE`. Its claims say, among other things, who calls and until when it is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jwt

from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.issuer_keys import IssuerKeys, PublicKey
from openapi_tool.gateway.jwt_errors import ClaimUnusable, JwtRefused
from openapi_tool.gateway.token_record import MAX_NAME_CHARS
from openapi_tool.options.oauth import OauthOptions
from openapi_tool.protocol.subjects import is_token as is_subject_token

LEEWAY_S = 30.0
"""By how much the clocks of issuer and gateway may differ."""

_MAX_JWT_CHARS = 8_192  # bounds the work for a text that a stranger sends
_DOTS = 2  # between header, claims and signature of a JWT


class Jwts:
    """Finds the callers of JWTs."""

    def __init__(self, options: OauthOptions, keys: IssuerKeys) -> None:
        self.options = options
        self._keys = keys

    @staticmethod
    def looks_like_jwt(text: str) -> bool:
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
        project = _name_in(claims, self.options.project_claim)
        agent = _name_in(claims, self.options.agent_claim)
        return Caller(project, agent), expires + LEEWAY_S

    async def _claims(self, text: str) -> Mapping[str, Any]:
        """Return the claims of a JWT whose signature, issuer, audience and time are right.

        Raises JwtRefused, Unavailable.
        """
        if len(text) > _MAX_JWT_CHARS:
            raise JwtRefused
        try:
            public_key = await self._key_of(text)
            claims: Mapping[str, Any] = jwt.decode(
                text,
                public_key.key,
                algorithms=[public_key.algorithm],  # whatever the header of the JWT says
                audience=self.options.audience or self.options.resource,
                issuer=self.options.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError):
            raise JwtRefused from None
        return claims

    async def _key_of(self, text: str) -> PublicKey:
        """Return the key with which a JWT is signed, if its header tells the truth.

        Raises JwtRefused for an unknown key, jwt.PyJWTError for a text that is no JWT, and Unavailable.
        """
        key_id = jwt.get_unverified_header(text).get("kid")
        if not isinstance(key_id, str):
            raise JwtRefused
        public_key = await self._keys.find(key_id)
        if public_key is None:
            raise JwtRefused
        return public_key


def _name_in(claims: Mapping[str, Any], claim: str) -> str:
    """Return the name of a project or an agent that a claim gives. Raises ClaimUnusable."""
    name = claims.get(claim)
    if not isinstance(name, str) or not is_subject_token(name) or len(name) > MAX_NAME_CHARS:
        raise ClaimUnusable(
            f"The claim {claim!r} must be a text of 1 to {MAX_NAME_CHARS} characters without blanks and `.*>`; "
            "let the issuer add it, or name another one in gateway.oauth."
        )
    return name
