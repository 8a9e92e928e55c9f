"""Section `gateway.oauth` of the settings: access tokens of an external issuer."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as validated

from openapi_tool.options.section import Options
from openapi_tool.urls import parse_url


def _check_url(url: str) -> str:
    try:
        parsed = parse_url(url, ("https",))
    except ValueError as problem:
        raise ValueError(f"{problem}; must look like https://host/path") from None
    if parsed.credentials or parsed.query:
        raise ValueError("must be an https URL without user, password and query")
    return url


Url = Annotated[str, Field(max_length=2_000), AfterValidator(_check_url)]
Claim = Annotated[str, Field(min_length=1, max_length=200)]


@validated(frozen=True)
class OauthOptions(Options):
    """Access tokens of an external issuer (JWT, signed by RS256 or ES256), beside those of `openapi-tool tokens`."""

    issuer: Annotated[Url, Field(description="Issuer, as in the claim `iss`.")]
    jwks_url: Annotated[
        Url, Field(description="Where its public keys are (JWKS): the only host beside the two of the upstream.")
    ]
    resource: Annotated[
        Url, Field(description="Public URL of this gateway, which clients name to the issuer: https://HOST/mcp.")
    ]
    audience: Annotated[
        str | None, Field(max_length=2_000, description="Claim `aud` of its tokens; by default `resource`.")
    ] = None
    project_claim: Annotated[Claim, Field(description="Claim with the project.")] = "project"
    agent_claim: Annotated[Claim, Field(description="Claim with the agent.")] = "sub"
