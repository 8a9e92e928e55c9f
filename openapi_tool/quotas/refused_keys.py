"""Warnings and metrics of requests whose key the upstream has refused."""

from __future__ import annotations

import logging
import time

from openapi_tool.quotas.key_record import KeyUse
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS

log = logging.getLogger(__name__)

_ADVICE = {  # by HTTP status
    401: "it is not valid; set another one",
    402: "its balance is used up; top it up or set another one",
}
_WARNING_INTERVAL_S = 60.0  # between two warnings of the same key, endpoint and status


class RefusedKeys:
    """Counts requests whose key the upstream refused; warns of each key, endpoint and status once a minute.

    The warnings of a key and endpoint are over once the upstream accepts the key there.
    """

    def __init__(self) -> None:
        self._warned_at: dict[tuple[KeyUse, int], float] = {}  # monotonic time by key, endpoint and HTTP status

    def record(self, use: KeyUse, http_status: int | None) -> None:
        """Record the HTTP status of a failed request with a key."""
        if http_status is None or http_status not in _ADVICE:
            return
        metrics.KEYS_REFUSED.labels(*use).inc()
        now = time.monotonic()
        if now - self._warned_at.get((use, http_status), -_WARNING_INTERVAL_S) < _WARNING_INTERVAL_S:
            return
        self._warned_at[use, http_status] = now
        log.warning(
            "the upstream refused the key of %s for a %s request (HTTP %s): %s",
            *use,
            http_status,
            _ADVICE[http_status],
            extra={"action": "key.refused", **use._asdict(), "http_status": http_status},
        )

    def record_success(self, use: KeyUse) -> None:
        """Record a successful request with a key."""
        if not self._warned_at:
            return
        for warned in [warned for warned in self._warned_at if warned[0] == use]:
            del self._warned_at[warned]
            RECENT_WARNINGS.solve("key.refused", **use._asdict())
