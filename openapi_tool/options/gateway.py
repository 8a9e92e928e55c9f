"""Section `gateway` of the settings: the doors that need no kernel, MCP and HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import NoDecode

from openapi_tool.options.oauth import OauthOptions
from openapi_tool.options.section import CallSeconds, HostNames, Options, Seconds, split
from openapi_tool.urls import checked_address

# A scheme, a host (name, IPv4 address or IPv6 address in brackets), and perhaps a port: `https://chat.example.org:8443`.
_ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError("must be origins of web pages, such as https://chat.example.org, without a path")
    return tuple(origin.lower() for origin in origins)


@validated(frozen=True)
class GatewayOptions(Options):
    """HTTP server of `openapi-tool gateway`; `openapi-tool mcp` uses `call_timeout_s` alone."""

    host: Annotated[str, AfterValidator(checked_address)] = Field(
        default="127.0.0.1", description="Address to listen on; any that other machines reach needs tokens."
    )
    port: int = Field(default=8090, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    allowed_hosts: HostNames = Field(
        default=(),
        max_length=100,
        description="Public names under which clients reach the gateway, beside addresses and internal names; "
        "comma-separated in the environment.",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split), AfterValidator(_check_origins)] = (
        Field(
            default=(),
            max_length=100,
            description="Origins of web pages whose scripts may call the gateway (CORS); comma-separated in the "
            "environment.",
        )
    )
    tokens_file: Path | None = Field(
        default=None, description="File of tokens beside those in the state, as `tokens create --file` writes it."
    )
    token_grace_s: Seconds = Field(
        default=300,
        description="Seconds for which the last known tokens stay in use while their store cannot be read; then "
        "requests get 503.",
    )
    oauth: OauthOptions | None = Field(
        default=None,
        description="Access tokens of an external issuer: `issuer`, `jwks_url`, `resource`, and if wanted `audience`, "
        "`project_claim`, `agent_claim` (docs/gateway.md); none are accepted by default.",
    )
    max_connections: int = Field(
        default=1_024, ge=16, le=100_000, description="Most open connections; beyond that the longest idle is closed."
    )
    max_requests_per_token: int = Field(
        default=256, ge=1, le=10_000, description="Most requests of one token at the same time, in each process."
    )
    call_timeout_s: CallSeconds = Field(
        default=50,
        description="Seconds after which a call ends, unless its definition's `options.jina.timeout_s` gives it more "
        "or less; at most `tools.max_timeout_s`. Common MCP clients give up after 60 s.",
    )
