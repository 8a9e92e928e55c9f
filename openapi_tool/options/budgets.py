"""Section `budgets` of the settings: how many upstream requests and tokens callers may use.

A budget is a number of requests or tokens for a *scope*, such as an agent on one day.
"""

from __future__ import annotations

from dataclasses import field
from datetime import UTC, tzinfo
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.options.section import TERABYTE, Options

SCOPES = ("session", "agent_day", "project_day", "project_month")
"""Scopes of budgets, narrowest first: a session, an agent on one day, or a project on one day or in one month."""

BUDGETS = tuple(f"{scope}_{kind}" for scope in SCOPES for kind in ("requests", "tokens"))
"""Names of all budgets, such as `agent_day_requests`."""

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
        """Return the budgets of requests and of tokens for one of `SCOPES`."""
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
        """Return the budgets of a project: its own, and those of the section that it does not set."""
        own = self.projects.get(project_id)
        if own is None:
            return self
        budgets = {}
        for name in BUDGETS:
            own_budget = getattr(own, name)
            budgets[name] = getattr(self, name) if own_budget is None else own_budget
        return BudgetLimits(**budgets)
