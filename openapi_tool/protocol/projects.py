"""Projects and their agents, by which calls are charged and take turns; names of projects in the records of quotas."""

from __future__ import annotations

from typing import NamedTuple


class AgentKey(NamedTuple):
    """Agent of a project: calls of projects, and of agents in a project, take turns."""

    project: str
    agent: str


def quota_project(namespace: str, project_id: str) -> str:
    """Return a project's name in the records of quotas, which kernels share; no project id contains the blank.

    `namespace` is the kernel's (`Settings.quota_namespace`), and may be empty.
    """
    return f"{namespace} {project_id}".lstrip()


def bare_project(name: str) -> str:
    """Return the id of a project from its name in the records of quotas."""
    return name.rpartition(" ")[2]
