"""The limits of one key and endpoint, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.quotas.options import LimitOptions
from openapi_tool.tools.operations import OPERATIONS, Operation


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits: requests and tokens in any 60 s, concurrent requests; None is unlimited."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None

    @property
    def limited(self) -> bool:
        """Return whether anything is limited."""
        return self.requests is not None or self.tokens is not None or self.concurrent is not None


def rates_of(options: LimitOptions, variable: str, endpoint: str) -> Rates:
    """Return the limits that the settings have for the key in a variable, and an endpoint (name of an operation)."""
    limits = options.of(variable)
    prefix = operation_of(endpoint).limits  # of the names of the settings, such as `search_requests_per_minute`
    return Rates(
        requests=getattr(limits, f"{prefix}_requests_per_minute"),
        tokens=getattr(limits, f"{prefix}_tokens_per_minute"),
        concurrent=getattr(limits, f"{prefix}_concurrent"),
    )


def operation_of(endpoint: str) -> Operation:
    """Return the operation with this name."""
    return next(operation for operation in OPERATIONS if operation.name == endpoint)
