"""Section `budgets` of the settings."""

from __future__ import annotations

from dataclasses import field
from datetime import UTC, tzinfo
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.options.section import TERABYTE, Options

BUDGETS = tuple(
    f"{scope}_{unit}"
    for scope in ("session", "agent_day", "project_day", "project_month")
    for unit in ("requests", "tokens")
)
"""Names of all budgets, narrowest first."""

BudgetRequests = Annotated[int | None, Field(ge=0, le=1_000_000_000, description="Maximum upstream requests.")]
BudgetTokens = Annotated[
    int | None, Field(ge=0, le=TERABYTE, description="Maximum tokens, estimated before a request.")
]


@validated(frozen=True)
class BudgetLimits(Options):
    """Budgets of one project or of all; an unset budget does not apply."""

    session_requests: BudgetRequests = None
    session_tokens: BudgetTokens = None
    agent_day_requests: BudgetRequests = None
    agent_day_tokens: BudgetTokens = None
    project_day_requests: BudgetRequests = None
    project_day_tokens: BudgetTokens = None
    project_month_requests: BudgetRequests = None
    project_month_tokens: BudgetTokens = None

    def of(self, scope: str) -> tuple[int | None, int | None]:
        """Return requests and tokens of a scope such as `agent_day`."""
        return getattr(self, f"{scope}_requests"), getattr(self, f"{scope}_tokens")

    @property
    def limited(self) -> bool:
        """Return whether any budget is set."""
        return any(getattr(self, name) is not None for name in BUDGETS)


def time_zone(name: str) -> tzinfo:
    """Return a time zone. Raises ValueError for one that this system does not have."""
    if name == "UTC":  # also if the system has no database
        return UTC
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise ValueError("must be a time zone that this system knows, such as UTC or Europe/Berlin") from None


@validated(frozen=True)
class BudgetOptions(BudgetLimits):
    """Budgets of sessions, agents and projects in upstream requests and tokens, shared by all replicas."""

    time_zone: Annotated[
        str, Field(max_length=64, description="Time zone of days and months, such as `Europe/Berlin`.")
    ] = "UTC"
    projects: Annotated[
        dict[str, BudgetLimits],
        Field(max_length=10_000, description="Budgets of single projects; unset ones are those of this section."),
    ] = field(default_factory=dict)

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        time_zone(name)
        return name

    def for_project(self, project_id: str) -> BudgetLimits:
        """Return the budgets of a project."""
        own = self.projects.get(project_id)
        if own is None:
            return self
        budgets = {name: getattr(own, name) for name in BUDGETS}
        return BudgetLimits(**{name: getattr(self, name) if mine is None else mine for name, mine in budgets.items()})
