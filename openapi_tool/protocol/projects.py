"""Names of projects in the records of quotas, which several kernels may share."""

from __future__ import annotations


def scoped_project(scope: str, project_id: str) -> str:
    """Return a project's name among the kernels that share the records; no project id contains the blank."""
    return f"{scope} {project_id}".lstrip()


def bare_project(scoped: str) -> str:
    """Return the id of a scoped project."""
    return scoped.rpartition(" ")[2]
