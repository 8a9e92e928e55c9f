"""Projects and agents: who is charged for a call, and whose turn it is.

In the records of quotas, which several kernels may share, a project has a name of its own (`quota_project`).
"""

from __future__ import annotations

from typing import NamedTuple


class AgentKey(NamedTuple):
    """Agent of a project. Calls of projects take turns, and those of agents within a project."""

    project: str
    agent: str


def quota_project(namespace: str, project_id: str) -> str:
    """Return a project's name in the records of quotas: namespace and id, separated by a blank: `v1r3 proj_a`.

    `namespace` is the kernel's (`Settings.quota_namespace`). If it is empty, the name is the id. No project id contains
    a blank.
    """
    return f"{namespace} {project_id}".lstrip()


def bare_project(name: str) -> str:
    """Return the id of a project from its name in the records of quotas."""
    return name.rpartition(" ")[2]
