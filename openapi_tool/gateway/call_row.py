"""The row that a gateway stores of each finished call, for `usage` and `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

CALLS_DAYS = 90
"""Days for which the row of a call is kept."""

CANCELLED = "cancelled"
"""Status and error code of a call that was stopped because its client was gone or had cancelled it."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """Row of a finished call, without arguments and texts.

    - `at`: its start, in seconds since the epoch.
    - `tool_call_id`: id by which `inspect` finds the call.
    - `tokens`, `requests`: what it was charged, and how many requests it sent to Jina (the *upstream*).
    - `retries`: requests that were sent again.
    - `attempts`: the upstream requests as JSON objects, in the order in which they were sent.
    """

    at: float
    tool_call_id: str
    project: str
    agent: str
    session: str | None
    tool: str
    status: str
    error: Mapping[str, Any] | None
    tokens: int
    requests: int
    cached: bool
    truncated: bool
    retries: int
    latency_ms: int
    attempts: list[Any]

    @property
    def error_code(self) -> str | None:
        """Code of the call's error; None if the call succeeded."""
        if self.error:
            return str(self.error.get("code"))
        return CANCELLED if self.status == CANCELLED else None

    @property
    def values(self) -> tuple[object, ...]:
        """Values of the columns of the table `calls` in a state file, in the order of the columns."""
        return (
            self.at,
            self.tool_call_id,
            self.project,
            self.agent,
            self.session,
            self.tool,
            self.status,
            self.error_code,
            self.tokens,
            self.requests,
            self.cached,
            self.truncated,
            self.retries,
            self.latency_ms,
            orjson.dumps({"attempts": self.attempts}),  # column `details`
        )
