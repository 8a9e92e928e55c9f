"""Estimates of what a request cost whose response could not be read to its end.

The upstream says at the end of a response what it charged. So the cost is unknown if the response is too large or too
slow, and is given up.
"""

from __future__ import annotations

import logging

from openapi_tool.jina.endpoints import Endpoint
from openapi_tool.protocol.errors import ToolError

log = logging.getLogger(__name__)

_INITIAL_RATIO = 0.25  # tokens per byte, until a response was read: four bytes for a token
_NEWEST_WEIGHT = 0.1  # of the newest response in the moving average


class UnreadCosts:
    """Estimates the cost of requests from the bytes of their unread responses.

    The estimate is the larger of two numbers:

    - what the request was expected to cost before it was sent;
    - the bytes that came of its response, times the tokens per byte of earlier responses of the operation. The upstream
      charges most for the very responses that are too large or too slow.
    """

    def __init__(self) -> None:
        self._tokens_per_byte: dict[str, float] = {}  # moving average, by operation

    def learn(self, endpoint: Endpoint, tokens: int, size: int) -> None:
        """Count the cost of a response of `size` bytes, which was read."""
        if tokens > 0 and size > 0:
            mean = self._mean(endpoint)
            self._tokens_per_byte[endpoint.operation.name] = mean + _NEWEST_WEIGHT * (tokens / size - mean)

    def set_cost_of(self, error: ToolError, endpoint: Endpoint, expected_tokens: int, size: int) -> None:
        """Set `error.tokens` of a failed request to an estimate, unless the upstream has said the cost.

        An error response that was read (it sets `http_status`) says the cost, too: it names a charge, or there is none.
        `size` is the number of bytes that came of the response.
        """
        if error.tokens or error.http_status is not None:
            return
        error.tokens = max(expected_tokens, round(size * self._mean(endpoint)))
        log.info(
            "the cost of a request without a readable response is estimated at %s tokens",
            error.tokens,
            extra={
                "action": "upstream.cost_estimated",
                "endpoint": endpoint.operation.name,
                "error_code": error.code,
                "bytes": size,
            },
        )

    def _mean(self, endpoint: Endpoint) -> float:
        return self._tokens_per_byte.get(endpoint.operation.name, _INITIAL_RATIO)
