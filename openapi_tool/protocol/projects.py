"""Names of projects in a process that serves kernels of several versions."""

from __future__ import annotations


def scoped_project(scope: str, project_id: str) -> str:
    """Return a project's name among kernels of several versions; no project id contains the blank."""
    return f"{scope} {project_id}".lstrip()


def bare_project(scoped: str) -> str:
    """Return the id of a scoped project."""
    return scoped.rpartition(" ")[2]
