"""Why a JWT (an access token of an external issuer) is refused.

These are apart from `jwts`, whose library only a gateway with the setting `gateway.oauth` imports.
"""

from __future__ import annotations


class JwtRefused(Exception):
    """A JWT of an external issuer is not accepted."""


class ClaimUnusable(JwtRefused):
    """The JWT is right, but does not say who calls; the message names the claim that is missing or wrong."""
