"""Permits of keys: each settles its request, and tells the key's limit and state what the upstream answered."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from openapi_tool.protocol.errors import ToolError
from openapi_tool.quotas.amounts import NOTHING, Amount, Attempt
from openapi_tool.quotas.key_record import STATES
from openapi_tool.quotas.permits import Permit, PermitRequest

if TYPE_CHECKING:
    from openapi_tool.quotas.key_limit import KeyLimit

_STATUSES_OF_KEY = (401, 402, 429)  # HTTP statuses that concern the key, and not only the request


class KeyPermit(Permit):
    """Permit of one key. `attempt` is its reservation in the limit's record; None: the key has no limit.

    If the key is blocked, the permit is the trial that is due: the next call may claim another one once it has ended.
    """

    __slots__ = ("_attempt", "_has_ended", "_is_trial", "_limit", "_wanted", "sent_at")

    def __init__(self, limit: KeyLimit, attempt: Attempt | None, wanted: PermitRequest) -> None:
        super().__init__(limit.variable, limit.keys.get(limit.variable) or wanted.key)
        self._limit = limit
        self._attempt = attempt
        self._wanted = wanted
        self._has_ended = False
        self._is_trial = limit.take_trial()
        self.sent_at = limit.now()

    def connected(self) -> None:
        """Record that the request is sent only now, so that the window of the limit counts it from now on."""
        super().connected()
        if self._attempt is not None and not self._has_ended:
            self._limit.sent_late(self._attempt)

    def done(self, tokens: int) -> None:
        """Settle the request, which the upstream has accepted."""
        self._settle(Amount(1, tokens))
        self._limit.keys.record_success(self._limit.key_use, trial=self._is_trial)

    def failed(self, error: ToolError) -> int:
        """Settle the request; a refusal pauses or blocks its key (`Permit.failed`)."""
        limit = self._limit
        was_refused = error.http_status == HTTPStatus.TOO_MANY_REQUESTS
        # If the limit is learned from 429s, it is the number of accepted requests.
        counts = not was_refused or limit.rates.requests is not None
        self._settle(Amount(int(counts), error.tokens))
        retries = 0
        if error.http_status in _STATUSES_OF_KEY:
            retries = limit.record_upstream_refusal(error, self._wanted, self.key, self.sent_at)
        if error.upstream_status not in STATES:  # else the refusal ends the trial
            self._end_trial()
        return retries

    def cancelled(self) -> None:
        """Settle the request, whose cost is unknown: it may have been sent."""
        self._settle(None)
        self._end_trial()

    def unsent(self) -> None:
        """Give the permit back: the request is not sent."""
        if self._attempt is None and not self._has_ended:
            self._limit.not_sent(self.sent_at)
        self._settle(NOTHING)
        self._end_trial()

    def _settle(self, cost: Amount | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if self._attempt is not None:
            self._limit.end(self._attempt, cost)

    def _end_trial(self) -> None:
        if self._is_trial:
            self._limit.keys.end_trial(self._limit.key_use)
