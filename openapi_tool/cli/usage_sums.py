"""What `openapi-tool usage` asks a kernel or a gateway for, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.quotas.charged import WithoutResult


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """The calls of a project from `start` until before `end`, to be summed up by `by`.

    A gateway knows when a call began, a kernel when its result was stored.
    """

    project: str
    start: datetime
    end: datetime
    by: By


@dataclass(frozen=True, slots=True)
class UsageSums:
    """The sum over all calls, and a row with the `key` and the sum of each agent, day or other key that has calls.

    `without_result` has what was charged to the project for calls without a stored result, by day or month.
    """

    total: dict[str, Any]
    rows: list[dict[str, Any]]
    without_result: WithoutResult
