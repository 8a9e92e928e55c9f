"""Settings of which calls may be made."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from openapi_tool.settings.section import Section, split
from openapi_tool.tools.policy import Policy, ToolRules, matches_nothing


def _means_a_tool(pattern: str) -> str:
    if matches_nothing(pattern):
        raise ValueError(f"{pattern!r} matches no tool; use canonical names such as jina.search or jina.*, or tag:read")
    return pattern


ToolPattern = Annotated[str, AfterValidator(_means_a_tool)]


class ProjectPolicy(Section):
    """Which tools one project may use."""

    allow: tuple[ToolPattern, ...] = Field(("*",), description="Patterns of canonical names, or `tag:` and a tag.")
    deny: tuple[ToolPattern, ...] = Field((), description="The same; deny wins.")

    def rules(self) -> ToolRules:
        """As the policy reads them."""
        return ToolRules(self.allow, self.deny)


class PolicySettings(Section):
    """Which calls may be made: hooks decide first, then these patterns of canonical names and tags."""

    allow: Annotated[tuple[ToolPattern, ...], NoDecode, BeforeValidator(split)] = Field(
        ("*",), description="Tools that may be used: `jina.*`, `tag:search`; comma-separated in the environment."
    )
    deny: Annotated[tuple[ToolPattern, ...], NoDecode, BeforeValidator(split)] = Field(
        (), description="Tools that may not be used; wins over `allow`."
    )
    projects: dict[str, ProjectPolicy] = Field(
        default_factory=dict, description="`allow` and `deny` of single projects, which only take more away."
    )
    hooks: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = Field(
        (), description="Entry points of the group `openapi_tool.hooks` that every call passes, in this order."
    )
    hook_timeout_ms: int = Field(1_000, ge=1, le=30_000, description="Time of one hook; a slower one denies.")

    def policy(self) -> Policy:
        """The effective tool sets."""
        projects = {name: project.rules() for name, project in self.projects.items()}
        return Policy(ToolRules(self.allow, self.deny), projects)
