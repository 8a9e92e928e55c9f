"""Schema of a replica's statistics, as the command line reads them.

Another version of this program, or any client with permission to publish there, may have sent them, so they are
checked before they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.protocol.jsontext import is_deeper_than

_MAX_PATH_CHARS = 100  # of an invalid field
_MAX_DEPTH = 12  # of nested objects and arrays in a reply


def schema_problem(value: Mapping[str, Any]) -> str | None:
    """Return why statistics do not fit the schema; None if they do."""
    if is_deeper_than(value, _MAX_DEPTH + 1):  # the innermost values are a level, too
        return f"it is nested more than {_MAX_DEPTH} deep"
    try:
        _ReplicaStats.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        return f"{path[:_MAX_PATH_CHARS]}: {first['msg']}"
    return None


T = TypeVar("T")
_Name = Annotated[str, Field(max_length=1_024)]
_Text = Annotated[str, Field(max_length=4_000)]
_Rows = Annotated[list[T], Field(max_length=200)]
_Sequences = Annotated[list[int], Field(max_length=10_000)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True)


class _DependencyStats(_StrictModel):
    ok: bool = True
    for_s: float | None = None
    reason: _Text | None = None


class _HealthStats(_StrictModel):
    dependencies: dict[str, _DependencyStats] = {}
    clock_offset_s: float | None = None
    budgets_by_last_known_state: _Text = ""


class _CallStats(_StrictModel):
    project: _Name
    tool: _Name
    calls: int


class _ErrorStats(_CallStats):
    error_code: _Name


class _WarningStats(_StrictModel):
    action: _Name
    count: int
    ago_s: float | None = None
    message: _Text
    lasts: bool | None = None
    project_id: _Name | None = None
    variable: _Name | None = None


class _LimitStats(_StrictModel):
    variable: _Name | None = None
    endpoint: _Name | None = None
    pool: _Name | None = None
    not_set: bool = False
    used: float | None = None
    used_tokens: float | None = None
    estimated_tokens: int | None = None
    paused_s: float | None = None
    running: int | None = None
    refused: int | None = None
    dry_run: bool | None = None
    would_have_waited: int | None = None
    waiting: int | None = None
    waiting_by_project: dict[str, int] | None = None


class _ConfiguredStats(_StrictModel):
    variable: _Name | None = None
    endpoint: _Name | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    dry_run: bool = False


class _KeyStats(_StrictModel):
    variable: _Name | None = None
    endpoint: _Name | None = None
    state: _Name | None = None
    tried_again_s: float | None = None


class _WaitStats(_StrictModel):
    host: _Name = ""
    oldest_s: float = 0.0
    silent_s: float = 0.0


class _AccountStats(_StrictModel):
    share: float | None = None


class _WorkStats(_StrictModel):
    running: _Sequences = []
    waiting: _Sequences = []


class _ReplicaStats(_StrictModel):
    """Fields that the CLI evaluates; others are only displayed."""

    instance: Annotated[str, Field(max_length=256)]
    protocol: _Name = ""
    durable: _Name = ""
    work: _WorkStats = _WorkStats()
    calls: int = 0
    failed: int = 0
    waiting: float | None = None
    slots: float | None = None
    pending: int = 0
    unacknowledged: int = 0
    max_unacknowledged: int = 0
    waiting_for_memory: float | None = None
    log_lines_dropped: int | None = None
    phases_p95_ms: dict[str, float | None] = {}
    health: _HealthStats = _HealthStats()
    tools: _Rows[_CallStats] = []
    errors: _Rows[_ErrorStats] = []
    warnings: _Rows[_WarningStats] = []
    last: _Rows[dict[str, Any]] = []
    limits: dict[str, Any] = {}
    upstream_limits: _Rows[_LimitStats] = []
    configured_limits: _Rows[_ConfiguredStats] = []
    upstream_keys: _Rows[_KeyStats] = []
    upstream_waits: _Rows[_WaitStats] = []
    budgets: _Rows[_AccountStats] = []
