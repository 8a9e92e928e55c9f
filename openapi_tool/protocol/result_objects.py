"""Types of the JSON objects in a result card (protocol section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from openapi_tool.protocol.jsontext import JsonValue

BudgetObject = Mapping[str, JsonValue]
"""What is left of each budget, by its scope."""


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
    """One upstream request.

    `at_ms` is when it began, in milliseconds since the call's first request. `ms` is how long it took; it is missing if
    the request did not end.
    """

    at_ms: int
    http_status: int | None
    ms: NotRequired[int]
    error_code: NotRequired[str]


class ArtifactObject(TypedDict):
    """Reference to a stored text: its card, its number of characters, and its SHA-256 in hex."""

    card_id: str
    chars: int
    sha256: str


class ToolOutputObject(TypedDict, total=False):
    """`metadata.tool_output` of a result.

    The first group is missing in the result of a failed call; `session`, `attempts` and `budget` are missing if there
    are none.
    """

    state: Mapping[str, object]
    """What user interfaces show."""
    truncated: bool
    artifact_ref: ArtifactObject | None
    next_cursor: str | None
    cached: bool
    repaired: list[str]
    """Names of arguments that were repaired."""

    usage: UsageObject
    latency_ms: int
    session: str
    retries: int
    attempts: list[AttemptObject]
    budget: BudgetObject
