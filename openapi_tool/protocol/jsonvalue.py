"""Types of JSON values, and of the objects in a tool.result card (protocol section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from pydantic import JsonValue as JsonValue  # noqa: PLC0414 - re-exported

JsonObject = dict[str, JsonValue]


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
    """One upstream request; times in milliseconds, `at_ms` since the call's first one; no `ms` if it did not end."""

    at_ms: int
    http_status: int | None
    ms: NotRequired[int]
    error_code: NotRequired[str]


class ToolOutputObject(TypedDict, total=False):
    """`metadata.tool_output` of a result; a failure has only `usage`, `latency_ms`, `retries`, `session`, `attempts`.

    `attempts` is present if the call sent requests itself, `session` if the call named one, `budget` (the remainder of
    each) if there are budgets.
    """

    state: Mapping[str, Any]
    usage: UsageObject
    truncated: bool
    artifact_ref: Mapping[str, Any] | None
    next_cursor: str | None
    cached: bool
    latency_ms: int
    repaired: list[str]
    session: str
    retries: int
    attempts: list[AttemptObject]
    budget: Mapping[str, Any]
