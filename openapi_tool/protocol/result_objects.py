"""JSON objects of a result card (protocol section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from openapi_tool.protocol.jsontext import JsonValue

BudgetObject = Mapping[str, JsonValue]
"""Remainder of each budget, by its scope."""


class ErrorObject(TypedDict):
    """`error` of a failed result."""

    code: str
    message: str
    source: str
    retryable: bool
    detail: NotRequired[object]
    http_status: NotRequired[int]


class UsageObject(TypedDict):
    """Cost of a call upstream."""

    tokens: int
    requests: int


class AttemptObject(TypedDict):
    """One upstream request; `at_ms` since the call's first one; no `ms` if it did not end."""

    at_ms: int
    http_status: int | None
    ms: NotRequired[int]
    error_code: NotRequired[str]


class ArtifactObject(TypedDict):
    """Reference to a stored text; SHA-256 in hex."""

    card_id: str
    chars: int
    sha256: str


class ToolOutputObject(TypedDict, total=False):
    """`metadata.tool_output` of a result.

    A failure has only `usage`, `latency_ms`, `session`, `retries`, `attempts` and `budget`. `state` is for user
    interfaces. `session`, `attempts` and `budget` are missing if there are none.
    """

    state: Mapping[str, object]
    usage: UsageObject
    truncated: bool
    artifact_ref: ArtifactObject | None
    next_cursor: str | None
    cached: bool
    latency_ms: int
    repaired: list[str]
    session: str
    retries: int
    attempts: list[AttemptObject]
    budget: BudgetObject
