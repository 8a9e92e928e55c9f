"""What requests cost whose response could not be read to its end, where the upstream says what it charged."""

from __future__ import annotations

import logging

from openapi_tool.jina.endpoints import Endpoint
from openapi_tool.protocol.errors import ToolError

log = logging.getLogger(__name__)

_INITIAL_RATIO = 0.25  # tokens per byte of a response
_NEWEST_WEIGHT = 0.1  # of the newest response in the moving average


class UnreadCosts:
    """Estimates what a request cost that was sent, and has no response that says it.

    That is the larger of two numbers: the estimate from before it was sent, and the bytes of its response times the
    tokens per byte of earlier responses. For the upstream charges most for responses that are too large or too slow.
    """

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}  # tokens per byte, by operation

    def learn(self, endpoint: Endpoint, tokens: int, size: int) -> None:
        """Count the cost of a response of `size` bytes."""
        if tokens > 0 and size > 0:
            before = self._ratios.get(endpoint.operation.name, _INITIAL_RATIO)
            self._ratios[endpoint.operation.name] = before + _NEWEST_WEIGHT * (tokens / size - before)

    def estimate_cost_of(self, error: ToolError, endpoint: Endpoint, estimate: int, size: int) -> None:
        """Set `error.tokens` of a failed request, of whose response `size` bytes came, unless the upstream has said it.

        A complete error response (`http_status`) says it, too: no charge means none.
        """
        if error.tokens or error.http_status is not None:
            return
        name = endpoint.operation.name
        error.tokens = max(estimate, round(size * self._ratios.get(name, _INITIAL_RATIO)))
        log.info(
            "the cost of a request without a readable response is estimated at %s tokens",
            error.tokens,
            extra={"action": "upstream.cost_estimated", "endpoint": name, "error_code": error.code, "bytes": size},
        )
