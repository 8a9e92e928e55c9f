"""Projects and their agents, by which calls are charged and take turns; names of projects in the records of quotas."""

from __future__ import annotations

from typing import NamedTuple


class AgentKey(NamedTuple):
    """Agent of a project: calls of projects, and of agents in a project, take turns."""

    project: str
    agent: str


def scoped_project(scope: str, project_id: str) -> str:
    """Return a project's name among the kernels that share the records; no project id contains the blank."""
    return f"{scope} {project_id}".lstrip()


def bare_project(scoped: str) -> str:
    """Return the id of a scoped project."""
    return scoped.rpartition(" ")[2]
