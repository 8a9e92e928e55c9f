"""Settings sections about upstream requests: retries, cache, connections. Imports no driver."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.dsn import ESCAPE
from openapi_tool.jina.memory_estimates import max_call_memory
from openapi_tool.options.section import TERABYTE, File, Options, Seconds
from openapi_tool.tools.secret_variables import Secret
from openapi_tool.urls import parse_url

# What a wrong setting `egress.proxy` is told.
_PROXY_FORM = "must look like http://user:password@host:port, with the port"


@validated(frozen=True)
class RetryOptions(Options):
    """Retries of upstream requests, within the deadline of the call."""

    max_retries: Annotated[
        int, Field(ge=0, le=10, description="Maximum retries of one upstream request; 0 disables them.")
    ] = 3
    initial_backoff_s: Annotated[
        Seconds, Field(description="Initial back-off in seconds, doubled with each retry; Retry-After overrides it.")
    ] = 0.5
    max_backoff_s: Annotated[
        Seconds, Field(description="Maximum back-off in seconds; Retry-After may ask for more.")
    ] = 8

    @model_validator(mode="after")
    def _waits_grow(self) -> RetryOptions:
        if self.initial_backoff_s > self.max_backoff_s:
            raise ValueError("initial_backoff_s must not be more than max_backoff_s")
        return self


@validated(frozen=True)
class CacheOptions(Options):
    """Response cache, scoped to project, agent and session."""

    ttl_s: Annotated[
        float, Field(ge=0, le=86_400, description="Seconds that a response is cached; 0 disables the cache.")
    ] = 300
    max_bytes: Annotated[int, Field(ge=0, le=TERABYTE, description="Memory of the cache in one process, in bytes.")] = (
        4_000_000
    )


@validated(frozen=True)
class EgressOptions(Options):
    """Connections to the upstream."""

    max_connections: Annotated[
        int, Field(ge=1, le=65_535, description="Maximum concurrent connections to the upstream.")
    ] = 512
    max_response_bytes: Annotated[int, Field(ge=1_000, le=TERABYTE, description="Maximum bytes of a response.")] = (
        10_000_000
    )
    body_budget_bytes: Annotated[
        int,
        Field(
            ge=1_000,
            le=TERABYTE,
            description="Maximum memory in bytes of a process for responses until their commit; further responses "
            "wait.",
        ),
    ] = 256_000_000
    ca_file: Annotated[File | None, Field(description="Additional CA (PEM) to trust, like SSL_CERT_FILE.")] = None
    proxy: Annotated[
        Secret | None,
        Field(description="Forward proxy (`http://user:password@host:port`) for TLS tunnels; HTTPS_PROXY is not used."),
    ] = None
    public_addresses_only: Annotated[
        bool, Field(description="Connect only where the upstream's hosts resolve to public addresses.")
    ] = False

    @field_validator("proxy")
    @classmethod
    def _check_proxy(cls, proxy: Secret | None) -> Secret | None:
        if proxy is None:
            return proxy
        try:
            parsed = parse_url(proxy.get_secret_value(), ("http",))
        except ValueError as problem:
            raise ValueError(f"{problem}; {_PROXY_FORM}, and {ESCAPE}") from None
        if parsed.port is None or parsed.path not in ("", "/") or parsed.query:
            raise ValueError(_PROXY_FORM)
        return proxy

    @model_validator(mode="after")
    def _fits_together(self) -> EgressOptions:
        if self.proxy is not None and self.public_addresses_only:
            raise ValueError("public_addresses_only has no effect with a proxy, which resolves the names; unset one")
        least = max_call_memory(self.max_response_bytes) + self.max_response_bytes
        if self.body_budget_bytes < least:
            raise ValueError(f"body_budget_bytes must be at least {least}, so that the largest response fits")
        return self
